"""The message log and its audit: what an edit, a lost line or a forged record looks like."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedmq.audit import GENESIS, INLINE, MessageLog, audit_run, chain
from fedmq.cli import app
from fedmq.clock import WallClock
from fedmq.errors import InputError
from fedmq.messages import Delta, Header, Kind, Message


def message(counter: int, sender: str = "silo-00", receiver: str = "coordinator") -> Message:
    header = Header(
        run="r",
        kind=Kind.REPLY,
        sender=sender,
        receiver=receiver,
        sequence=counter,
        reply_to=counter,
        sent_at=1.5,
        session=b"s" * 16,
        counter=counter,
    )
    return Message(header, (Delta("0" * 64, np.zeros(5, np.float32), 3),))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A silo sends three messages; the coordinator logs receiving them."""
    with MessageLog(tmp_path / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        for counter in range(3):
            log.message("sent", message(counter), f"{counter:032x}", 100)
    with MessageLog(tmp_path / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        for counter in range(3):
            log.message("received", message(counter), f"{counter:032x}", 100)
        log.refused("silo-00", "replay", "message 0", 100)
    return tmp_path


def lines(run: Path, process: str) -> list[str]:
    return (run / "messages" / f"{process}.jsonl").read_text().splitlines()


def rewrite(run: Path, process: str, content: list[str]) -> None:
    (run / "messages" / f"{process}.jsonl").write_text("".join(line + "\n" for line in content))


def reseal(content: list[str]) -> list[str]:
    """What a forger who knows the format does: a new chain over the edited records."""
    head, result = GENESIS, []
    for number, line in enumerate(content):
        record = {**json.loads(line), "n": number, "previous": head}
        del record["hash"]
        record["hash"] = head = chain(head, record)
        result.append(json.dumps(record))
    return result


def test_untouched_logs_agree(run: Path) -> None:
    audit = audit_run(run)
    assert not audit.findings
    assert audit.left["silo-00"]["delta"] == 3 * 20
    assert audit.frames["silo-00"] == 300
    assert audit.refused["coordinator"] == {"replay": 1}
    assert audit.undelivered == 0


def test_an_edited_record_shows(run: Path) -> None:
    content = lines(run, "silo-00")
    content[1] = content[1].replace('"bytes":100', '"bytes":101')
    rewrite(run, "silo-00", content)
    assert any("silo-00.jsonl:2" in f.place and "changed" in f.what for f in audit_run(run).findings)


def test_two_processes_cannot_write_one_log(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmq.audit._LOCK_SECONDS", 0.1)
    path = run / "messages" / "silo-00.jsonl"
    with MessageLog(path, "silo-00", WallClock()) as log:
        log.note("started")
        before = path.read_bytes()
        with pytest.raises(InputError, match=r"silo-00\.jsonl: found .*another silo-00 is writing"):
            MessageLog(path, "silo-00", WallClock())
        assert path.read_bytes() == before
    with MessageLog(path, "silo-00", WallClock()) as log:
        log.note("started")
    assert not audit_run(run).findings


@pytest.mark.parametrize("edit", ["remove", "swap", "insert"])
def test_removed_moved_and_inserted_records_show(run: Path, edit: str) -> None:
    content = lines(run, "coordinator")
    match edit:
        case "remove":
            del content[1]
        case "swap":
            content[0], content[1] = content[1], content[0]
        case "insert":
            content.insert(1, content[0])
    rewrite(run, "coordinator", content)
    assert any("does not follow" in f.what for f in audit_run(run).findings)


def test_a_forged_chain_is_betrayed_by_the_other_end(run: Path) -> None:
    content = lines(run, "silo-00")
    content[1] = content[1].replace('["delta",20]', '["loss",8]')
    rewrite(run, "silo-00", reseal(content))
    findings = audit_run(run).findings
    assert len(findings) == 1
    assert "differs from silo-00.jsonl:2 in payloads" in findings[0].what


def test_a_record_cut_off_the_end_is_betrayed_by_the_other_end(run: Path) -> None:
    rewrite(run, "silo-00", lines(run, "silo-00")[:-1])
    assert [f.what for f in audit_run(run).findings] == ["reply from silo-00 received, but never logged as sent"]


def test_what_was_under_way_at_the_end_is_counted_not_blamed(run: Path) -> None:
    rewrite(run, "coordinator", lines(run, "coordinator")[:2])
    audit = audit_run(run)
    assert (audit.findings, audit.undelivered) == ([], 1)


def test_an_unfinished_line_is_reported_by_the_audit_and_cut_off_by_the_next_start(run: Path) -> None:
    path = run / "messages" / "silo-00.jsonl"
    with path.open("a") as file:
        file.write('{"n":3,"proc')
    assert any("no whole record" in f.what for f in audit_run(run).findings)
    with MessageLog(path, "silo-00", WallClock()) as log:
        log.note("resumed")
    assert not audit_run(run).findings
    assert json.loads(lines(run, "silo-00")[-1])["n"] == 3


def test_one_frame_logged_twice_shows(run: Path) -> None:
    content = lines(run, "coordinator")
    rewrite(run, "coordinator", reseal([*content, content[0]]))
    assert any("again" in f.what for f in audit_run(run).findings)


def test_a_log_that_is_not_there_is_one_finding(run: Path) -> None:
    (run / "messages" / "silo-00.jsonl").unlink()
    findings = audit_run(run).findings
    assert [(f.place, f.what) for f in findings] == [
        ("silo-00.jsonl", "no such log in this folder: 3 messages of silo-00 cannot be compared")
    ]


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run folder"):
        audit_run(tmp_path)


def test_records_hold_no_numbers_of_a_tensor(run: Path) -> None:
    assert "buffer" not in "".join(lines(run, "silo-00"))


def test_a_run_without_messages_is_no_clean_record(tmp_path: Path) -> None:
    with MessageLog(tmp_path / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        log.note(INLINE)
    assert audit_run(tmp_path).inline
    done = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert isinstance(done.exception, InputError)
    assert "nothing was sent" in str(done.exception)


DOCUMENT = Path(__file__).parent.parent / "docs" / "audit.md"


def test_the_script_of_the_document_finds_what_the_audit_finds(run: Path, tmp_path: Path) -> None:
    block = DOCUMENT.read_text().partition("    import hashlib")[2].partition("\n\nWhoever")[0]
    script = tmp_path / "check.py"
    script.write_text(textwrap.dedent("    import hashlib" + block))
    log = run / "messages" / "silo-00.jsonl"

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, script, log], capture_output=True, text=True, timeout=60, check=False)

    content = lines(run, "silo-00")
    assert check().stdout == f"3 records, last hash {json.loads(content[-1])['hash']}\n"
    for edited in ([content[0], content[1].replace("100", "101"), content[2]], [content[0], content[2]]):
        rewrite(run, "silo-00", edited)
        assert (check().returncode, check().stderr) == (1, "line 2: not what was written\n")


def test_the_document_names_every_field_of_a_record(run: Path) -> None:
    fields = {key for process in ("silo-00", "coordinator") for line in lines(run, process) for key in json.loads(line)}
    named = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    assert fields <= named
