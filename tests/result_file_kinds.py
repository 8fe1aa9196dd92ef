"""Kinds of files of results and prepared data, and the commands that read them again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from coordinator.faults import FaultInjector
from coordinator.participation import read_trace
from fedmq.audit import report
from fedmq.audit.log_checks import audit_run
from fedmq.clock import VirtualClock, WallClock
from fedmq.config.resolve import load
from fedmq.config.scenario import Backbone
from fedmq.data.item_digests import item_digests
from fedmq.data.prepare import prepare
from fedmq.data.prepared_arrays import open_prepared
from fedmq.data.splits import SPLITS
from fedmq.errors import InputError
from fedmq.federation.faults import FaultSchedule
from fedmq.retrieval import plots, report_data
from fedmq.retrieval.model_export import export_hub
from fedmq.retrieval.released_model import open_model, open_release
from fedmq.runs import results
from fedmq.runs.report import run_report
from fedmq.runs.report.logs import read_logs
from fedmq.storage.run_folder import RunFolder, open_run
from fedmq.wire.keys import passphrase_in
from fedmq.wire.log_records import GENESIS, canonical, chain
from fedmq.wire.message_log import MessageLog
from tests import threaded_run
from tests.damaged_files import Folder, Kind, files_of
from tests.run_file_kinds import check_sane, run_to_end, scenario_file

_SILOS = ("silo-00", "silo-01")


# --- results --------------------------------------------------------------------------------------------------------
def _finish(root: Path) -> None:
    run_to_end(root)
    report_data.write(open_release(root, "cpu"), None)


@cache
def _finished() -> Folder:
    """The files that a report is made of."""
    names = ("scenario.yaml", "summary.json", "metrics.jsonl", "report_data.json", "messages/coordinator.jsonl")
    return files_of(_finish, *names)


def _read_results(folder: Path) -> None:
    """``fedmq report``, of one run and of two, and the results that ``fedmq compare`` takes from a run."""
    run = open_run(folder)
    run_report.write(run, {}, read_logs(run, damaged=False))
    run_report.side_by_side([run, run])
    found = results.read(run)
    for metric in ("mean_r1", "fairness.std_r1", "bytes.up", "personal.mean_r1"):
        with contextlib.suppress(InputError):
            found.value(metric)
    json.dumps(results.read_summary(run).plain(), allow_nan=False)


def _runs_csv() -> Folder:
    lines = ["name,model_digest,folder,mean_r1", f"a,{'0' * 64},/,0.5", f"b,{'1' * 64},/,0.25", "c,,/,0.1"]
    return {"runs.csv": "\n".join(lines).encode()}


def _trace() -> Folder:
    return {"trace.csv": b"silo,on,off\nsilo-00,0,10\nsilo-01,5.5,20\nsilo-00,12,30\n"}


def _read_trace(folder: Path) -> None:
    trace = read_trace(folder / "trace.csv", _SILOS, 100.0)
    check_sane({name: list(pairs) for name, pairs in trace.intervals.items()})


def _faults() -> Folder:
    return {"faults.jsonl": b'{"fault": "0 silo-00 1"}\n{"fault": "1 silo-01 2"}\n'}


def _read_faults(folder: Path) -> None:
    """What a resumed run reads of the faults that must not strike again."""
    with MessageLog(folder / "log.jsonl", "coordinator", WallClock()) as log:
        script = FaultSchedule((), 0, ())
        FaultInjector(script, RunFolder(folder), log, VirtualClock(), order=None, wired=False, issued={})


# --- prepared data --------------------------------------------------------------------------------------------------
@cache
def _prepared() -> Folder:
    def make(cache_folder: Path) -> None:
        data = load(scenario_file()).data
        assert data is not None
        item_digests(prepare(data, Backbone(name="features"), cache_folder), data)

    found = files_of(make, "data/")
    return {Path(name).name: content for name, content in found.items() if name.count("/") == 2}


def _read_prepared(folder: Path) -> None:
    """What a run reads of the cache."""
    prepared, data = open_prepared(folder), load(scenario_file()).data
    assert data is not None
    for split in SPLITS:
        rows = prepared.rows(split)
        assert prepared.image[rows].shape[1:] == prepared.inputs.image_shape, "accepted images of another shape"
        assert prepared.text[prepared.first[rows]].shape[1:] == prepared.inputs.text_shape, "accepted other captions"
        prepared.pairs(split)
    if prepared.labels is not None:
        assert prepared.labels.shape == (prepared.n, len(prepared.label_names)), "accepted other labels"
    assert len(prepared.keys) == prepared.n, "accepted other keys"
    assert prepared.column is None or len(prepared.column) == prepared.n, "accepted another column"
    assert prepared.content and item_digests(prepared, data).shape == (prepared.n, 3, 32)


# --- others ---------------------------------------------------------------------------------------------------------
@cache
def _model_with_card() -> Folder:
    return {Path(name).name: content for name, content in files_of(run_to_end, "model/").items()}


def _passphrase() -> Folder:
    return {"passphrase": b"correct horse battery staple\nmore\n"}


def _read_passphrase(folder: Path) -> None:
    path = folder / "passphrase"
    if path.is_file() and not path.is_symlink():
        path.chmod(0o600)
    assert 0 < len(passphrase_in(path)) <= 1024 and b"\n" not in passphrase_in(path)


# --- run folders ----------------------------------------------------------------------------------------------------
@cache
def _run_folder() -> Folder:
    """A run folder with the logs of all processes."""

    def make(folder: Path) -> None:
        scenario = threaded_run.resolved(scenario_file())
        (folder / "scenario.yaml").write_text(scenario.dump())
        assert threaded_run.run(scenario, folder).summary is not None

    return files_of(make, "scenario.yaml", "summary.json", "metrics.jsonl", "model/", "messages/")


def _chained(name: str, content: bytes) -> bytes:
    """The records of a log with a valid chain, so that the checks behind it are reached."""
    if not name.startswith("messages/"):
        return content
    head, lines = GENESIS, list[bytes]()
    for number, line in enumerate(content.splitlines()):
        try:
            record = {**json.loads(line), "n": number, "previous": head}
            record.pop("hash", None)
            head = chain(head, record)
            lines.append(canonical(record | {"hash": head}))
        except (ValueError, TypeError, UnicodeError, RecursionError):
            lines.append(line)
    return b"\n".join([*lines, b""])


def _audit(folder: Path) -> None:
    """``fedmq audit``, with its page and table."""
    found = audit_run(folder)
    json.dumps(found.to_plain())
    report.page(found, report.verdict(found, report.Evidence()))
    report.table(found)


RESULT_KINDS: Mapping[str, Kind] = {
    "run folder": Kind(_run_folder, _audit, _chained, most=10),
    "results": Kind(_finished, _read_results),
    "runs of a comparison": Kind(_runs_csv, lambda folder: plots.named([folder])),
    "trace": Kind(_trace, _read_trace),
    "faults of a resumed run": Kind(_faults, _read_faults),
    "prepared data": Kind(_prepared, _read_prepared),
    "model card": Kind(_model_with_card, lambda folder: export_hub(open_model(folder), folder / "hub")),
    "passphrase": Kind(_passphrase, _read_passphrase),
}
