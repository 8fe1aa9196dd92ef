"""The report of an audit, and its terminal output."""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

import fedmq
from fedmq.audit.log_checks import audit_run
from fedmq.audit.report import Evidence, page, table, verdict
from fedmq.cli.audit import print_audit
from fedmq.clock import WallClock
from fedmq.wire.keys import Identity
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from tests.adversary_forged_logs import forge
from tests.command_line import audited, printed, refused
from tests.two_logs import FACTS, KEYS, log_of, two_logs


def test_a_changed_report_is_not_proven_until_it_is_written_anew(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = run / "report.html"
    own = page.read_text()
    assert "report.html" not in printed("audit", run)
    page.write_text(own.replace("R@1", "R@10"))
    text = printed("audit", run)
    assert "report.html shows these records, which give another page" in " ".join(text.split())
    monkeypatch.setattr("fedmq.audit.report.__version__", "9.0")
    assert f"not compared, as it is drawn by fedmq {fedmq.__version__}" in " ".join(printed("audit", run).split())


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_every_line_of_an_audit_fits_eighty_columns_and_no_figure_reads_like_none(run: Path) -> None:
    audit, console = audit_run(run), Console(record=True, width=80)
    print_audit(audit, verdict(audit, Evidence()), console)
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "loss: numbers only" in " ".join(shown.split())
    assert "loss 0" not in shown
    assert "each log is signed by its process" in " ".join(shown.split())


def test_the_audit_writes_a_page_and_a_table_of_the_flows(run: Path) -> None:
    assert "audit.html, and audit.csv" in " ".join(printed("audit", run).split())
    rows = list(csv.DictReader(io.StringIO((run / "audit.csv").read_text())))
    columns = ["run", "method", "started", "ended", "process", "modalities", "direction", "kind", "round", "first",
               "last", "payloads", "bytes"]  # fmt: skip
    assert list(rows[0]) == columns
    audit = audit_run(run)
    for process, kind in {(row["process"], row["kind"]) for row in rows}:
        these = [row for row in rows if (row["process"], row["kind"]) == (process, kind)]
        assert sum(int(row["bytes"]) for row in these) == audit.payloads.bytes[process][kind]
        assert sum(int(row["payloads"]) for row in these) == audit.payloads.number[process][kind]
        assert all(row["started"] <= row["first"] <= row["last"] <= row["ended"] for row in these)
        assert len(these) == len({row["round"] for row in these})
    assert {row["round"] for row in rows if row["kind"] == "delta"} == {"1", "2", "3", "4"}
    assert {row["round"] for row in rows if row["kind"] == "data_statement"} == {""}
    assert {row["modalities"] for row in rows if row["process"] == "silo-02"} <= {"image", "text", "image and text"}
    shown = (run / "audit.html").read_text()
    outcome = '<h1 class="good">the logs are consistent</h1>'
    for text in (*(row["kind"] for row in rows), outcome, "What holds", "Not proven", *audit.records):
        assert text in shown
    assert not re.search(r"(src|href)=", shown)  # it needs nothing from elsewhere


def test_an_audit_ends_with_short_lines_on_the_terminal_and_the_page(run: Path) -> None:
    found = audited(run)[1]
    for part, title in ((found["holds"], "What holds:"), (found["not_proven"], "Not proven:")):
        first, *lines = part.splitlines()
        assert first == title and len(lines) > 2 and all(line.startswith("- ") for line in lines)
        assert max(map(len, lines)) <= 170
        assert all(line in (run / "audit.html").read_text() for line in lines if "'" not in line)


def test_missing_logs_make_an_audit_incomplete_not_contradictory(run: Path, tmp_path: Path) -> None:
    sites = tmp_path / "sites"
    for name in ("silo-00", "silo-01"):
        moved, other = sites / f"{name}-of-this" / "messages", sites / f"{name}-of-another" / "messages"
        moved.mkdir(parents=True)
        other.mkdir(parents=True)
        log = (run / "messages" / f"{name}.jsonl").rename(moved / f"{name}.jsonl")
        (other / log.name).write_text(log.read_text().replace('"run":"', '"run":"another-'))
    shown = " ".join(printed("audit", run, code=4).split())  # it must not look like a complete one
    assert "2 missing logs, no contradiction" in shown and "contradict each other" not in shown
    assert "copy the folders of the run of silo-00 and silo-01 into one folder, and name it: --logs DIR" in shown
    assert audited(run)[1]["incomplete"].startswith("Incomplete: ")
    assert (
        "<b>Incomplete: nothing contradicts, but 2 logs could not be checked: copy" in (run / "audit.html").read_text()
    )
    assert "joined" in printed("audit", run, "--silo", "silo-00", code=4)  # by the coordinator's log
    assert "did you mean silo-" in refused("audit", run, "--silo", "silo-000")
    assert "the logs are consistent" in printed("audit", run, "--logs", sites)
    path = run / "messages" / "coordinator.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    (run / "summary.json").write_text("{}")
    shown = printed("audit", run, code=3)
    assert "contradict each other" in " ".join(shown.split()) and "Incomplete" not in shown


def cut(run: Path) -> None:
    path = run / "messages" / "coordinator.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:20]))


def swap(run: Path) -> None:
    one, other = (run / "messages" / f"silo-0{number}.jsonl" for number in range(2))
    first = one.read_text()
    one.write_text(other.read_text())
    other.write_text(first)


@pytest.mark.parametrize(
    ("change", "code", "cause", "lines"),
    [
        (lambda run: (run / "messages" / "coordinator.jsonl").unlink(), 4, "no such log in this folder", 1),
        (cut, 3, "coordinator.jsonl: lacks its signed end", 1),
        (swap, 3, "is the log of silo-01: the file was renamed", 2),
    ],
    ids=["absent", "truncated", "swapped"],
)
def test_one_cause_is_one_line_and_verbose_prints_every_difference(
    run: Path, change: Callable[[Path], object], code: int, cause: str, lines: int
) -> None:
    change(run)
    audit, console = audit_run(run), Console(record=True, width=500)
    print_audit(audit, verdict(audit, Evidence()), console)
    shown = console.export_text()
    assert cause in shown and len(re.findall(r"(?m)^\S+\.jsonl(:\d+)?: ", shown)) == lines
    assert ("--verbose" in shown.split("what left")[0]) == (len(audit.findings) > lines)
    assert printed("audit", run, "--verbose", code=code).count(".jsonl") >= len(audit.findings)


def test_the_first_screen_has_the_verdict_first_and_like_silos_together(run: Path) -> None:
    shown = printed("audit", run)
    assert shown.startswith("the logs are consistent")
    assert len(shown.splitlines()) < 60 and re.search(r"\d silos: silo-0\d, ", shown)
    of_one = printed("audit", run, "--silo", "silo-00")
    assert re.search(r"2 │ \w*delta +│ \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d │ +1 │", of_one), of_one
    assert "silo-00: joined (coordinator.jsonl:" in of_one and "silo-01" not in of_one.split("What holds")[0]
    assert re.search(r"--silo: found 'silo-77'.*silo-00", refused("audit", run, "--silo", "silo-77"))


def test_clocks_that_differ_by_more_than_the_round_trip_are_reported_with_the_estimate(run: Path) -> None:
    assert audit_run(run).clocks == ()

    def ahead(record: dict[str, object]) -> dict[str, object]:
        moved = datetime.fromisoformat(str(record["wall"])) + timedelta(hours=1)
        return record | {"wall": moved.isoformat(timespec="milliseconds")}

    forge(run, "silo-01", ahead)
    (line,) = audit_run(run).clocks
    assert re.match(r"the clock of silo-01 is (3,600|3,599)\.\d+ s \(± 0\.\d+ s, .* ahead of the coordinator's", line)


def test_the_audit_lists_refusals_expulsions_and_changes_of_data_of_each_site(tmp_path: Path) -> None:
    two_logs(tmp_path)
    with log_of(tmp_path, "coordinator") as log:
        log.note(LogEvent.JOINED, peer="silo-00")
        log.refused("silo-00", "replay", "again", 100)
        log.note(LogEvent.EXPELLED, peer="silo-00")
        for version in (0, 1):
            log.note(LogEvent.BRANCH_LEFT_ALONE, version=version, branch="image", why="a largest weight of 1.000")
    with MessageLog(tmp_path / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        log.start(Identity("silo-00", KEYS["silo-00"]), {}, replace(FACTS, data="other"))
    events = [(event.what, event.times, event.notable) for event in audit_run(tmp_path).events]
    for event in (
        ("joined", 1, False),
        ("a message of it was refused: replay", 2, True),
        ("expelled: its key was removed or replaced", 1, True),
        ("a secure sum left image unchanged", 2, True),
        ("other data declared than before: other, not d", 1, True),
    ):
        assert event in events, events


def test_an_audit_of_a_silos_own_folder_claims_nothing_of_files_that_are_not_there(run: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "messages").mkdir(parents=True)
    shutil.copy(run / "messages" / "silo-00.jsonl", site / "messages")
    shown = printed("audit", site, code=4)
    holds = " ".join(shown.split()).partition("What holds: ")[2].partition("Not proven")[0]
    assert "log" in holds and "agree" not in holds and ".json" not in holds


def test_the_report_can_be_written_elsewhere_and_again(run: Path, tmp_path: Path) -> None:
    for _ in range(2):
        printed("audit", run, "--report", tmp_path / "report", "--json")
    assert (tmp_path / "report" / "audit.html").exists() and not (run / "audit.html").exists()


def test_the_content_of_a_log_is_escaped_in_the_report(run: Path) -> None:
    def hostile(record: dict[str, object]) -> dict[str, object]:
        return record | {"payloads": [["=cmd<script>alert(1)</script>", 5]]} if record.get("payloads") else record

    forge(run, "silo-00", hostile)
    audit = audit_run(run)
    shown = page(audit, verdict(audit, Evidence()))
    assert "<script>" not in shown and "&lt;script&gt;" in shown
    cells = [row["kind"] for row in csv.DictReader(io.StringIO(table(audit)))]
    assert "'=cmd<script>alert(1)</script>" in cells  # a spreadsheet does not take it for a formula
