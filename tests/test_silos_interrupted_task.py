"""A long task that is interrupted between two epochs continues there, bit-identically."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedmq.errors import DiskError
from protocols.parts import training
from silos import personal_state
from tests.in_process_run import run
from tests.threaded_run import resolved

SETTINGS = ("rounds=2", "training.warmup_rounds=1", "training.local_epochs=4", "launcher=inline", "silos.slots=1")


@pytest.fixture(autouse=True)
def every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(personal_state, "SNAPSHOT_SECONDS", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "epochs"),
    [
        (("protocol=rcsr", "protocol.lambda_s=0.1"), 3),
        (("protocol=fedavg", "privacy={items: {group: 4, clip_norm: 0.1, noise_multiplier: 1}}"), 2),
        (("protocol=fedavg",), 1),
        (("protocol=fedavg", "training.optimizer=sgd", "training.momentum=0.9"), 3),
        (("protocol=fedavg", "objective=dcmh", "objective.bits=8"), 1),
    ],
    ids=["rcsr", "items", "fedavg", "momentum", "dcmh"],
)
def test_an_interrupted_task_gives_the_same_reply(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: tuple[str, ...], epochs: int
) -> None:
    settings = (*method, *SETTINGS)
    trained, done, kill_at = training.train_epoch, [0], [-1]

    def killing(*arguments: object) -> tuple[int, bool]:
        if done[0] == kill_at[0]:
            kill_at[0] = -1
            raise DiskError("killed")  # an error that ends a silo's process
        done[0] += 1
        return trained(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "train_epoch", killing)
    whole = run(resolved(tiny, *settings), tmp_path / "whole").summary
    assert whole is not None
    all_epochs = done[0]
    done[0], kill_at[0] = 0, epochs
    scenario = resolved(tiny, *settings)
    with pytest.raises(DiskError):
        run(scenario, tmp_path / "cut")
    kept = list((tmp_path / "cut" / "checkpoints" / "silos").glob("*/epochs.safetensors"))
    resumable = "dcmh" not in "".join(method)
    assert len(kept) == resumable
    noted: list[int] = []
    monkeypatch.setattr(personal_state.TaskEpochs, "resumed", lambda _, number: noted.append(number))
    again = run(scenario, tmp_path / "cut", resume=True).summary
    assert again is not None and noted == [epochs] * resumable
    assert again.model_digest == whole.model_digest
    assert done[0] == all_epochs + (0 if resumable else epochs), "the epochs that were done are not repeated"
    assert not list((tmp_path / "cut" / "checkpoints" / "silos").glob("*/epochs.safetensors")), "removed after the task"


@pytest.mark.slow
def test_a_snapshot_of_another_task_is_ignored(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []
    monkeypatch.setattr(personal_state.TaskEpochs, "resumed", lambda _, number: noted.append(number))
    scenario = resolved(tiny, *SETTINGS)
    whole = run(scenario, tmp_path / "a").summary
    (tmp_path / "b" / "checkpoints" / "silos" / "silo-00").mkdir(parents=True)
    path = tmp_path / "b" / "checkpoints" / "silos" / "silo-00" / "epochs.safetensors"
    store = personal_state.StateStore(path.parent)
    from fedmq.clock import WallClock

    store.epochs(WallClock()).save(lambda: {"task": torch.tensor([1, 2, 3], dtype=torch.uint8)})
    assert path.exists()
    again = run(scenario, tmp_path / "b").summary
    assert whole is not None and again is not None
    assert again.model_digest == whole.model_digest
    assert not noted
    # A damaged one is ignored, too.
    path.write_bytes(b"\x00" * 9)
    assert store.epochs(WallClock()).load() == {}
    assert np.isfinite(whole.metrics["mean_r1"])


def test_no_snapshot_is_kept_of_a_short_task(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(personal_state, "SNAPSHOT_SECONDS", 10.0)
    saved: list[Path] = []
    monkeypatch.setattr(personal_state, "write_atomically", lambda path, write, **_: saved.append(path))
    run(resolved(tiny, *SETTINGS, "protocol=fedavg"), tmp_path)
    assert not [path for path in saved if path.name == "epochs.safetensors"]
