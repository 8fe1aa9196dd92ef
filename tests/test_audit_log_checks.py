"""The message log and its audit: what an edit, a lost line or a forged record looks like."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from coordinator import roster
from fedmq.audit import log_checks as audits
from fedmq.audit import policy
from fedmq.audit.log_checks import Audit, audit_run
from fedmq.cli import terminal
from fedmq.cli.main import app
from fedmq.clock import WallClock
from fedmq.config.scenario import Backbone
from fedmq.encoders.base import InputSpec
from fedmq.errors import InputError
from fedmq.models.build import build
from fedmq.wire.codec import decode, encode_body
from fedmq.wire.keys import fingerprint, load_accepted
from fedmq.wire.log_records import NoteKind
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import PAYLOADS, Delta, Header, Kind, Message, digest
from fedmq.wire.payloads import Error, Loss, Metrics
from tests.adversary_forged_logs import forge, lines, message_record, reseal, rewrite


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
    """A silo sends three messages after its ready; the coordinator logs receiving them."""
    with MessageLog(tmp_path / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        for counter in range(1, 4):
            log.message("sent", message(counter), f"{counter:032x}", 100)
    with MessageLog(tmp_path / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        for counter in range(1, 4):
            log.message("received", message(counter), f"{counter:032x}", 100)
        log.refused("silo-00", "replay", "message 0", 100)
    return tmp_path


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


def test_two_processes_cannot_write_one_log(run: Path) -> None:
    path = run / "messages" / "silo-00.jsonl"
    with MessageLog(path, "silo-00", WallClock()) as log:
        log.note(NoteKind.STARTED)
        before = path.read_bytes()
        with pytest.raises(InputError, match=r"silo-00\.jsonl: found .*another silo-00 is writing"):
            MessageLog(path, "silo-00", WallClock(), patience=0.1)
        assert path.read_bytes() == before
    with MessageLog(path, "silo-00", WallClock()) as log:
        log.note(NoteKind.STARTED)
    assert not audit_run(run).findings


FILLED = """
import resource, sys
from pathlib import Path
from fedmq.wire.log_records import NoteKind
from fedmq.wire.message_log import MessageLog
from fedmq.clock import WallClock
from fedmq.wire.codec import decode, encode_body
from fedmq.errors import RunError

path = Path(sys.argv[1])
with MessageLog(path, "silo-00", WallClock()) as log:
    log.note(NoteKind.STARTED)
    before, head = path.read_bytes(), log.head
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, resource.RLIM_INFINITY))
    for _ in range(2):
        try:
            log.note(NoteKind.ENDED)
        except RunError as error:
            print(error)
        assert (path.read_bytes(), log.head) == (before, head)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.note(NoteKind.RESUMED)
"""


@pytest.mark.slow
def test_a_record_that_the_disk_takes_only_in_part_is_an_error_and_leaves_nothing(run: Path) -> None:
    path = run / "messages" / "silo-00.jsonl"
    done = subprocess.run([sys.executable, "-c", FILLED, path], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{path}: could not be written: File too large"] * 2
    assert [json.loads(line).get("text") for line in lines(run, "silo-00")[3:]] == ["started", "resumed"]
    assert not audit_run(run).findings


def test_a_record_that_is_taken_in_parts_is_whole(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data[:7]))

    with MessageLog(run / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        monkeypatch.setattr(log, "_file", Slow(log.path, "ab"))
        log.note(NoteKind.STARTED)
        log.note(NoteKind.ENDED)
    assert not audit_run(run).findings
    assert len(lines(run, "silo-00")) == 5


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
        log.note(NoteKind.RESUMED)
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


def test_a_missing_log_is_a_finding_even_of_a_process_that_no_message_came_from(run: Path) -> None:
    with MessageLog(run / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        log.refused("unknown", "unknown_session", "a task before a handshake", 100)
        assert not audit_run(run).findings  # noise of nobody known
        log.handshake("received", Kind.READY, "silo-01", 1400)
        log.message("sent", message(0, "coordinator", "silo-02"), "d" * 32, 100)
        log.refused("silo-03", "malformed", "40 MB", 40_000_000)
    assert [(f.place, f.what) for f in audit_run(run).findings] == [
        (f"silo-0{silo}.jsonl", f"no such log in this folder: coordinator.jsonl:{line} tells of silo-0{silo}")
        for silo, line in ((1, 6), (2, 7), (3, 8))
    ]
    for process in ("silo-01", "silo-02", "silo-03"):
        with MessageLog(run / "messages" / f"{process}.jsonl", process, WallClock()) as log:
            log.note(NoteKind.STARTED)
    assert found(run) == [("coordinator.jsonl:6", "1 times a ready from silo-01 received, but 0 times logged as sent")]
    with MessageLog(run / "messages" / "silo-01.jsonl", "silo-01", WallClock()) as log:
        log.handshake("sent", Kind.READY, "coordinator", 1400)
    assert not audit_run(run).findings
    (run / "messages" / "coordinator.jsonl").unlink()
    assert [f.place for f in audit_run(run).findings] == ["coordinator.jsonl"]


def test_a_name_that_a_record_has_no_place_for_is_passed_over(run: Path) -> None:
    content = [
        line.replace('"peer":"silo-00"', '"peer":"silo-00","sender":["x"]') for line in lines(run, "coordinator")
    ]
    rewrite(run, "coordinator", reseal(content))
    assert not audit_run(run).findings


def test_the_audit_calls_an_unknown_peer_as_the_coordinator_does() -> None:
    assert audits._UNKNOWN == roster._UNKNOWN


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run folder"):
        audit_run(tmp_path)


def test_records_hold_no_numbers_of_a_tensor(run: Path) -> None:
    assert "buffer" not in "".join(lines(run, "silo-00"))


def test_a_run_without_messages_is_no_clean_record(tmp_path: Path) -> None:
    with MessageLog(tmp_path / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        log.note(NoteKind.INLINE)
    assert audit_run(tmp_path).inline
    done = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert isinstance(done.exception, InputError)
    assert "nothing was sent" in str(done.exception)


@pytest.mark.parametrize("liar", ["silo-00", "coordinator"])
def test_nobodys_word_that_nothing_was_sent_ends_the_audit_of_logs_with_messages(run: Path, liar: str) -> None:
    with MessageLog(run / "messages" / f"{liar}.jsonl", liar, WallClock()) as log:
        log.note(NoteKind.INLINE)
    rewrite(run, "silo-00", reseal(lines(run, "silo-00")[1:]))
    done = CliRunner().invoke(app, ["audit", str(run), "--json"])
    found = [finding["what"] for finding in json.loads(done.stdout)["findings"]]
    assert done.exit_code == 3
    assert "reply from silo-00 received, but never logged as sent" in found
    assert any("says that nothing was sent" in what for what in found)


@pytest.mark.parametrize("other", ["silo-00", "coordinator"])
def test_only_a_coordinator_without_a_handshake_says_that_nothing_was_sent(tmp_path: Path, other: str) -> None:
    with MessageLog(tmp_path / "messages" / f"{other}.jsonl", other, WallClock()) as log:
        log.note(NoteKind.INLINE)
        if other == "coordinator":
            log.handshake("received", Kind.HELLO, "silo-00", 1400)
    audit = audit_run(tmp_path)
    assert not audit.inline
    assert audit.findings[0].place == f"{other}.jsonl:1"


def found(run: Path) -> list[tuple[str, str]]:
    return [(finding.place, finding.what) for finding in audit_run(run).findings]


def test_a_record_of_another_process_shows(run: Path) -> None:
    stolen = lines(run, "silo-00")[0]
    rewrite(run, "coordinator", reseal([*lines(run, "coordinator")[1:], stolen]))
    assert ("coordinator.jsonl:4", "a record of silo-00 in the log of coordinator") in found(run)
    rewrite(run, "coordinator", reseal([stolen.replace('"process":"silo-00"', '"process":"coordinator"')]))
    assert ("coordinator.jsonl:1", "coordinator logged sending in the name of silo-00") in found(run)


def test_swapped_logs_show(run: Path) -> None:
    one, other = run / "messages" / "silo-00.jsonl", run / "messages" / "coordinator.jsonl"
    one.rename(run / "kept")
    other.rename(one)
    (run / "kept").rename(other)
    assert {
        ("coordinator.jsonl:1", "a record of silo-00 in the log of coordinator"),
        ("silo-00.jsonl:1", "a record of coordinator in the log of silo-00"),
        ("silo-00.jsonl:1", "silo-00 logged receiving what was for coordinator"),
    } <= set(found(run))


def test_a_sealed_message_does_not_pass_as_a_handshake(run: Path) -> None:
    for process in ("silo-00", "coordinator"):
        forge(run, process, lambda record: {key: record[key] for key in record if key != "counter"} | {"peer": "x"})
    assert ("silo-00.jsonl:1", "no whole record of a message log") in found(run)


@pytest.mark.parametrize("edit", ["doubled", "spaced", "carriage return"])
def test_another_way_to_write_a_record_shows(run: Path, edit: str) -> None:
    content = lines(run, "silo-00")
    match edit:
        case "doubled":  # whoever reads the first of the two reads another size
            content[2] = content[2].replace('{"action"', '{"bytes":1,"action"')
        case "spaced":
            content[2] = content[2].replace('"bytes":', '"bytes": ')
        case _:
            content[2] += "\r"
    rewrite(run, "silo-00", content)
    assert ("silo-00.jsonl:3", "no whole record of a message log") in found(run)


def test_a_message_removed_from_both_ends_leaves_a_hole_in_its_sessions_numbers(run: Path) -> None:
    for process in ("silo-00", "coordinator"):
        forge(run, process, lambda record: None if record.get("counter") == 2 else record)
    hole = "message 3 of a session, expected 2: what was between is not in the log"
    assert found(run) == [("coordinator.jsonl:2", hole), ("silo-00.jsonl:2", hole)]
    for process in ("silo-00", "coordinator"):
        forge(run, process, lambda record: None if record.get("counter") == 1 else record)
    assert "message 3 of a session, expected 1" in found(run)[0][1]  # the first of all is no more than another


def test_a_coordinator_counts_from_0_and_each_session_by_itself(run: Path) -> None:
    for process, action in (("coordinator", "sent"), ("silo-00", "received")):
        with MessageLog(run / "messages" / f"{process}.jsonl", process, WallClock()) as log:
            for session, counter in ((b"s" * 16, 0), (b"t" * 16, 0), (b"s" * 16, 1)):
                down = message(counter, "coordinator", "silo-00")
                log.message(action, replace(down, header=replace(down.header, session=session)), "d" * 32, 100)
    assert found(run) == []
    forge(run, "coordinator", lambda record: None if record.get("counter") == 0 else record)
    assert any("message 1 of a session, expected 0" in what for _, what in found(run))


def test_what_arrives_in_another_order_than_it_was_sealed_in_shows(run: Path) -> None:
    content = lines(run, "coordinator")
    content[0], content[1] = content[1], content[0]
    rewrite(run, "coordinator", reseal(content))
    assert found(run) == [
        ("coordinator.jsonl:1", "message 2 of a session, expected 1: what was between is not in the log"),
        ("coordinator.jsonl:2", "message 1 of a session after 2"),
    ]


def test_a_refusal_taken_out_of_the_log_leaves_a_hole_in_what_arrived(run: Path) -> None:
    with MessageLog(run / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        for counter in (4, 5):
            log.message("sent", message(counter), f"{counter:032x}", 100)
    with MessageLog(run / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        log.refused("silo-00", "layout", "a delta of another layout", 100)
        log.message("received", message(5), f"{5:032x}", 100)
    assert found(run) == []
    forge(run, "coordinator", lambda record: None if record["action"] == "refused" else record)
    hole = "message 5 of a session, expected 4: what was between is not in the log"
    assert found(run) == [("coordinator.jsonl:4", hole)]


def test_what_was_lost_on_the_way_leaves_a_hole_that_a_refusal_explains(run: Path) -> None:
    with MessageLog(run / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        for counter in range(4, 9):
            log.message("sent", message(counter), f"{counter:032x}", 100)
    with MessageLog(run / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        log.refused("silo-00", "gap", "message 7, expected 4", 100)
        log.message("received", message(8), f"{8:032x}", 100)
        log.refused("silo-00", "unexpected", "a reply nobody asked for, logged above as received", 0)
    assert found(run) == []
    assert audit_run(run).undelivered == 4


def test_a_handshake_that_its_sender_did_not_log_shows(run: Path) -> None:
    for process, action, peer in (("silo-00", "sent", "coordinator"), ("coordinator", "received", "silo-00")):
        with MessageLog(run / "messages" / f"{process}.jsonl", process, WallClock()) as log:
            log.handshake(action, Kind.HELLO, peer, 1400)  # type: ignore[arg-type]
            log.handshake(action, Kind.READY, peer, 300)  # type: ignore[arg-type]
    assert found(run) == []
    forge(run, "silo-00", lambda record: None if record.get("kind") in ("hello", "ready") else record)
    # A hello may be anybody's who recorded one.
    assert found(run) == [("coordinator.jsonl:6", "1 times a ready from silo-00 received, but 0 times logged as sent")]


def test_an_audit_of_logs_that_are_being_written_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MessageLog(run / "messages" / "silo-00.jsonl", "silo-00", WallClock()):
        audit = audit_run(run)
    assert audit.written == ("silo-00",)
    assert audit_run(run).written == ()
    terminal.print_audit(audit, Console())
    assert "silo-00: being written now" in capsys.readouterr().out


def test_silos_have_nothing_to_say_to_each_other(run: Path) -> None:
    with MessageLog(run / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        aside = message(1, receiver="silo-01")
        log.message("sent", replace(aside, header=replace(aside.header, session=b"t" * 16)), "a" * 32, 100)
    assert ("silo-00.jsonl:4", "a message from silo-00 to silo-01: silos talk to the coordinator alone") in found(run)


@pytest.mark.parametrize(
    ("process", "change"),
    [
        ("silo-00", {"wall": "yesterday"}),
        ("silo-00", {"tag": "d"}),
        ("silo-00", {"kind": "gossip"}),
        ("silo-00", {"session": "ab"}),
        ("silo-00", {"counter": -1}),
        ("coordinator", {"reason": "because"}),
    ],
)
def test_a_field_that_says_what_no_log_does_is_no_record(run: Path, process: str, change: dict[str, Any]) -> None:
    def misstate(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, **change} if change.keys() <= record.keys() else record

    assert found(run) == []
    forge(run, process, misstate)
    assert any("no whole record of a message log" in what for _, what in found(run))


def test_who_logs_another_payload_than_it_sends_is_named_by_the_other_end(run: Path) -> None:
    def lie(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "digests": ["ab" * 32]} if record["counter"] == 2 else record

    forge(run, "silo-00", lie)
    assert found(run) == [("coordinator.jsonl:2", "differs from silo-00.jsonl:2 in digests")]


def test_digests_cannot_be_left_out(run: Path) -> None:
    for process in ("silo-00", "coordinator"):
        forge(run, process, lambda record: {**record, "digests": []} if "digests" in record else record)
    assert {("silo-00.jsonl:1", "0 digests of 1 payloads"), ("coordinator.jsonl:3", "0 digests of 1 payloads")} <= set(
        found(run)
    )
    forge(run, "silo-00", lambda record: {key: record[key] for key in record if key != "digests"})
    assert ("silo-00.jsonl:1", "no whole record of a message log") in found(run)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (Kind.REPLY, Loss(np.float64(0.1))),  # type: ignore[call-arg]
        (Kind.REPLY, Loss(1)),
        (Kind.REPLY, Metrics({"b": np.float64(0.5), "a": 1}, {"silo-01": {"y": 1, "x": 0.25}, "silo-00": {}})),
        (Kind.ERROR, Error("failed", "why")),
    ],
)
def test_both_ends_take_the_same_digest_whatever_sort_of_number_a_method_gave(kind: Kind, payload: Any) -> None:
    header = replace(message(1).header, kind=kind)
    body = b"".join(map(bytes, encode_body(Message(header, (payload,)))))
    assert digest(decode(header, body).payloads[0]) == digest(payload)


def test_what_a_log_says_never_steers_the_auditors_terminal(run: Path) -> None:
    def steer(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "payloads": [["x\x1b[2Jy", 20]]}

    forge(run, "silo-00", steer)
    forge(run, "coordinator", lambda each: {**each, "peer": "z\x1b]0;t\x07"} if each["action"] == "refused" else each)
    (run / "messages" / "silo-00.jsonl").rename(run / "messages" / "silo\x1b[31m.jsonl")
    console = Console(record=True, width=200)
    terminal.print_audit(audit_run(run), console)
    policy.show(held(run, "up: {kinds: [loss]}"), console)
    shown = console.export_text()
    assert "x?[2Jy" in shown
    assert "z?]0;t?" in shown
    assert not {"\x1b", "\x07"} & set(shown)


DOCUMENT = Path(__file__).parent.parent / "docs" / "reference" / "message_logs.md"
GUIDE = Path(__file__).parent.parent / "docs" / "howto" / "audit.md"


@pytest.mark.slow
def test_the_script_of_the_document_finds_what_the_audit_finds(run: Path, tmp_path: Path) -> None:
    block = DOCUMENT.read_text().partition("    import hashlib")[2].partition("\n\nAnyone")[0]
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
    for edited in (content[1].replace('{"action"', '{"bytes":1,"action"'), content[1].replace(":", ": ", 1)):
        rewrite(run, "silo-00", [content[0], edited, content[2]])
        assert check().stderr == "line 2: not what was written\n"
    log.write_bytes("".join(line + "\r\n" for line in content).encode())
    assert check().stderr == "line 1: not what was written\n"
    for broken in ("garbage", "[]", "7", content[1][:50], content[1].replace('"hash"', '"hush"'), "\udcff", ""):
        log.write_bytes("".join(f"{line}\n" for line in (content[0], broken)).encode(errors="surrogateescape"))
        assert check().stderr == "line 2: not what was written\n"
    log.write_bytes(b"")
    assert check().stdout == f"0 records, last hash {'0' * 64}\n"


def test_the_document_names_every_field_of_a_record(run: Path) -> None:
    fields = {key for process in ("silo-00", "coordinator") for line in lines(run, process) for key in json.loads(line)}
    named = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    assert fields <= named


# ------------------------------------------------------------------------------------------------------- the policy
SHIPPED = Path(__file__).parent.parent / "docs" / "policies" / "rcsr_p.yaml"


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


def held(run: Path, text: str) -> policy.Held:
    path = written(run, text)
    return policy.hold(audit_run(run), policy.read_policy(path), path)


def test_a_run_that_keeps_to_its_policy_says_how_many_messages_were_held(run: Path) -> None:
    found = held(run, "up: {kinds: [delta], bytes_per_payload: {delta: 20}, bytes_per_message: 100, bytes_in_all: 300}")
    assert not held(run, "up: {bytes_per_message: 50, bytes_per_message_with: {delta: 100, loss: 10}}").findings
    assert (found.held, found.free, found.findings) == (3, 0, [])  # each once, though both ends logged it
    console = Console(record=True, width=200)
    policy.show(found, console)
    assert f"3 messages held against {run / 'policy.yaml'}: none broke it" in console.export_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("up: {kinds: [loss, geometry]}", "reply with delta, 20 bytes: up.kinds allows loss, geometry"),
        ("up: {kinds: []}", "reply with delta, 20 bytes: up.kinds allows nothing"),
        ("up: {bytes_per_message: 99}", "reply, 100 bytes: up.bytes_per_message allows 99"),
        ("up: {bytes_per_payload: {delta: 19}}", "reply with delta, 20 bytes: up.bytes_per_payload.delta allows 19"),
        (
            "up: {bytes_per_message: 50, bytes_per_message_with: {delta: 99}}",
            "reply, 100 bytes: up.bytes_per_message_with.delta allows 99",
        ),
        (
            "up: {bytes_per_message: 50, bytes_per_message_with: {metrics: 500}}",
            "reply, 100 bytes: up.bytes_per_message allows 50",
        ),
        ("peers: [coordinator]", "reply, 100 bytes: peers allows coordinator"),
    ],
)
def test_each_message_that_breaks_a_rule_is_a_finding(run: Path, text: str, said: str) -> None:
    findings = held(run, text).findings
    assert [f.place for f in findings] == [f"silo-00.jsonl:{number}" for number in (1, 2, 3)]
    assert {f.what for f in findings} == {f"silo-00 up, {said}"}


def test_what_a_silo_sends_in_all_is_a_finding_once_where_it_goes_beyond_the_limit(run: Path) -> None:
    (finding,) = held(run, "up: {bytes_in_all: 150}").findings
    assert finding.place == "silo-00.jsonl:2"
    assert finding.what == ("silo-00 up, reply, 200 bytes: up.bytes_in_all allows 150, and this message goes beyond it")


def test_what_goes_down_and_the_evaluator_have_rules_of_their_own(run: Path) -> None:
    with MessageLog(run / "messages" / "evaluator.jsonl", "evaluator", WallClock()) as log:
        log.message("sent", message(1, sender="evaluator"), "e" * 32, 100)
    with MessageLog(run / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        log.message("received", message(1, sender="evaluator"), "e" * 32, 100)
        log.message("sent", message(0, "coordinator", "silo-00"), "d" * 32, 100)
    found = held(run, "down: {kinds: [model]}")
    assert [f.what for f in found.findings] == ["silo-00 down, reply with delta, 20 bytes: down.kinds allows model"]
    assert (found.held, found.free) == (1, 4)
    found = held(run, "evaluator: {up: {kinds: [metrics]}}")
    assert [f.place for f in found.findings] == ["evaluator.jsonl:1"]
    assert "evaluator.up.kinds allows metrics" in found.findings[0].what
    assert held(run, "up: {kinds: [delta]}").held == 3  # up and down speak of silos


def test_a_silos_own_rule_replaces_key_by_key(run: Path) -> None:
    general = "up: {kinds: [loss], bytes_per_message: 100}"
    assert not held(run, f"{general}\nsilos: {{silo-00: {{up: {{kinds: [delta]}}}}}}").findings
    assert not held(run, f"{general}\nsilos: {{silo-00: {{up: {{kinds: null}}}}}}").findings
    found = held(run, f"{general}\nsilos: {{silo-00: {{up: {{kinds: [delta], bytes_per_message: 50}}}}}}").findings
    assert {f.what for f in found} == {"silo-00 up, reply, 100 bytes: silos.silo-00.up.bytes_per_message allows 50"}
    narrower = "up: {kinds: [delta]}\nsilos: {silo-00: {up: {kinds: [partial_delta]}}}"
    assert all("silos.silo-00.up.kinds allows partial_delta" in f.what for f in held(run, narrower).findings)
    assert len(held(run, narrower).findings) == 3


def test_a_rule_for_a_silo_that_is_not_there_is_not_passed_over(run: Path) -> None:
    (finding,) = held(run, "up: {kinds: [delta]}\nsilos: {silo-0: {up: {kinds: []}}}").findings
    assert finding.place.endswith("policy.yaml: silos.silo-0")
    assert "no log tells" in finding.what


def test_a_policy_that_no_message_falls_under_shows_nothing(run: Path) -> None:
    found = held(run, "down: {kinds: [model]}")
    assert (found.held, found.free) == (0, 3)
    assert ["nothing is shown" in f.what for f in found.findings] == [True]


def test_neither_ends_word_hides_what_the_other_end_logged(run: Path) -> None:
    content = lines(run, "silo-00")
    content[1] = content[1].replace('["delta",20]', '["loss",0]')
    rewrite(run, "silo-00", reseal(content))
    found = held(run, "up: {kinds: [loss]}").findings
    assert [f.place for f in found] == ["silo-00.jsonl:1", "silo-00.jsonl:3", "coordinator.jsonl:2"]
    assert not held(run, "up: {kinds: [loss, delta]}").findings


def test_a_silo_whose_log_is_elsewhere_is_held_to_what_the_other_end_logged(run: Path) -> None:
    (run / "messages" / "silo-00.jsonl").unlink()
    found = held(run, "up: {kinds: [loss], bytes_in_all: 250}")
    assert [f.place for f in found.findings if "kinds" in f.what] == [f"coordinator.jsonl:{n}" for n in (1, 2, 3)]
    assert [f.place for f in found.findings if "in_all" in f.what] == ["coordinator.jsonl:3"]


@pytest.mark.parametrize(
    ("text", "place", "value", "allowed"),
    [
        ("up:\n  kinds: [delta, adapters]", "line 2: up.kinds.1", "adapters", ", ".join(sorted(PAYLOADS))),
        ("up: {bytes_per_payload: {adapters: 1}}", "up.bytes_per_payload.adapters", "adapters", "one of class_proto"),
        ("up: {kinds: delta}", "up.kinds", "delta", "list"),
        ("up: {kinds: {delta: 1}}", "up.kinds", "a mapping", "list"),
        ("up: {bytes_per_message: 20 MB}", "up.bytes_per_message", "20 MB", "integer"),
        ("up: {bytes_in_all: -1}", "up.bytes_in_all", -1, "greater than or equal to 0"),
        ("upwards: {}", "upwards", "upwards", "one of up, down, evaluator, silos, peers"),
        ("silos: {silo-1: {kinds: []}}", "silos.silo-1.kinds", "kinds", "one of up, down"),
        ("evaluator: {up: {kind: []}}", "evaluator.up.kind", "kind", "one of kinds, bytes_per_payload, bytes_per_m"),
        ("silos: {Silo 1: {}}", "silos.Silo 1", "Silo 1", "match"),
        ("silos: {evaluator: {up: {kinds: []}}}", "silos", "evaluator", "names of silos"),
        ("up: 3", "up", 3, "a mapping"),
        ("silos: {silo-1: {up: {}}}", "policy.yaml", "a policy that limits nothing", "at least one of kinds"),
        ("", "policy.yaml", "NoneType", "a policy"),
        ("up: [", "line 1", "stream end", "a policy"),
        ("up: {}\nup: {}", "line 2", "there twice", "a policy"),
    ],
)
def test_a_policy_that_is_none_is_one_line(tmp_path: Path, text: str, place: str, value: object, allowed: str) -> None:
    with pytest.raises(InputError) as caught:
        policy.read_policy(written(tmp_path, text))
    error = caught.value
    assert error.place.startswith(str(tmp_path / "policy.yaml"))
    assert error.place.endswith(place) or place == "line 1"
    assert str(value) in str(error.found)
    assert allowed in error.allowed
    assert "\n" not in str(error)
    with pytest.raises(InputError, match=r"none\.yaml: found 'no such file', allowed: a policy"):
        policy.read_policy(tmp_path / "none.yaml")


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["silo-00", "silo-01"]),
        st.lists(st.tuples(st.sampled_from(sorted(PAYLOADS)), st.integers(0, 99)), max_size=4),
        st.integers(1, 999),
    ),
    min_size=1,
    max_size=8,
)


@given(MESSAGES, st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_tightest_policy_that_a_record_keeps_to_has_no_room(
    messages: list[tuple[str, list[tuple[str, int]], int]], data: st.DataObject
) -> None:
    audit = Audit()
    for number, (silo, payloads, size) in enumerate(messages):
        contents = [(kind, size, kind) for kind, size in payloads]
        record = message_record(silo, *contents, counter=number, frames=size)
        audit.messages.append((f"{silo}.jsonl:{number}", record))
    sums = [sum(size for silo, _, size in messages if silo == name) for name in ("silo-00", "silo-01")]
    every = [payload for _, payloads, _ in messages for payload in payloads]
    rule = {
        "kinds": sorted({kind for kind, _ in every}),
        "bytes_per_payload": {kind: max(size for each, size in every if each == kind) for kind, _ in every},
        "bytes_per_message": max(size for _, _, size in messages),
        "bytes_in_all": max(sums),
    }

    def breaches(**up: object) -> int:
        return len(policy.hold(audit, policy.Policy.model_validate({"up": up}), Path("p")).breaches)

    assert breaches(**rule) == 0
    assert breaches(bytes_per_message=rule["bytes_per_message"] - 1) >= 1
    assert breaches(bytes_in_all=rule["bytes_in_all"] - 1) == sums.count(max(sums))
    if every:
        kind = data.draw(st.sampled_from(rule["kinds"]))
        assert breaches(kinds=[each for each in rule["kinds"] if each != kind]) == sum(
            each == kind for each, _ in every
        )
        most = rule["bytes_per_payload"][kind]
        if most:
            assert breaches(bytes_per_payload={kind: most - 1}) == every.count((kind, most))


def test_the_command_exits_with_3_where_the_policy_is_broken_and_with_2_where_it_is_none(run: Path) -> None:
    def audited(text: str, *more: str) -> tuple[int, dict[str, object]]:
        path = written(run, text)
        done = CliRunner().invoke(app, ["audit", str(run), "--policy", str(path), "--json", *more])
        return done.exit_code, json.loads(done.stdout)

    code, facts = audited("up: {kinds: [delta]}")
    assert (code, facts["ok"], facts["findings"]) == (0, True, [])
    assert facts["policy"] == {
        "ok": True,
        "file": str(run / "policy.yaml"),
        "held": 3,
        "not_held": 0,
        "broken": [],
        "unknown_silos": [],
    }
    code, facts = audited("up: {kinds: [loss]}")
    assert (code, facts["ok"], len(facts["findings"])) == (3, False, 3)
    assert facts["policy"]["broken"][0] == {
        "place": "silo-00.jsonl:1",
        "process": "silo-00",
        "way": "up",
        "message": "reply",
        "payload": "delta",
        "bytes": 20,
        "rule": "up.kinds allows loss",
        "what": "silo-00 up, reply with delta, 20 bytes: up.kinds allows loss",
    }
    table = CliRunner().invoke(app, ["audit", str(run), "--policy", str(run / "policy.yaml")])
    assert table.exit_code == 3
    refused = CliRunner().invoke(app, ["audit", str(run), "--policy", str(written(run, "up: {kinds: [x]}"))])
    assert isinstance(refused.exception, InputError)  # main() makes this exit code 2


def test_what_a_log_says_is_never_taken_for_markup(run: Path) -> None:
    rewrite(run, "silo-00", reseal([line.replace('"delta"', '"x[/nope]y"') for line in lines(run, "silo-00")]))
    done = CliRunner().invoke(app, ["audit", str(run)])
    assert done.exit_code == 3, done.exception
    rewrite(run, "silo-00", reseal([line.replace("nope", "conceal") for line in lines(run, "silo-00")]))
    table = CliRunner().invoke(app, ["audit", str(run), "--policy", str(written(run, "up: {kinds: [loss]}"))])
    assert table.exit_code == 3
    assert "[/conceal]" in table.stdout


def test_brackets_in_a_place_are_no_markup(tmp_path: Path) -> None:
    place = tmp_path / "q[/b] br[old]"
    done = CliRunner().invoke(app, ["keys", "init", str(place), "--silos", "2"])
    assert (done.exit_code, done.exception) == (0, None)
    assert "br[old]" in done.stdout
    shown = CliRunner().invoke(app, ["keys", "show", str(place)])
    prints = [fingerprint(key) for key in load_accepted(place).values()]
    assert all(each in re.sub(r"[\s│┃]", "", shown.stdout) or each[:30] in shown.stdout for each in prints)


def test_a_log_that_is_a_folder_is_one_line(run: Path) -> None:
    (run / "messages" / "silo-07.jsonl").mkdir()
    with pytest.raises(InputError, match=r"silo-07\.jsonl: found 'Is a directory'"):
        audit_run(run)


def test_a_policy_that_is_broken_everywhere_is_told_in_short(run: Path) -> None:
    with MessageLog(run / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        for counter in range(4, 41):
            log.message("sent", message(counter), f"{counter:032x}", 100)
    console = Console(record=True, width=200)
    policy.show(held(run, "up: {kinds: [loss]}"), console)
    assert "and 20 more; --json has all" in console.export_text()


def test_the_sizes_of_the_shipped_policy_are_those_of_the_lite_backbone() -> None:
    rule = policy.read_policy(SHIPPED).up.bytes_per_payload
    assert rule is not None
    layout = build(Backbone(name="lite"), InputSpec((512,), (512,)), 0).layout
    assert rule["delta"] == layout.nbytes
    assert 2 * rule["partial_delta"] == layout.nbytes
    # Both matrices of an adapter of its default width would be noticed.
    limit = policy.read_policy(SHIPPED).up.bytes_per_message
    assert limit is not None
    assert limit < rule["delta"] + 2 * 64 * 512 * 4


def test_the_policies_of_the_document_can_be_read(tmp_path: Path) -> None:
    text = GUIDE.read_text()
    blocks = re.findall(r"((?:^    (?:up|down|evaluator|silos|peers):.*\n(?:^     .*\n)*)+)", text, flags=re.MULTILINE)
    assert blocks
    for block in blocks:
        read = policy.read_policy(written(tmp_path, textwrap.dedent(block)))
        assert yaml.safe_load(textwrap.dedent(block)).keys() == read.model_fields_set
    named = set(re.findall(r"`(\w+)`", text))
    assert {*policy.Rule.model_fields, *policy.Policy.model_fields} <= named
