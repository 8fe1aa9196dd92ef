"""A silo's GPU memory, and errors that do not belong to a task."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fedmq.errors import DiskError, RunError
from fedmq.storage.logs import QUIET
from fedmq.wire.messages import Kind
from silos import program


class Slots:
    def __init__(self, told: list[str]) -> None:
        self.told = told

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        yield
        self.told.append("slot free")


def replied(monkeypatch: pytest.MonkeyPatch, error: Exception | None, *fatal: type[Exception]) -> list[str]:
    told: list[str] = []

    def respond(_message: Any) -> tuple[()]:
        if error is not None:
            raise error
        return ()

    monkeypatch.setattr(program, "release_unused_gpu_memory", lambda: told.append("given back"))
    facts, epochs = SimpleNamespace(name="silo-00"), SimpleNamespace(epochs_before=0)
    silo: Any = SimpleNamespace(respond=respond, simulated=True, facts=facts, epochs=epochs, errors=None)
    link: Any = SimpleNamespace(send=lambda kind, *_, **__: told.append(str(kind)))
    header = SimpleNamespace(sequence=1, base_version=0, kind=Kind.TASK)
    message: Any = SimpleNamespace(header=header, task=None)
    slots: Any = Slots(told)
    ready: Any = SimpleNamespace(silo=silo, agreed=SimpleNamespace(check=lambda _: None))
    program.reply_to(link, ready, slots, message, QUIET, (*program.FATAL_ERRORS, *fatal))
    return told


def test_a_silo_frees_its_gpu_memory_before_the_next_one_may_train(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replied(monkeypatch, None)[:2] == ["given back", "slot free"]


def test_a_failed_task_is_reported_and_the_silo_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replied(monkeypatch, RunError("training diverged")) == ["error"]


class Spoiled(RuntimeError):
    """Like torch's error after which the GPU is unusable until the process ends."""


@pytest.mark.parametrize("error", [DiskError("full"), Spoiled("CUDA error: an illegal memory access")])
def test_an_unrecoverable_error_ends_the_process(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        replied(monkeypatch, error, Spoiled)
