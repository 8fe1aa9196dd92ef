"""Files written by fedmq are validated when read: any damage is a one-line error with place and value."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import protocols
from coordinator import checkpoints
from coordinator.round_events import Phase
from fedmq.audit import replay
from fedmq.audit.log_checks import audit_run
from fedmq.clock import clock_for
from fedmq.errors import InputError
from fedmq.retrieval import released_model
from fedmq.runs import results as outcomes
from fedmq.runs.report import run_report
from fedmq.storage.json_files import Stored, read_lines
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from tests.test_runs_html_page import drawn, titles
from tests.threaded_run import resolved, run, run_of


class Counted(Stored):
    """A record of a line."""

    a: int


DEEP = b"[" * 100_000
_numbers = count()


def results(root: Path) -> None:
    """Read a run's results as its report, comparisons and a replay do."""
    folder = RunFolder(root)
    run_report.write(folder, {})
    outcomes.read(folder).untrained()
    record = replay.read_record(folder)
    replay.first_difference(record, record)
    assert not outcomes.made_otherwise([record.made_with, record.made_with])


READERS: dict[str, Callable[[Path], object]] = {
    "summary.json": results,
    "metrics.jsonl": results,
    "checkpoints/version-*/checkpoint.json": lambda root: checkpoints.load(RunFolder(root).checkpoints),
    "model/config.json": lambda root: released_model.open_release(root).used,
}


def logs(root: Path) -> None:
    """Read the message logs, as an auditor and a replay do."""
    audit_run(root)
    replay.read_record(RunFolder(root))
    log = MessageLog(RunFolder(root).messages("silo-01"), "silo-01", clock_for("virtual", 0.0))
    log.note(LogEvent.STARTED)
    log.close()


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished") / "run"
    scenario = resolved(tiny, "rounds=2")
    assert run(scenario, root).phase is Phase.DONE
    (root / "scenario.yaml").write_text(scenario.dump())
    (root / "report.html").unlink()
    return root


def test_the_report_plots_what_the_method_reported_of_its_merges(finished: Path, tmp_path: Path) -> None:
    folder = RunFolder(shutil.copytree(finished, tmp_path / "run"))
    told = {"router_loss": 0.25, "weight_silo-01": 0.5, "weight_silo-03": 0.5}
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert any(line["kind"] == "merge" for line in lines)
    grown = [{**line, **told} if line["kind"] == "merge" else line for line in lines]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in grown))
    run_report.write(folder, protocols.reported("rcsr"))
    page = (folder.root / "report.html").read_text()
    figures = dict(zip(titles(page), drawn(page), strict=True))
    told_ = {trace.name: trace for trace in figures["Reported by the method"].data}
    assert told_["Loss of the router"].y == (0.25,) * sum(line["kind"] == "merge" for line in lines)
    (menu,) = figures["Aggregation weights"].layout.updatemenus
    assert [button.label for button in menu.buttons] == ["silo-01", "silo-03"], "one figure of all silos"
    (menu,) = figures["Training loss"].layout.updatemenus
    assert {button.label for button in menu.buttons} == {silo for line in grown for silo in line.get("losses", {})}
    assert "Now" not in figures, "the clock is not what a method reports"


def damaged(finished: Path, tmp_path: Path, name: str, content: bytes) -> Path:
    """A copy of the run with another content of one file, whose place is a pattern."""
    root = tmp_path / str(next(_numbers))
    # For speed over hundreds of runs, files that are only read are hard links. :func:`logs` appends to a log.
    shutil.copytree(finished, root, copy_function=os.link)
    for path in (root / "messages").iterdir():
        path.unlink()
        shutil.copy(finished / "messages" / path.name, path)
    path = sorted(root.glob(name))[-1]
    path.unlink()
    path.write_bytes(content)
    return root


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "content", [b'{"a', b"{}\n", b"5\n", b"\xff\xfe\n", DEEP + b"\n"], ids=["cut", "empty", "number", "bytes", "deep"]
)
def test_a_file_of_the_wrong_format_is_refused_by_name(
    finished: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    with pytest.raises(InputError, match=Path(name).name):
        READERS[name](damaged(finished, tmp_path, name, content))


def test_a_wrong_key_is_named_with_its_value(finished: Path, tmp_path: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    summary["per_silo"]["silo-01"]["samples"] = "many"
    root = damaged(finished, tmp_path, "summary.json", json.dumps(summary).encode())
    with pytest.raises(InputError, match=r"summary\.json: per_silo\.silo-01\.samples: found 'many', allowed: .*int"):
        outcomes.read_summary(RunFolder(root))
    summary["per_silo"] = {"silo-01\nfedmq: all is well": 3}
    (root / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(InputError, match=r"per_silo\.silo-01\\nfedmq: all is well: found '3'"):
        outcomes.read_summary(RunFolder(root))
    del summary["model_digest"]
    (root / "summary.json").write_text(json.dumps({**summary, "per_silo": {}}))
    with pytest.raises(InputError, match="model_digest: found 'nothing'"):
        outcomes.read_summary(RunFolder(root))


@pytest.mark.parametrize("key", ["tasks", "seconds", "personal_per_silo", "released_with"])
def test_summary_keys_that_a_replay_reads_are_required(finished: Path, tmp_path: Path, key: str) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    root = damaged(finished, tmp_path, "summary.json", json.dumps({**summary, key: None}).encode())
    with pytest.raises(InputError, match=rf"summary\.json: {key}: found 'None'"):
        replay.read_record(RunFolder(root))


def test_a_wrong_line_is_named_by_number_and_an_unfinished_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert list(read_lines(path, Counted, "a line")) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert [line.a for line in read_lines(path, Counted, "a line")] == [1, 2]
    path.write_text('{"a": 1}\n7\n')
    with pytest.raises(InputError, match=r"lines\.jsonl: line 2: found '7'"):
        list(read_lines(path, Counted, "a line"))


def test_a_release_with_unexpected_tensors_is_refused_by_name(finished: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from fedmq.data.prepared_arrays import open_prepared
    from fedmq.launch.preparation import population_here

    root = tmp_path / "run"
    shutil.copytree(finished, root)
    opened = released_model.open_release(root)
    prepared = open_prepared(population_here(run_of(opened.scenario), None))
    path = root / "model" / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    opened.model(prepared)
    save_file({**tensors, name: tensors[name][:-1].clone()}, path)
    with pytest.raises(InputError, match=rf"model\.safetensors: {name}: found"):
        opened.model(prepared)
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(InputError, match=rf"model\.safetensors: found 'a difference in {name}'"):
        opened.model(prepared)


_ODD = st.sampled_from([None, True, -1, 2**70, 0.5, float("nan"), "", "7", [], [1], {}, {"a": 1}, [[]], "\ud800"])


def places(value: Any) -> list[tuple[Any, ...]]:
    """Paths of all values inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, own in inner for path in ((key,), *((key, *rest) for rest in places(own)))]


def changed(draw: Callable[[Any], Any], value: Any) -> Any:
    """A copy of a JSON value with one inner value replaced or removed."""
    before, value = value, copy.deepcopy(value)
    *way, last = draw(st.sampled_from(places(value)))
    holder = value
    for key in way:
        holder = holder[key]
    if draw(st.booleans()):
        holder[last] = draw(_ODD)
    else:
        del holder[last]
    assume(json.dumps(value) != json.dumps(before))
    return value


def edited(draw: Callable[[Any], Any], lines: list[str]) -> list[str]:
    """Lines of which one has one changed value."""
    number = draw(st.integers(0, len(lines) - 1))
    return [*lines[:number], json.dumps(changed(draw, json.loads(lines[number]))), *lines[number + 1 :]]


@pytest.mark.slow
@pytest.mark.parametrize("process", ["coordinator", "silo-01"])
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_audit_finds_any_one_changed_value_in_a_log(
    finished: Path, tmp_path: Path, process: str, data: st.DataObject
) -> None:
    lines = edited(data.draw, (finished / f"messages/{process}.jsonl").read_text().splitlines())
    root = damaged(finished, tmp_path, f"messages/{process}.jsonl", ("\n".join(lines) + "\n").encode())
    assert audit_run(root).findings
    logs(root)


@pytest.mark.parametrize(
    "line",
    [b"\xff", DEEP, b'{"action": "sent", "counter": 1}', b'{"n": 1, "action": "note"}'],
    ids=["bytes", "deep", "message", "note"],
)
def test_a_line_that_is_not_a_record_is_a_finding(finished: Path, tmp_path: Path, line: bytes) -> None:
    log = (finished / "messages/silo-01.jsonl").read_bytes()
    root = damaged(finished, tmp_path, "messages/silo-01.jsonl", log + line + b"\n")
    assert [finding.what for finding in audit_run(root).findings] == ["no complete record of a message log"]
    logs(root)
