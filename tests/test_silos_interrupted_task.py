"""A long task that is interrupted between two epochs continues there, bit-identically."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmq.config.scenario import Backbone, Objective, Training
from fedmq.encoders.base import InputSpec
from fedmq.errors import DiskError
from fedmq.models.build import build_towers
from fedmq.models.optimiser import FusedOptimiser, optimiser
from fedmq.models.two_tower import TwoTower
from protocols.parts import epochs, training
from silos import personal_state
from tests.in_process_run import run
from tests.threaded_run import resolved

SETTINGS = ("rounds=2", "training.warmup_rounds=1", "training.local_epochs=4", "launcher=inline")


@pytest.fixture(autouse=True)
def every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(personal_state, "SNAPSHOT_SECONDS", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "epochs"),
    [
        (("protocol=rcsr", "protocol.lambda_s=0.1"), 3),
        (("protocol=fedavg",), 1),
        (("protocol=fedavg", "training.optimizer=sgd", "training.momentum=0.9"), 3),
        (("protocol=fedavg", "objective=dcmh", "objective.bits=8"), 1),
    ],
    ids=["rcsr", "fedavg", "momentum", "dcmh"],
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
    restored: list[bool] = []
    real = epochs.restore

    def watched(*arguments: object) -> object:
        found = real(*arguments)  # type: ignore[arg-type]
        restored.append(found is not None)
        return found

    monkeypatch.setattr(epochs, "restore", watched)
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
    assert restored == [False]
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


def trained() -> tuple[TwoTower, dict[str, FusedOptimiser], np.random.Generator, torch.Generator]:
    """A model of precomputed features with its optimiser after one step, and the generators of training."""
    inputs = InputSpec((4,), (4,), "float32", "float32", (), ())
    model = build_towers(Backbone(name="features", bottleneck=4), Objective(base="info_nce"), inputs, (), 0)
    made = optimiser(model, Training(), 0.1, [model.branch("image")])
    for part in model.within([model.branch("image")]):
        part.grad = torch.ones_like(part)
    made.step()
    return model, {"image": made}, np.random.default_rng(3), torch.Generator()


@pytest.mark.parametrize(
    "change",
    [
        {"model": torch.zeros(3)},
        {"model": None},
        {"image.first.0": None},
        {"image.first.0": torch.zeros(1)},
        {"image.steps.0": torch.tensor(float("nan"))},
        {"other": torch.zeros(1)},
        {"dropout": torch.zeros(3, dtype=torch.uint8)},
        {"sums": torch.tensor([1.0, float("nan")], dtype=torch.float64)},
        {"sums": torch.tensor([1.0, -1.0], dtype=torch.float64)},
        *({"order": epochs._bytes(value)} for value in ([9, {}], [1, {}], [1], 5, [1.0, "state"], ["1", "state"])),
        *({"order": epochs._bytes([value, "state"])} for value in (0, 4, True)),
        {"order": torch.tensor([255, 0], dtype=torch.uint8)},
    ],
)
def test_a_snapshot_that_no_training_could_have_made_is_ignored(change: dict[str, torch.Tensor | None]) -> None:
    task, parts = torch.tensor([1], dtype=torch.uint8), trained()
    whole = epochs.snapshot(task, 2, *parts, torch.tensor([1.5, 8.0], dtype=torch.float64))
    assert epochs.restore(whole, task, 4, *trained()) is not None
    state = parts[2].bit_generator.state
    changed = {name: value for name, value in {**whole, **change}.items() if value is not None}
    text = bytes(changed["order"].numpy()).replace(b'"state"]', f"{json.dumps(state)}]".encode())
    changed["order"] = torch.tensor(list(text), dtype=torch.uint8)
    fresh = trained()
    before = fresh[0].flat.detach().clone()
    assert epochs.restore(changed, task, 4, *fresh) is None
    assert torch.equal(fresh[0].flat, before) and fresh[2].bit_generator.state == trained()[2].bit_generator.state
