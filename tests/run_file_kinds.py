"""Kinds of files that a run, a search, an audit or a cluster leaves behind, and the commands that read them again."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import protocols
from coordinator.data_admission import OwnDataAdmission
from coordinator.peers import InProcessPeers
from coordinator.program import CoordinatorArguments, run_coordinator
from coordinator.round_events import Phase
from fedmq.cli import operate
from fedmq.config.resolve import ResolvedRun, Source, load, read, resolve
from fedmq.data.splits import SPLITS
from fedmq.errors import InputError, RunError
from fedmq.experiments import files, process_pool, tuning
from fedmq.experiments.runner import Workplace
from fedmq.launch import remote_peer
from fedmq.launch.supervisor import inline_peers
from fedmq.runs.data_records import AgreementRecord
from fedmq.runs.status import SiloPhase, SiloStatus, StatusFile, read_status
from fedmq.seeds import numpy_generator
from fedmq.storage.json_files import read_json
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.payloads import DataFormat, DataStatement
from silos.tasks import SiloArguments
from tests.damaged_files import Folder, Kind, files_of

_RUN = "fuzz-0-0123456789ab"
_SILOS = ("silo-00", "silo-01")
_SCENARIO = {
    "name": "fuzz",
    "rounds": 4,
    "protocol": {"name": "fedbridge", "personal": True, "personal_onset": 0, "personal_epochs": 1, "warmup": 1},
    "backbone": {"name": "features", "bottleneck": 4},
    "silos": {"count": 2},
    "partition": {"kind": "dir_clusters", "alpha": 5.0, "clusters": 2, "sizes": "equal"},
    "training": {"learning_rate": 0.003, "batch_size": 8},
    "evaluation": {"every": 2},
    "launcher": "inline",
}


def check_sane(value: Any, place: str = "") -> None:
    """Check what a reader has accepted: numbers are finite, and not negative.

    Raises:
        AssertionError: one is not, which is a failure of the reader.
    """
    match value:
        case Mapping():
            for name, each in value.items():
                check_sane(each, f"{place}.{name}")
        case list() | tuple():
            for number, each in enumerate(value):
                check_sane(each, f"{place}.{number}")
        case int() | float():
            assert math.isfinite(value) and value >= 0, f"accepted {place[1:]} = {value}"


# --- run folders ----------------------------------------------------------------------------------------------------
def _status() -> Folder:
    silo = SiloStatus(phase=SiloPhase.TRAINING, heard="2026-11-26T12:00:01+00:00", task_seconds=1.5, limit=60.0, up=10)
    status = StatusFile(
        run=_RUN, written="2026-11-26T12:00:02+00:00", phase="collecting", round=2, rounds=5, loss=1.25,
        metrics={"mean_r1": 0.5}, metrics_round=2, up=10, down=20, now=3.5, elapsed=4.5, refused={"replay": 1},
        last_refused="silo-00: a replay", silos={"silo-00": silo, "silo-01": SiloStatus(phase=SiloPhase.ABSENT)},
    )  # fmt: skip
    return {"status.json": status.model_dump_json().encode()}


def _read_status(folder: Path) -> None:
    """``fedmq status RUN`` and ``--json``."""
    status = read_status(RunFolder(folder).status)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        operate._show(status, datetime(2026, 11, 26, 12, 1, tzinfo=UTC))
    json.dumps(status.model_dump(mode="json"), allow_nan=False)
    check_sane(status.model_dump(exclude={"loss"}))
    assert status.round <= status.rounds, f"accepted round {status.round} of {status.rounds}"


def _statement(mask: int) -> tuple[DataStatement, DataFormat]:
    counts = np.zeros((len(SPLITS), 3), np.int64)
    counts[0, 0] = 5
    held = DataFormat(
        label_names=("a", "b"), vocabulary=(), image_shape=np.array([4]), text_shape=np.array([4]),
        image_dtype="float32", text_dtype="float32", image_encoder="none", text_encoder="none",
        mean=np.zeros(0, np.float32), std=np.zeros(0, np.float32),
    )  # fmt: skip
    return DataStatement("a" * 64, mask, counts), held


def _agreement() -> Folder:
    stated = {name: _statement(3) for name in _SILOS}
    record = AgreementRecord.of(_RUN, stated, stated["silo-00"][1])
    return {"agreement.json": json.dumps(record.plain()).encode()}


def _read_agreement(folder: Path) -> None:
    """What a coordinator that resumes a run reads, ``fedmq audit --site`` and ``fedmq data digest``."""
    known = read_json(folder / "agreement.json", AgreementRecord, "what the silos of this run agreed on")
    admission = OwnDataAdmission(_SILOS, _RUN, evaluator=False, known=known)
    data = admission.run_data(folder)
    check_sane([data.inputs.image_shape, data.inputs.text_shape, data.inputs.std])
    check_sane([each.tolist() for each in (data.counts or {}).values()])
    assert np.isfinite(data.inputs.mean).all(), f"accepted mean {data.inputs.mean}"
    assert all(silo.image or silo.text for silo in data.silos), "accepted a silo without modalities"
    json.dumps(admission.record().plain(), allow_nan=False)


@cache
def scenario_file() -> Path:
    """A scenario of two silos with 24 items."""
    folder = Path(_kept().name)
    generator = numpy_generator(0, "fuzz", "run")
    vectors = generator.normal(size=(24, 8)).astype(np.float32)
    split = np.array(["train"] * 16 + ["val"] * 4 + ["test"] * 4)
    np.savez(folder / "features.npz", image=vectors, text=vectors[:, None], labels=np.arange(24) % 2, split=split)
    scenario = {**_SCENARIO, "data": {"name": "features", "path": str(folder / "features.npz")}}
    (folder / "fuzz.yaml").write_text(yaml.safe_dump(scenario))
    return folder / "fuzz.yaml"


@cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    """A folder that lives as long as this process."""
    return tempfile.TemporaryDirectory(prefix="fedmq-fuzz-kept-")


@cache
def resolved_run() -> ResolvedRun:
    """The run that the kinds of run folders are of."""
    return resolve(Source(scenario_file(), load(scenario_file())), protocols)


def _run(root: Path, *, resume: bool, until: int) -> Phase:
    """Run or resume the scenario in this process, up to a number of merges."""
    run, last = resolved_run(), RunFolder(root).checkpoints / f"version-{until:06d}"
    return run_coordinator(
        CoordinatorArguments(run, InProcessPeers.uri, root, root, resume, None, report=True),
        stop_wanted=last.exists,
        peers=partial(inline_peers, run, RunFolder(root), None),
    ).phase


def run_to_end(root: Path) -> None:
    """Run the scenario in this process."""
    _run(root, resume=False, until=99)


@cache
def _stopped() -> Mapping[str, bytes]:
    """The files of a run that was stopped before its last round."""
    return files_of(partial(_run, resume=False, until=2))


def _part(beginning: str) -> Folder:
    return {name: content for name, content in _stopped().items() if name.startswith(beginning)}


def _newest() -> Folder:
    newest = max(name.split("/")[1] for name in _part("checkpoints/version-"))
    return _part(f"checkpoints/{newest}/")


def _completed(root: Path, valid: Folder) -> dict[str, Any]:
    """Resume a run whose other files are undamaged; returns its summary.

    Raises:
        RunError: the run ended with a message.
    """
    for path, content in _stopped().items():
        if path not in valid:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
    phase = _run(root, resume=True, until=99)
    assert phase is Phase.DONE, f"ended with {phase}"
    summary: dict[str, Any] = json.loads((root / "summary.json").read_bytes())
    return summary


def _result(summary: Mapping[str, Any]) -> str:
    """The model's digest and the metrics of personal models."""
    return json.dumps([summary["model_digest"], summary.get("personal_per_silo")], sort_keys=True)


@cache
def _expected() -> str:
    """The result of an undamaged run."""
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as name:
        return _result(_completed(Path(name), {}))


def _resume(valid: Callable[[], Folder], folder: Path) -> None:
    """``fedmq scenario --resume``: it ends with the model of the undamaged run, or an error says why not."""
    expected, gone = _expected(), [name for name in valid() if not os.path.lexists(folder / name)]
    try:
        summary = _completed(folder, valid())
    except RunError as error:
        raise InputError("the run", str(error), "") from None
    assert summary["versions"] == _SCENARIO["rounds"], f"accepted {summary['versions']} versions"
    check_sane({key: each for key, each in summary.items() if key not in ("change", "fairness")})
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        # Losses may be negative.
        check_sane({key: each for key, each in json.loads(line).items() if key not in ("loss", "losses")})
    for problem in ("unusable_replies", "personal_missing"):
        if summary.get(problem):
            raise InputError("the run", str(summary[problem]), "")
    # A silo continues from the state before one that was deleted, as the error for a damaged one says.
    assert gone or _result(summary) == expected, "accepted, with another model"


# --- searches -------------------------------------------------------------------------------------------------------
class _Here:
    """A trial's run in this process."""

    def __init__(self, job: process_pool.Job) -> None:
        from typer.testing import CliRunner

        from fedmq.cli import main

        job.log.write_text("")
        self.exitcode = CliRunner().invoke(main.app, list(job.words)).exit_code

    def terminate(self) -> None:
        """It is over."""

    kill = join = terminate


def _resolve_trial(file: Path, settings: Any, seed: int | None) -> ResolvedRun:
    more = [] if seed is None else [f"seed={seed}"]
    return resolve(read(file, (*settings, *more)), protocols, weights=False)


def _tune(folder: Path, trials: int, *, stopped: bool) -> tuning.Tuned:
    file = Path(_kept().name) / "tune.yaml"
    search = {"training.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}, "training.batch_size": [4, 8]}
    spec = {"tune": str(scenario_file()), "search": search, "trials": trials, "rounds": 1, "batch": 2, "startup": 2}
    file.write_text(yaml.safe_dump(spec))
    plan = files.plan_search(file, files.read_search(file), _resolve_trial)
    place = Workplace(folder / "runs", _resolve_trial, lambda _: "", False, 2, _Here)  # type: ignore[arg-type]
    return tuning.tune(plan, folder, place, lambda *_: None, lambda: lambda: stopped)


@cache
def _searched() -> Folder:
    """A search with two finished trials, of which one run's summary is left."""
    found = files_of(partial(_tune, trials=2, stopped=False))
    runs, search = ("summary.json", "metrics.jsonl", "scenario.yaml"), ("search.json", "study.journal")
    return {at: file for at, file in found.items() if at in search or (at.endswith(runs) and at.count("/") == 2)}


def _read_search(folder: Path) -> None:
    """``fedmq tune`` with two more trials, stopped before it starts a run."""
    for trial in _tune(folder, 4, stopped=True).trials:
        assert trial.values.keys() == {"training.learning_rate", "training.batch_size"}, f"accepted {trial}"


# --- clusters -------------------------------------------------------------------------------------------------------
def _given(path: Path) -> bytes:
    return read_regular(path, "a record", remote_peer.MOST_BYTES)


def _peer_task() -> Folder:
    arguments = SiloArguments(resolved_run(), "silo-01", "tcp://host:1", Path("/keys"), Path("/out"))
    return {"task.json": remote_peer.encode(remote_peer.PeerTask.of(arguments, gpu=False))}


def _read_task(folder: Path) -> object:
    task = remote_peer.decode(remote_peer.PeerTask, _given(folder / "task.json"), "the task")
    return task.arguments(folder, folder)


def _ended() -> Folder:
    log = b'{"n": 0}\n'
    files = [{"path": path, "content": base64.b64encode(log).decode()} for path in (
        "messages/silo-01.jsonl", "checkpoints/silos/silo-01/task-000000001.safetensors")]  # fmt: skip
    return {"ended.json": json.dumps({"code": 1, "error": "it ended", "files": files}).encode()}


def _read_ended(folder: Path) -> None:
    ended = remote_peer.decode(remote_peer.Ended, _given(folder / "ended.json"), "the result")
    out = folder / "run"
    out.mkdir(exist_ok=True)
    remote_peer.store_files(out, ["silo-01"], ended.files, "the result")
    for path in out.rglob("*"):
        assert path.is_dir() or path.parts[-2] in ("messages", "silo-01"), f"wrote {path}"


def _sent_files() -> Folder:
    files = [{"path": path, "content": "aGVsbG8="} for path in ("keys/silo-01.key", "run/messages/silo-01.jsonl")]
    return {"files.json": json.dumps({"files": files}).encode()}


def _read_sent_files(folder: Path) -> None:
    sent = remote_peer.decode(remote_peer.PeerFiles, _given(folder / "files.json"), "the files")
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as name, contextlib.suppress(FileExistsError):
        remote_peer.write_private(Path(name), sent.files)


def _resumed(beginning: Callable[[], Folder]) -> Kind:
    valid = cache(beginning)
    return Kind(valid, partial(_resume, valid))


RUN_KINDS: Mapping[str, Kind] = {
    "status": Kind(_status, _read_status),
    "agreement": Kind(_agreement, _read_agreement),
    "checkpoint": _resumed(_newest),
    "personal states": _resumed(partial(_part, "checkpoints/silos/")),
    "metrics of a resumed run": _resumed(partial(_part, "metrics.jsonl")),
    "log of a resumed run": _resumed(partial(_part, "messages/")),
    "search": Kind(_searched, _read_search),
    "task of a cluster": Kind(_peer_task, _read_task),
    "result of a cluster": Kind(_ended, _read_ended),
    "files of a cluster": Kind(_sent_files, _read_sent_files),
}
