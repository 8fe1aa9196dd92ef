"""Kinds of files that fedmq keeps for itself: snapshots of tasks, the cache, trackers, and what live pages follow."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import blake3
import numpy as np
import torch
from torch import Tensor

from fedmq.clock import WallClock
from fedmq.config.resolve import load
from fedmq.config.scenario import Backbone, Scenario, Training
from fedmq.data.extract import store
from fedmq.encoders.base import InputSpec
from fedmq.errors import InputError, RunError
from fedmq.federation.population import build_population
from fedmq.federation.protocol import EpochStore, Local, SiloFacts, Task
from fedmq.models.build import build
from fedmq.models.optimiser import FusedOptimiser, optimiser
from fedmq.models.two_tower import TwoTower
from fedmq.runs import live_server
from fedmq.runs.trackers import End, TrackedRun, Tracker, Value, tracking
from fedmq.seeds import numpy_generator, torch_generator
from fedmq.storage.cache import cache_folder, file_digests
from fedmq.storage.run_folder import RunFolder
from protocols.parts.training import Snapshots
from silos import personal_state
from tests.damaged_files import Folder, Kind, files_of
from tests.run_file_kinds import resolved_run, run_to_end, scenario_file
from tests.small_federation import share

_EPOCHS = 4
_Parts = tuple[TwoTower, Mapping[str, FusedOptimiser], np.random.Generator, torch.Generator]


# --- snapshots of a task --------------------------------------------------------------------------------------------
def _begun() -> _Parts:
    """A model and all that its training depends on, before the first epoch."""
    inputs = InputSpec((4,), (4,), "float32", "float32", (), ())
    model = build(Backbone(name="features", bottleneck=4), inputs, 0)
    training = Training(optimizer="adam")
    optimisers = {name: optimiser(model, training, 0.1, [model.branch(name)]) for name in ("image", "text")}
    return model, optimisers, numpy_generator(0, "order"), torch_generator(0, "dropout")


def _step(model: TwoTower, optimisers: Mapping[str, FusedOptimiser]) -> None:
    """One step of each optimiser with gradients of one."""
    for name, each in optimisers.items():
        for part in model.within([model.branch(name)]):
            part.grad = torch.ones_like(part)
        each.step()


class _Kept:
    """A store that holds the snapshot of a task, without a file."""

    def __init__(self, kept: Mapping[str, Tensor]) -> None:
        self.kept, self.noted = kept, 0

    def load(self) -> Mapping[str, Tensor]:
        return self.kept

    def resumed(self, epochs: int) -> None:
        self.noted = epochs

    def save(self, snapshot: Callable[[], Mapping[str, Tensor]]) -> None:
        self.kept = snapshot()


def _snapshots(store: EpochStore, parts: _Parts) -> Snapshots:
    """The snapshots of one task of a silo."""
    model, *rest = parts
    silo = SiloFacts("silo-00", 0, True, True)
    local = Local(silo, share(silo, 4), model, {}, (), epochs=store)
    return Snapshots(local, Task(1, 0, 0, 0.1, ()), torch.zeros(model.layout.size), *rest)


@cache
def _trained() -> Mapping[str, Tensor]:
    """A snapshot after two of four epochs."""
    parts, store = _begun(), _Kept({})
    _step(parts[0], parts[1])
    parts[2].random(5)
    torch.rand(3, generator=parts[3])
    _snapshots(store, parts).keep(2, torch.tensor(1.5, dtype=torch.float64), 8)
    return store.kept


@cache
def _snapshot() -> Folder:
    def make(folder: Path) -> None:
        personal_state.TaskEpochs(folder / "silo-00" / "epochs.safetensors", WallClock()).save(_trained)

    with _every_epoch():
        return files_of(make)


@contextlib.contextmanager
def _every_epoch() -> Iterator[None]:
    kept, personal_state.SNAPSHOT_SECONDS = personal_state.SNAPSHOT_SECONDS, 0.0
    try:
        yield
    finally:
        personal_state.SNAPSHOT_SECONDS = kept


def _read_snapshot(folder: Path) -> None:
    """A silo that was killed continues its task exactly as it was, or starts it over.

    Raises:
        InputError: the task starts over.
    """
    parts = _begun()
    before = parts[0].flat.detach().clone()
    saved = personal_state.TaskEpochs(folder / "silo-00" / "epochs.safetensors", WallClock()).load()
    store = _Kept(saved)
    done, total, seen = _snapshots(store, parts).resume(torch.zeros((), dtype=torch.float64))
    if not store.noted:
        assert torch.equal(parts[0].flat, before), "refused, but changed the model"
        raise InputError("the snapshot", "nothing to continue from", "")
    assert 0 < done < _EPOCHS, f"accepted {done} epochs"
    _snapshots(store, parts).keep(done, total, seen)
    assert store.kept.keys() == _trained().keys(), "accepted other tensors"
    assert all(torch.equal(store.kept[name], value) for name, value in _trained().items()), "accepted other values"


# --- the cache ------------------------------------------------------------------------------------------------------
def _scenario() -> Scenario:
    return load(scenario_file())


@cache
def _dealt() -> Folder:
    found = files_of(lambda folder: build_population(_scenario(), cache=folder))
    return {path: content for path, content in found.items() if path.endswith(".npz")}


@cache
def _shares() -> str:
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as name:
        return _rows(Path(name))


def _rows(cache_folder: Path) -> str:
    population = build_population(_scenario(), cache=cache_folder)
    parts = (*population.train, population.evaluated)
    return json.dumps([each.tolist() for each in parts])


def _read_dealt(folder: Path) -> None:
    """What a process of a run reads; it deals the items again if the file is damaged."""
    assert _rows(folder) == _shares(), "accepted another partition"


def _encoded(part: range) -> np.ndarray:
    return np.stack([np.arange(4, dtype=np.float32) + row for row in part])


def _interrupted() -> Folder:
    def encode(part: range) -> np.ndarray:
        if part.start >= 6:
            raise KeyboardInterrupt
        return _encoded(part)

    def make(folder: Path) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            store(folder / "rows.npy", 12, 3, encode, lambda _: None)

    return {name: content for name, content in files_of(make).items() if name.endswith((".partial", ".done"))}


def _read_interrupted(folder: Path) -> None:
    """Preparing data continues; it starts over if the rows until then are damaged."""
    try:
        path = store(folder / "rows.npy", 12, 3, _encoded, lambda _: None)
    except RunError as error:  # a folder in place of a file
        raise InputError("the cache", str(error), "") from None
    found = np.load(path, allow_pickle=False)
    assert np.array_equal(found, _encoded(range(12))), "accepted other rows"


@cache
def _set_of_files() -> Sequence[Path]:
    """Files that live as long as this process."""
    folder = Path(_kept().name)
    files = [folder / f"{number}.png" for number in range(5)]
    for number, path in enumerate(files):
        path.write_bytes(bytes([number]) * 10)
    return files


@cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fedmq-fuzz-kept-")


def _digested() -> Folder:
    """Digests of a set's files in the cache, which the variable FEDMQ_CACHE names."""
    made = cache_folder() / "file_digests.sqlite"
    file_digests(_set_of_files())
    return {made.name: made.read_bytes()}


def _read_digested(folder: Path) -> None:
    """What preparing data reads of the cache; a file is read again if its digest is damaged."""
    kept = cache_folder()
    shutil.rmtree(kept, ignore_errors=True)
    shutil.move(folder, kept)
    expected = [blake3.blake3(path.read_bytes()).hexdigest() for path in _set_of_files()]
    assert file_digests(_set_of_files()) == expected, "accepted other digests"


# --- trackers -------------------------------------------------------------------------------------------------------
class _Recorder(Tracker):
    """A tracker that keeps what it receives."""

    where = "here"

    def __init__(self, run: TrackedRun, key: str | None) -> None:
        self.key, self.received = key or "recorder", list[tuple[int, int]]()
        assert len(self.key) <= 64 and self.key.isprintable() and "/" not in self.key, f"accepted key {key!r}"
        json.dumps({"id": run.id, **run.parameters}, allow_nan=False)

    def log(self, values: Sequence[Value], version: int, at: float) -> None:
        assert np.isfinite(at), f"accepted time {at}"
        self.received.append((version, len(values)))

    def flush(self) -> None: ...

    def finish(self, end: End, result: Mapping[str, float]) -> None:
        assert all(np.isfinite(value) for value in result.values()), f"accepted {result}"


@cache
def _tracked() -> Folder:
    state = {"trackers": {"csv": {"key": "recorder", "versions": {"merge": 1, "evaluation": 0}}}}
    return {"trackers/state.json": json.dumps(state).encode(), **files_of(run_to_end, "metrics.jsonl", "summary.json")}


def _read_tracked(folder: Path) -> None:
    """A run that is resumed passes on the lines that its trackers have not received."""
    run, notices = resolved_run(), list[str]()
    scenario = run.scenario.model_copy(update={"track": ("csv",)})
    with tracking(replace(run, scenario=scenario), RunFolder(folder), notices.append, {"csv": _Recorder}):
        pass
    assert notices and notices[-1] == "tracked: here", f"ended with {notices}"
    assert all("\n" not in each for each in notices), f"several lines: {notices}"
    if len(notices) > 1:
        raise InputError("the state", notices[0], "")


# --- live pages -----------------------------------------------------------------------------------------------------
@cache
def _followed() -> Folder:
    names = ("scenario.yaml", "metrics.jsonl", "status.json", "summary.json", "messages/coordinator.jsonl")
    return files_of(lambda folder: run_to_end(folder / "run"), *(f"run/{name}" for name in names))


def _read_followed(folder: Path) -> None:
    """``fedmq board`` and the live page of a run."""
    run = live_server.GrowingRun(RunFolder(folder / "run"), {})
    run.update()
    json.loads(live_server._update(run))
    for row in live_server.rows_of(folder):
        json.dumps([row.name, row.state, row.metrics, row.date, row.gallery], allow_nan=False)


STATE_KINDS: Mapping[str, Kind] = {
    "epoch snapshot": Kind(_snapshot, _read_snapshot),
    "partition in the cache": Kind(_dealt, _read_dealt),
    "file digests in the cache": Kind(_digested, _read_digested),
    "interrupted extraction": Kind(_interrupted, _read_interrupted),
    "trackers": Kind(_tracked, _read_tracked),
    "followed run": Kind(_followed, _read_followed),
}
