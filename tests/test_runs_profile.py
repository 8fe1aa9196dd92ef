"""The profile of a run: what its processes record, what is read of it, and what is made of it."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedmq import profiling
from fedmq.audit.log_checks import audit_run
from fedmq.audit.report import Evidence, verdict
from fedmq.cli.report import print_profile
from fedmq.profiling import COMMAND, PHASES, RECORDER, party, span
from fedmq.runs.profile import OTHER, Profile, ThreadSpans, read, speedscope, stretches, write
from fedmq.storage.run_folder import RunFolder
from tests.command_line import completed, printed
from tests.threaded_run import resolved, run


@pytest.fixture
def recorded() -> Iterator[list[float]]:
    """Record this process, whose clock shows the last number of the list [s]."""
    times = [0.0]
    RECORDER.begin(COMMAND, 0.0, lambda: times[-1])
    yield times
    RECORDER.end()


def lines(folder: Path, file: str, torn: str = "", **threads: str) -> None:
    """Write a process's file; the spans of a thread as ``0O@silo-00``: time [s], ``O`` or ``C``, name."""
    written = [
        json.dumps([float(at), thread, kind, name])
        for thread, spans in threads.items()
        for at, kind, name in re.findall(r"([0-9.]+)([OC])(\S+)", spans)
    ]
    folder.mkdir(exist_ok=True)
    (folder / file).write_text("\n".join([*written, torn]))


def of_two_processes(folder: Path) -> Profile:
    """A coordinator that waits for a silo, whose channel seals and sends, and then merges."""
    lines(
        folder,
        "silo-00.7.jsonl",
        MainThread="0O@silo-00 1Ocompute 3Ccompute 3Owait 9Cwait 9C@silo-00",
        link="2.5Olog 2.75Clog 3.5Osend 4Oseal 4.5Cseal 5Csend",
    )
    spans = "0O@coordinator 1Owait 5Cwait 5Omerge 6Odisk 6.5Cdisk 7Cmerge 9C@coordinator"
    lines(folder, "coordinator.6.jsonl", MainThread=spans)
    return Profile.of(read(folder))


def test_the_time_of_a_span_is_without_that_of_the_spans_within_it(tmp_path: Path) -> None:
    expected = {OTHER: 3.0, "wait": 4.0, "merge": 1.5, "disk": 0.5}
    assert dict(of_two_processes(tmp_path).seconds["coordinator"]) == expected


def test_a_process_that_does_something_in_another_thread_does_not_wait_meanwhile(tmp_path: Path) -> None:
    expected = {OTHER: 1.0, "compute": 2.0, "wait": 4.5, "send": 1.0, "seal": 0.5}
    assert dict(of_two_processes(tmp_path).seconds["silo-00"]) == expected, (
        "and what is beside other work is not counted"
    )


def test_a_sentence_says_who_is_at_work_in_the_rounds_and_what_bounds_them(tmp_path: Path) -> None:
    profile = of_two_processes(tmp_path)
    assert profile.rounds == {("the coordinator",): 2.0, ("silos",): 3.5, (): 0.5}
    assert profile.bound().endswith("no one 8%; silos bound the run.")
    both = replace(profile, rounds={("the coordinator", "silos"): 6.0, ("silos",): 1.0, ("the coordinator",): 3.0})
    assert both.bound() == (
        "At work during the rounds: the coordinator 90% (30% alone), silos 70% (10% alone), "
        "the evaluator 0% (0% alone), no one 0%; the coordinator bounds the run."
    )
    assert replace(profile, rounds={("silos",): 1.0, (): 3.0}).bound().endswith("waiting for messages bounds the run.")


def test_a_run_that_ended_before_its_first_merge_has_a_profile_without_rounds(tmp_path: Path) -> None:
    lines(tmp_path, "command.1.jsonl", MainThread="0O@command 1C@command")
    assert Profile.of(read(tmp_path)).bound() == "The profile has no round."
    assert Profile.of([]).seconds == {}


def test_the_file_of_a_killed_process_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    lines(tmp_path, "silo-00.7.jsonl", MainThread="0O@silo-00 1Ocompute 2Odisk", torn='[3.0,"MainTh')
    lines(tmp_path, "silo-00.8.jsonl", MainThread="5O@silo-00 6Ocompute")
    first, second = read(tmp_path)
    assert [event.name for event in first.events] == ["@silo-00", "compute", "disk", "disk", "compute", "@silo-00"]
    assert first.events[-1].at == 2.0
    names = [profile["name"] for profile in well_formed(speedscope([first, second], "run"))]
    assert names == ["silo-00", "silo-00 (start 2)"]


def test_spans_are_written_with_their_thread_before_a_wait(tmp_path: Path, recorded: list[float]) -> None:
    recorded.append(1.0)
    RECORDER.write_to(tmp_path)
    with party("silo-00"), span("compute"):
        recorded.append(1.5)
    with span("wait"):
        (path,) = tmp_path.iterdir()
        assert path.name == f"{COMMAND}.{os.getpid()}.jsonl"
        (thread,) = read(tmp_path)
        opened = ("@command", "start", "@silo-00", "compute", "wait")
        assert tuple(event.name for event in thread.events if event.kind == "O") == opened
    RECORDER.end()
    profile = Profile.of(read(tmp_path))
    assert profile.seconds == {COMMAND: {"start": 1.0}, "silo-00": {"compute": 0.5}}


def test_a_full_disk_ends_the_profile_and_not_the_run(monkeypatch: pytest.MonkeyPatch, recorded: list[float]) -> None:
    monkeypatch.setattr(RECORDER, "_file", Path("/dev/full").open("wb", buffering=0))  # noqa: SIM115
    with span("merge"):
        assert not RECORDER.on


def test_nothing_is_recorded_without_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling.Recorder, "note", lambda *_: pytest.fail("a span was recorded"))
    with span("merge"):
        assert profiling.child("silo-00", print) is print
    assert list(tmp_path.iterdir()) == []


def well_formed(file: dict[str, Any]) -> list[dict[str, Any]]:
    """The profiles of a file, whose fields are those of speedscope's schema of evented profiles."""
    assert file["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert file.keys() == {"$schema", "shared", "profiles", "name", "exporter"}
    frames = [frame["name"] for frame in file["shared"]["frames"]]
    assert len(set(frames)) == len(frames)
    for profile in file["profiles"]:
        assert profile.keys() == {"type", "name", "unit", "startValue", "endValue", "events"}
        assert (profile["type"], profile["unit"], profile["startValue"]) == ("evented", "seconds", 0)
        stack: list[int] = []
        for event in profile["events"]:
            assert event.keys() == {"type", "frame", "at"}
            assert 0 <= event["frame"] < len(frames)
            if event["type"] == "O":
                stack.append(event["frame"])
            else:
                assert (event["type"], stack.pop()) == ("C", event["frame"])
        times = [0, *(event["at"] for event in profile["events"]), profile["endValue"]]
        assert (stack, times) == ([], sorted(times))
    return list(file["profiles"])


def walls(threads: list[ThreadSpans]) -> dict[str, float]:
    """Time for which each process existed [s]."""
    return {each.process: each.events[-1].at - each.events[0].at for each in threads if each.thread == "MainThread"}


@pytest.mark.slow
def test_every_process_of_a_run_is_profiled_and_the_model_is_the_same(tiny: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    done = completed("scenario", tiny, "--out", folder.root, "--profile", "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model_digest"] == run(resolved(tiny), tmp_path / "threads").summary.model_digest
    for text in ("compute", "the run.", str(folder.speedscope)):
        assert text in done.stderr

    profile, scenario = write(folder), resolved(tiny)
    message = {"encode", "seal", "send", "wait", "open", "log"}
    assert profile.silos == scenario.silo_names
    assert profile.merges == scenario.rounds
    for silo in scenario.silo_names:
        assert profile.seconds[silo].keys() >= {"start", "data", "compute", *message}
    assert profile.seconds["coordinator"].keys() >= {"start", "data", "check", "merge", "disk", *message}
    assert profile.seconds["evaluator"].keys() >= {"start", "data", "evaluate", *message}
    assert profile.seconds[COMMAND].keys() >= {"start", "data", "wait", "report"}
    for process, wall in walls(read(folder.profile)).items():
        assert sum(profile.seconds[process].values()) == pytest.approx(wall)

    named = {one["name"] for one in well_formed(json.loads(folder.speedscope.read_text()))}
    silos = {f"{silo}{more}" for silo in profile.silos for more in ("", " link")}
    assert named >= {COMMAND, "coordinator", "evaluator", *silos}
    rows = list(csv.DictReader((folder.profile / "phases.csv").open()))
    assert {row["party"] for row in rows} == set(profile.seconds)
    assert {row["phase"] for row in rows} <= {*PHASES, OTHER}

    audit = audit_run(folder.root)
    assert audit.findings == []
    assert "checkpoints/ and profile/, which no signature covers" in verdict(audit, Evidence(profiled=True)).not_proven
    assert "profile/" not in verdict(audit, Evidence()).not_proven


@pytest.mark.slow
def test_a_run_in_one_process_is_profiled_by_silo_and_a_resumed_one_only_if_it_is_asked_for(
    tiny: Path, tmp_path: Path
) -> None:
    folder, inline = RunFolder(tmp_path / "run"), ("--set", "launcher=inline", "--quiet")
    printed("scenario", tiny, "--out", folder.root, *inline)
    assert not folder.profile.exists()
    printed("scenario", "--resume", folder.root, "--extend", 2, *inline, "--profile")
    threads = read(folder.profile)
    profile = Profile.of(threads)
    assert profile.merges == 2
    assert {each.process for each in threads} == {COMMAND}
    assert {each.party for each in stretches(threads)} == {COMMAND, "coordinator", "evaluator", *profile.silos}
    assert 0 < len(profile.silos) <= resolved(tiny).silos.count
    assert all("compute" in profile.seconds[silo] for silo in profile.silos)
    printed("scenario", "--resume", folder.root, "--extend", 1, *inline, "--profile")
    assert Profile.of(read(folder.profile)).merges == 1, "of the resumed part alone"


def test_the_table_of_a_long_run_fits_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    silos = {f"silo-{number:03d}": {"compute": 8_765.4321, "seal": 0.001, OTHER: 8_000.0} for number in range(999)}
    print_profile(Profile({**silos, "coordinator": {"merge": 9_876.54321}}, {}, 100), RunFolder(tmp_path))
    rows = capsys.readouterr().err.splitlines()
    assert max(len(row.rstrip()) for row in rows if str(tmp_path) not in row) <= 80
    assert rows[0].split() == ["seconds", COMMAND, "coordinator", "evaluator", "999", "silos", "per", "merge"]
    (compute,) = (row.split() for row in rows if row.startswith("compute"))
    assert compute == ["compute", "-", "-", "-", "8756666.67", "52%", "87566.667"]
