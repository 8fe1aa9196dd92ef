"""Experiment trackers receive a run while it is in progress; each library reads back what it received."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import fedmq.runs.trackers
from fedmq.config.resolve import ResolvedRun
from fedmq.errors import InputError
from fedmq.experiments.grid import digest, named_by
from fedmq.runs.results import read_metrics, read_summary
from fedmq.runs.trackers import TRACKERS, End, TrackedRun, Tracker, Value, check, tracking, values_of
from fedmq.storage.run_folder import RunFolder
from tests import in_process_run
from tests.threaded_run import resolved, run_of
from tests.waiting import PATIENCE

NAMES = ("csv", "tensorboard", "mlflow", "wandb")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes longer to import the trackers' libraries than a run waits for a server at its end."""
    for limit in ("_OPENING", "_PATIENCE"):
        monkeypatch.setattr(fedmq.runs.trackers, limit, PATIENCE)


def tracked_run(tiny: Path, out: Path, *names: str) -> tuple[ResolvedRun, list[str]]:
    """A run that is stopped after two rounds, then resumed; returns it and the notices."""
    scenario = resolved(tiny, f"track={json.dumps(names)}")
    folder, run, notices = RunFolder(out), run_of(scenario), list[str]()
    out.mkdir(parents=True)
    folder.scenario.write_text(scenario.dump())

    def two_rounds() -> bool:
        return folder.metrics.exists() and folder.metrics.read_text().count('"merge"') >= 2

    with tracking(run, folder, notices.append):
        in_process_run.run(scenario, out, stop_wanted=two_rounds)
    assert not folder.summary.exists()
    with tracking(run, folder, notices.append):
        in_process_run.run(scenario, out, resume=True)
        folder.report.write_text("<html></html>")
    return run, notices


@pytest.mark.slow
def test_each_library_reads_back_a_stopped_and_resumed_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in os.environ if each.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)
    out = tmp_path / "runs" / "some run"
    _, notices = tracked_run(tiny, out, *NAMES)
    assert len(notices) == 8 and all(each.startswith("tracked: ") for each in notices), notices
    folder = RunFolder(out)
    lines, summary = read_metrics(folder), read_summary(folder)
    given = {(each.tag, line.version): each.value for line in lines for each in values_of(line)}
    names = {tag for tag, _ in given}
    assert {"merge/loss", "evaluation/mean_r1", "silo-00/mean_r1", "silo-00/loss", "merge/run_seconds"} <= names
    assert read_csv(out) == given
    assert read_tensorboard(out) == given
    assert read_mlflow(out, dict(summary.metrics)) == given
    assert read_wandb(out) == given


def read_csv(out: Path) -> dict[tuple[str, int], float]:
    rows = list(csv.DictReader((out / "trackers/csv/metrics.csv").read_text().splitlines()))
    found = {(Value(row["silo"], row["name"], 0.0).tag, int(row["version"])): float(row["value"]) for row in rows}
    assert len(found) == len(rows)  # a resumed run repeats no line
    assert all(abs(float(row["wall"]) - time.time()) < 3600 for row in rows)
    parameters = dict(csv.reader((out / "trackers/csv/parameters.csv").read_text().splitlines()))
    assert parameters["protocol.name"] == "rcsr" and parameters["training.learning_rate"] == "0.003"
    return found


def read_tensorboard(out: Path) -> dict[tuple[str, int], float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "trackers/tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    assert {"scenario/text_summary", "summary/text_summary"} <= set(tags["tensors"])
    singles = {(tag, each.step): each.value for tag in tags["scalars"] for each in events.Scalars(tag)}
    exact = {(each.tag, line.version): each.value for line in read_metrics(RunFolder(out)) for each in values_of(line)}
    assert singles == pytest.approx(exact)  # event files have single precision
    return exact


def read_mlflow(out: Path, result: dict[str, float]) -> dict[tuple[str, int], float]:
    from mlflow import MlflowClient

    client = MlflowClient((out.parent / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("fedmq")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])  # a resumed run is the same run
    assert run.info.status == "FINISHED" and run.info.run_name == out.name
    assert run.data.params["protocol.name"] == "rcsr"
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {
        "scenario.yaml", "summary.json", "report.html",
    }  # fmt: skip
    assert run.data.metrics["evaluation/mean_r1"] == result["mean_r1"]
    history = {tag: client.get_metric_history(run.info.run_id, tag) for tag in run.data.metrics}
    assert all(len({each.step for each in entries}) == len(entries) for entries in history.values())
    return {(tag, each.step): each.value for tag, entries in history.items() for each in entries}


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of a W&B file, which is a LevelDB log behind a head of 7 bytes; wandb itself has no reader for it."""
    assert content.startswith(b":W&B")
    position, parts = 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768  # the rest of a block is too short for a record
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_wandb(out: Path) -> dict[tuple[str, int], float]:
    from wandb.proto import wandb_internal_pb2

    files = sorted((out / "trackers/wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({path.name for path in files}) == 1  # two parts of one run
    found, saved, config = dict[tuple[str, int], float](), set[str](), dict[str, Any]()
    for path in files:
        for data in leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            config |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
            saved |= {each.path for each in record.files.files}
            row = {each.key or "/".join(each.nested_key): each.value_json for each in record.history.item}
            numbers = {key: json.loads(value) for key, value in row.items() if not key.startswith("_")}
            version = numbers.pop("version", None)
            found |= {(key, version): value for key, value in numbers.items()}
    assert config["protocol.name"] == "rcsr"
    assert {"scenario.yaml", "summary.json", "report.html"} <= saved
    return found


class Failing(Tracker):
    """A tracker whose server is gone."""

    key = where = "nowhere"

    def __init__(self, run: TrackedRun, key: str | None) -> None:
        assert run.name

    def log(self, values: Sequence[Value], version: int, at: float) -> None:
        raise ConnectionError("no route to host\nand a long trace")

    def finish(self, end: End, result: Mapping[str, float]) -> None:
        raise AssertionError


def test_a_failing_tracker_is_given_up_in_one_line_and_the_others_receive_the_run(
    finished: Path, tiny: Path, tmp_path: Path
) -> None:
    folder = RunFolder(Path(shutil.copytree(finished, tmp_path / "run")))
    run, notices = run_of(resolved(tiny, "track=[mlflow, csv]")), list[str]()
    with tracking(run, folder, notices.append, {"mlflow": Failing, "csv": TRACKERS["csv"]}):
        pass
    assert notices == [
        "track: mlflow: no route to host; the run continues without it",
        f"tracked: {folder.root / 'trackers/csv'}",
    ]
    rows = list(csv.DictReader((folder.root / "trackers/csv/metrics.csv").read_text().splitlines()))
    assert len(rows) == sum(len(values_of(line)) for line in read_metrics(folder))
    result = dict(csv.reader((folder.root / "trackers/csv/result.csv").read_text().splitlines()))
    assert float(result["mean_r1"]) == read_summary(folder).metrics["mean_r1"]


def test_a_tracker_that_does_not_open_does_not_hold_up_the_end(
    finished: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, released = RunFolder(Path(shutil.copytree(finished, tmp_path / "run"))), threading.Event()
    run, notices = run_of(resolved(tiny, "track=mlflow")), list[str]()
    monkeypatch.setattr(fedmq.runs.trackers, "_OPENING", 0.0)

    def silent(run: TrackedRun, key: str | None) -> Tracker:
        released.wait()
        raise ConnectionError

    with tracking(run, folder, notices.append, {"mlflow": silent}):
        pass
    assert notices == ["track: mlflow: not reached 0 s after the end; the run is complete without it"]
    released.set()


@pytest.mark.slow
def test_mlflow_on_a_closed_port_is_given_up_within_the_time_for_opening(
    finished: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(Path(shutil.copytree(finished, tmp_path / "run")))
    run, notices = run_of(resolved(tiny, "track=mlflow")), list[str]()
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with tracking(run, folder, notices.append):
            pass
    (notice,) = notices
    assert re.match(r"track: mlflow: API request to .* failed .*; the run continues without it", notice)


def test_a_tracker_that_is_not_installed_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check(["csv"])
    with pytest.raises(InputError, match=r"track: wandb.*pip install -e '.\[trackers\]'"):
        check(["csv", "wandb"])


def test_trackers_and_transports_change_neither_the_id_of_a_run_nor_the_names_of_comparisons(tiny: Path) -> None:
    plain, tracked = resolved(tiny), resolved(tiny, "track=csv")
    assert tracked.track == ("csv",)
    for changed in (tracked, resolved(tiny, "wire.transport=ipc"), resolved(tiny, "wire.transport=shm")):
        assert run_of(plain).id == run_of(changed).id
        assert digest(named_by(plain)) == digest(named_by(changed))
    with pytest.raises(InputError, match="listed twice"):
        resolved(tiny, "track=[csv, csv]")
    with pytest.raises(InputError, match="track"):
        resolved(tiny, "track=[excel]")


def test_lines_of_a_run_have_the_real_time_and_a_replay_ignores_it(tiny: Path, tmp_path: Path) -> None:
    from fedmq.audit.replay import first_difference, read_record

    records = []
    for name in ("first", "second"):
        in_process_run.run(resolved(tiny, "rounds=1"), tmp_path / name)
        lines = read_metrics(RunFolder(tmp_path / name))
        assert lines and all(line.wall is not None for line in lines)
        records.append(read_record(RunFolder(tmp_path / name)))
    assert first_difference(*records) is None


def test_a_damaged_state_of_trackers_begins_a_new_run_with_one_notice(
    finished: Path, tiny: Path, tmp_path: Path
) -> None:
    folder = RunFolder(Path(shutil.copytree(finished, tmp_path / "run")))
    sent: Mapping[str, object]
    for sent, found in (
        ({"key": "../../other", "versions": {}}, r"csv\.key"),
        ({"key": "csv", "versions": {"merge": 10**6}}, r"version 1000000 of"),
        ({"key": "csv", "versions": {"merge": -2}}, r"csv\.versions\.merge"),
    ):
        shutil.rmtree(folder.root / "trackers", ignore_errors=True)
        (folder.root / "trackers").mkdir()
        (folder.root / "trackers" / "state.json").write_text(json.dumps({"trackers": {"csv": sent}}))
        notices = list[str]()
        with tracking(run_of(resolved(tiny, "track=csv")), folder, notices.append):
            pass
        assert len(notices) == 2 and re.search(found, notices[0]) and "the trackers start a new run" in notices[0]
        assert len(read_csv(folder.root)) > 5
