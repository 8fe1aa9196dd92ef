"""The audit of message logs: edited, lost and forged records are found."""

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
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console
from typer.testing import CliRunner

from fedmq.audit import policy
from fedmq.audit.log_checks import audit_run
from fedmq.audit.report import Evidence, verdict
from fedmq.cli.audit import print_audit
from fedmq.cli.main import app
from fedmq.clock import WallClock
from fedmq.errors import InputError
from fedmq.wire.codec import decode, digest, encode_body
from fedmq.wire.keys import Identity, fingerprint, load_accepted
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog, StartFacts, write_all
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import Error, Loss, Metrics
from tests.adversary_forged_logs import forge, lines, reseal, rewrite
from tests.two_logs import held, message, two_logs, written
from tests.waiting import PATIENCE


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with the logs of one silo and of the coordinator."""
    return two_logs(tmp_path)


def test_untouched_logs_agree(run: Path) -> None:
    audit = audit_run(run)
    assert not audit.findings
    assert audit.left["silo-00"]["delta"] == 3 * 20
    assert audit.frames["silo-00"] == 300
    assert audit.refused["coordinator"] == {"replay": 1}
    assert audit.undelivered == 0


def test_an_edited_record_is_found(run: Path) -> None:
    content = lines(run, "silo-00")
    content[1] = content[1].replace('"bytes":100', '"bytes":101')
    rewrite(run, "silo-00", content)
    assert any("silo-00.jsonl:2" in f.place and "changed" in f.what for f in audit_run(run).findings)


def test_two_processes_cannot_write_one_log(run: Path) -> None:
    path = run / "messages" / "silo-00.jsonl"
    with MessageLog(path, "silo-00", WallClock()) as log:
        log.note(LogEvent.STARTED)
        before = path.read_bytes()
        with pytest.raises(InputError, match=r"silo-00\.jsonl: found .*another silo-00 is writing"):
            MessageLog(path, "silo-00", WallClock(), patience=0.1)
        assert path.read_bytes() == before
    with MessageLog(path, "silo-00", WallClock()) as log:
        log.note(LogEvent.STARTED)
    assert not audit_run(run).findings


FILLED = """
import resource, sys
from pathlib import Path
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog, write_all
from fedmq.clock import WallClock
from fedmq.wire.codec import decode, encode_body
from fedmq.errors import RunError

path = Path(sys.argv[1])
with MessageLog(path, "silo-00", WallClock()) as log:
    log.note(LogEvent.STARTED)
    before, head = path.read_bytes(), log.head
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, resource.RLIM_INFINITY))
    for _ in range(2):
        try:
            log.note(LogEvent.ENDED)
        except RunError as error:
            print(error)
        assert (path.read_bytes(), log.head) == (before, head)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log.note(LogEvent.RESUMED)
"""


@pytest.mark.slow
def test_a_record_written_only_in_part_is_an_error_and_leaves_no_trace(run: Path) -> None:
    path = run / "messages" / "silo-00.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FILLED, path], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{path}: could not be written: File too large"] * 2
    assert [json.loads(line).get("event") for line in lines(run, "silo-00")[3:]] == ["started", "resumed"]
    assert not audit_run(run).findings


def test_a_record_written_in_several_parts_is_complete(run: Path) -> None:
    class ShortWrites(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data[:7]))

    path = run / "messages" / "silo-00.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    with ShortWrites(path, "wb") as file:
        for line in whole:
            write_all(file, line)
    assert path.read_bytes() == b"".join(whole)
    assert not audit_run(run).findings


@pytest.mark.parametrize("edit", ["remove", "swap", "insert"])
def test_removed_moved_and_inserted_records_are_found(run: Path, edit: str) -> None:
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


def test_a_forged_hash_chain_is_found_by_comparing_with_the_log_of_the_other_end(run: Path) -> None:
    content = lines(run, "silo-00")
    content[1] = content[1].replace('["delta",20]', '["loss",8]')
    rewrite(run, "silo-00", reseal(content))
    findings = audit_run(run).findings
    assert len(findings) == 1
    assert "differs from silo-00.jsonl:2 in payloads" in findings[0].what


def test_a_record_cut_off_the_end_is_found_by_comparing_with_the_log_of_the_other_end(run: Path) -> None:
    rewrite(run, "silo-00", lines(run, "silo-00")[:-1])
    assert [f.what for f in audit_run(run).findings] == ["reply from silo-00 received, but never logged as sent"]


def test_messages_undelivered_at_the_end_are_counted_without_a_finding(run: Path) -> None:
    rewrite(run, "coordinator", lines(run, "coordinator")[:2])
    audit = audit_run(run)
    assert (audit.findings, audit.undelivered) == ([], 1)


def test_an_unfinished_line_is_reported_by_the_audit_and_removed_at_the_next_start(run: Path) -> None:
    path = run / "messages" / "silo-00.jsonl"
    with path.open("a") as file:
        file.write('{"n":3,"proc')
    assert any("no complete record" in f.what for f in audit_run(run).findings)
    with MessageLog(path, "silo-00", WallClock()) as log:
        log.note(LogEvent.RESUMED)
    assert not audit_run(run).findings
    assert json.loads(lines(run, "silo-00")[-1])["n"] == 3


def test_a_frame_logged_twice_is_found(run: Path) -> None:
    content = lines(run, "coordinator")
    rewrite(run, "coordinator", reseal([*content, content[0]]))
    assert any("again" in f.what for f in audit_run(run).findings)


def test_a_missing_log_is_one_finding(run: Path) -> None:
    (run / "messages" / "silo-00.jsonl").unlink()
    findings = audit_run(run).findings
    assert [(f.place, f.what) for f in findings] == [
        ("silo-00.jsonl", "no such log in this folder: 3 messages of silo-00 cannot be compared")
    ]


def test_a_missing_log_is_a_finding_even_if_its_process_sent_no_message(run: Path) -> None:
    with MessageLog(run / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        log.refused("unknown", "unknown_session", "a task before a handshake", 100)
        assert not audit_run(run).findings  # the sender of an invalid frame is unknown, so no log is missing
        log.handshake("received", Kind.READY, "silo-01", 1400)
        log.message("sent", message(0, "coordinator", "silo-02"), "d" * 32, 100)
        log.refused("silo-03", "malformed", "40 MB", 40_000_000)
    assert [(f.place, f.what) for f in audit_run(run).findings] == [
        (f"silo-0{silo}.jsonl", f"no such log in this folder: coordinator.jsonl:{line} mentions silo-0{silo}")
        for silo, line in ((1, 6), (2, 7), (3, 8))
    ]
    for process in ("silo-01", "silo-02", "silo-03"):
        with MessageLog(run / "messages" / f"{process}.jsonl", process, WallClock()) as log:
            log.note(LogEvent.STARTED)
    assert found(run) == [("coordinator.jsonl:6", "1 times a ready from silo-01 received, but 0 times logged as sent")]
    with MessageLog(run / "messages" / "silo-01.jsonl", "silo-01", WallClock()) as log:
        log.handshake("sent", Kind.READY, "coordinator", 1400)
    assert not audit_run(run).findings
    (run / "messages" / "coordinator.jsonl").unlink()
    assert [f.place for f in audit_run(run).findings] == ["coordinator.jsonl"]


def test_a_sender_field_in_a_record_that_has_none_is_ignored(run: Path) -> None:
    content = [
        line.replace('"peer":"silo-00"', '"peer":"silo-00","sender":["x"]') for line in lines(run, "coordinator")
    ]
    rewrite(run, "coordinator", reseal(content))
    assert not audit_run(run).findings


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run folder"):
        audit_run(tmp_path)


def test_records_contain_no_tensor_data(run: Path) -> None:
    assert "buffer" not in "".join(lines(run, "silo-00"))


def test_the_audit_of_a_run_without_messages_is_refused(tmp_path: Path) -> None:
    with MessageLog(tmp_path / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        log.note(LogEvent.INLINE)
    assert audit_run(tmp_path).inline
    done = CliRunner().invoke(app, ["audit", str(tmp_path)])
    assert isinstance(done.exception, InputError)
    assert "sent no messages" in str(done.exception)


@pytest.mark.parametrize("liar", ["silo-00", "coordinator"])
def test_a_note_that_nothing_was_sent_does_not_end_the_audit_of_logs_with_messages(run: Path, liar: str) -> None:
    with MessageLog(run / "messages" / f"{liar}.jsonl", liar, WallClock()) as log:
        log.note(LogEvent.INLINE)
    rewrite(run, "silo-00", reseal(lines(run, "silo-00")[1:]))
    done = CliRunner().invoke(app, ["audit", str(run), "--json"])
    found = [finding["what"] for finding in json.loads(done.stdout)["findings"]]
    assert done.exit_code == 3
    assert "reply from silo-00 received, but never logged as sent" in found
    assert any("says that nothing was sent" in what for what in found)


@pytest.mark.parametrize("other", ["silo-00", "coordinator"])
def test_a_note_that_nothing_was_sent_counts_only_from_a_coordinator_without_a_handshake(
    tmp_path: Path, other: str
) -> None:
    with MessageLog(tmp_path / "messages" / f"{other}.jsonl", other, WallClock()) as log:
        log.note(LogEvent.INLINE)
        if other == "coordinator":
            log.handshake("received", Kind.HELLO, "silo-00", 1400)
    audit = audit_run(tmp_path)
    assert not audit.inline
    assert audit.findings[0].place == f"{other}.jsonl:1"


def found(run: Path) -> list[tuple[str, str]]:
    return [(finding.place, finding.what) for finding in audit_run(run).findings]


def test_a_record_of_another_process_is_found(run: Path) -> None:
    stolen = lines(run, "silo-00")[0]
    rewrite(run, "coordinator", reseal([*lines(run, "coordinator")[1:], stolen]))
    assert ("coordinator.jsonl:4", "a record of silo-00 in the log of coordinator") in found(run)
    rewrite(run, "coordinator", reseal([stolen.replace('"process":"silo-00"', '"process":"coordinator"')]))
    assert ("coordinator.jsonl:1", "coordinator logged sending in the name of silo-00") in found(run)


def test_swapped_logs_are_found(run: Path) -> None:
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
    assert ("silo-00.jsonl:1", "no complete record of a message log") in found(run)


@pytest.mark.parametrize("edit", ["doubled", "spaced", "carriage return"])
def test_a_record_serialised_in_another_way_is_found(run: Path, edit: str) -> None:
    content = lines(run, "silo-00")
    match edit:
        case "doubled":  # a reader that keeps the first of two equal keys sees another size
            content[2] = content[2].replace('{"action"', '{"bytes":1,"action"')
        case "spaced":
            content[2] = content[2].replace('"bytes":', '"bytes": ')
        case _:
            content[2] += "\r"
    rewrite(run, "silo-00", content)
    assert ("silo-00.jsonl:3", "no complete record of a message log") in found(run)


def test_a_message_removed_from_both_logs_leaves_a_gap_in_its_sessions_counters(run: Path) -> None:
    for process in ("silo-00", "coordinator"):
        forge(run, process, lambda record: None if record.get("counter") == 2 else record)
    gap = "message 3 of a session, expected 2: what was between is not in the log"
    assert found(run) == [("coordinator.jsonl:2", gap), ("silo-00.jsonl:2", gap)]
    for process in ("silo-00", "coordinator"):
        forge(run, process, lambda record: None if record.get("counter") == 1 else record)
    assert "message 3 of a session, expected 1" in found(run)[0][1]  # the first message of a session is no exception


def test_the_coordinator_counts_from_0_in_each_session(run: Path) -> None:
    for process, action in (("coordinator", "sent"), ("silo-00", "received")):
        with MessageLog(run / "messages" / f"{process}.jsonl", process, WallClock()) as log:
            for session, counter in ((b"s" * 16, 0), (b"t" * 16, 0), (b"s" * 16, 1)):
                down = message(counter, "coordinator", "silo-00")
                log.message(action, replace(down, header=replace(down.header, session=session)), "d" * 32, 100)
    assert found(run) == []
    forge(run, "coordinator", lambda record: None if record.get("counter") == 0 else record)
    assert any("message 1 of a session, expected 0" in what for _, what in found(run))


def test_messages_received_in_another_order_than_they_were_sealed_are_found(run: Path) -> None:
    content = lines(run, "coordinator")
    content[0], content[1] = content[1], content[0]
    wall = json.loads(content[1])["wall"]
    content[0] = json.dumps({**json.loads(content[0]), "wall": wall}, sort_keys=True, separators=(",", ":"))
    rewrite(run, "coordinator", reseal(content))
    assert found(run) == [
        ("coordinator.jsonl:1", "message 2 of a session, expected 1: what was between is not in the log"),
        ("coordinator.jsonl:2", "message 1 of a session after 2"),
    ]


def test_a_refusal_removed_from_the_log_leaves_a_gap_in_the_received_messages(run: Path) -> None:
    with MessageLog(run / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        for counter in (4, 5):
            log.message("sent", message(counter), f"{counter:032x}", 100)
    with MessageLog(run / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        log.refused("silo-00", "layout", "a delta of another layout", 100)
        log.message("received", message(5), f"{5:032x}", 100)
    assert found(run) == []
    forge(run, "coordinator", lambda record: None if record["action"] == "refused" else record)
    gap = "message 5 of a session, expected 4: what was between is not in the log"
    assert found(run) == [("coordinator.jsonl:4", gap)]


def test_a_logged_refusal_explains_the_gap_of_messages_lost_in_transit(run: Path) -> None:
    with MessageLog(run / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        for counter in range(4, 9):
            log.message("sent", message(counter), f"{counter:032x}", 100)
    with MessageLog(run / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        log.refused("silo-00", "gap", "message 7, expected 4", 100)
        log.message("received", message(8), f"{8:032x}", 100)
        log.refused("silo-00", "unexpected", "a reply nobody asked for, logged above as received", 0)
    assert found(run) == []
    assert audit_run(run).undelivered == 4


def test_a_handshake_that_its_sender_did_not_log_is_found(run: Path) -> None:
    for process, action, peer in (("silo-00", "sent", "coordinator"), ("coordinator", "received", "silo-00")):
        with MessageLog(run / "messages" / f"{process}.jsonl", process, WallClock()) as log:
            log.handshake(action, Kind.HELLO, peer, 1400)  # type: ignore[arg-type]
            log.handshake(action, Kind.READY, peer, 300)  # type: ignore[arg-type]
    assert found(run) == []
    forge(run, "silo-00", lambda record: None if record.get("kind") in ("hello", "ready") else record)
    # A hello may be replayed by anyone who recorded one, so its absence is no finding.
    assert found(run) == [("coordinator.jsonl:6", "1 times a ready from silo-00 received, but 0 times logged as sent")]


def test_the_audit_reports_logs_that_are_being_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MessageLog(run / "messages" / "silo-00.jsonl", "silo-00", WallClock()):
        audit = audit_run(run)
    assert audit.written == ("silo-00",)
    assert audit_run(run).written == ()
    print_audit(audit, verdict(audit, Evidence()), Console())
    assert "silo-00: still being written" in capsys.readouterr().out


def test_a_message_between_silos_is_found(run: Path) -> None:
    with MessageLog(run / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        aside = message(1, receiver="silo-01")
        log.message("sent", replace(aside, header=replace(aside.header, session=b"t" * 16)), "a" * 32, 100)
    assert (
        "silo-00.jsonl:4",
        "a message from silo-00 to silo-01: silos exchange messages only with the coordinator",
    ) in found(run)


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
def test_a_record_with_an_invalid_field_is_found(run: Path, process: str, change: dict[str, Any]) -> None:
    def misstate(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, **change} if change.keys() <= record.keys() else record

    assert found(run) == []
    forge(run, process, misstate)
    assert any("no complete record of a message log" in what for _, what in found(run))


def test_a_logged_digest_that_differs_from_the_sent_payload_is_found(run: Path) -> None:
    def lie(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "digests": ["ab" * 32]} if record["counter"] == 2 else record

    forge(run, "silo-00", lie)
    assert found(run) == [("coordinator.jsonl:2", "differs from silo-00.jsonl:2 in digests")]


def test_missing_digests_are_found(run: Path) -> None:
    for process in ("silo-00", "coordinator"):
        forge(run, process, lambda record: {**record, "digests": []} if "digests" in record else record)
    assert {("silo-00.jsonl:1", "0 digests of 1 payloads"), ("coordinator.jsonl:3", "0 digests of 1 payloads")} <= set(
        found(run)
    )
    forge(run, "silo-00", lambda record: {key: record[key] for key in record if key != "digests"})
    assert ("silo-00.jsonl:1", "no complete record of a message log") in found(run)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (Kind.REPLY, Loss(np.float64(0.1))),  # type: ignore[call-arg]
        (Kind.REPLY, Loss(1)),
        (Kind.REPLY, Metrics({"b": np.float64(0.5), "a": 1}, {"silo-01": {"y": 1, "x": 0.25}, "silo-00": {}})),
        (Kind.ERROR, Error("failed", "why")),
    ],
)
def test_both_ends_compute_the_same_digest_for_any_type_of_number(kind: Kind, payload: Any) -> None:
    header = replace(message(1).header, kind=kind)
    body = b"".join(map(bytes, encode_body(Message(header, (payload,)))))
    assert digest(decode(header, body).payloads[0]) == digest(payload)


def test_escape_sequences_in_a_log_do_not_reach_the_auditors_terminal(run: Path) -> None:
    def add_escape_sequence(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "payloads": [["x\x1b[2Jy", 20]]}

    forge(run, "silo-00", add_escape_sequence)
    forge(run, "coordinator", lambda each: {**each, "peer": "z\x1b]0;t\x07"} if each["action"] == "refused" else each)
    (run / "messages" / "silo-00.jsonl").rename(run / "messages" / "silo\x1b[31m.jsonl")
    console = Console(record=True, width=200)
    audit = audit_run(run)
    print_audit(audit, verdict(audit, Evidence()), console)
    policy.show(held(run, "up: {kinds: [loss]}"), console)
    shown = console.export_text()
    assert "x\\x1b[2Jy" in shown
    assert "z\\x1b]0;t\\x07" in shown
    assert not {"\x1b", "\x07"} & set(shown)


DOCUMENT = Path(__file__).parent.parent / "docs" / "reference" / "message_logs.md"
GUIDE = Path(__file__).parent.parent / "docs" / "howto" / "audit.md"


@pytest.mark.slow
def test_the_checking_script_in_the_docs_finds_what_the_audit_finds(run: Path, tmp_path: Path) -> None:
    block = DOCUMENT.read_text().partition("    import hashlib")[2].partition("\n\nAnyone")[0]
    script = tmp_path / "check.py"
    script.write_text(textwrap.dedent("    import hashlib" + block))
    log = run / "messages" / "silo-00.jsonl"

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, script, log], capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    content = lines(run, "silo-00")
    assert check().stdout == f"3 records, last hash {json.loads(content[-1])['hash']}, not signed\n"
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
    assert check().stdout == f"0 records, last hash {'0' * 64}, not signed\n"


@pytest.mark.slow
def test_the_checking_script_in_the_docs_checks_signatures(tmp_path: Path) -> None:
    block = DOCUMENT.read_text().partition("    import hashlib")[2].partition("\n\nAnyone")[0]
    script, run, key = tmp_path / "check.py", tmp_path / "run", Ed25519PrivateKey.generate()
    script.write_text(textwrap.dedent("    import hashlib" + block))
    with MessageLog(run / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        log.start(Identity("silo-00", key), {}, StartFacts("r-0", "0" * 64, "rcsr", {"clip_norm": None}, "d"))
        log.message("sent", message(1), "1" * 32, 100)

    def check() -> tuple[int, str]:
        path = run / "messages" / "silo-00.jsonl"
        done = subprocess.run(
            [sys.executable, script, path], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        return done.returncode, done.stdout + done.stderr

    signed = f"signed up to line 4 with the key SHA256 {fingerprint(key.public_key())}"
    assert check() == (0, f"4 records, last hash {log.head}, {signed}\n")
    forge(run, "silo-00", lambda record: record | {"bytes": 101} if "bytes" in record else record)
    assert check() == (1, "line 4: not signed with the key that this log declares\n")


def test_the_docs_name_every_field_of_a_record(run: Path) -> None:
    fields = {key for process in ("silo-00", "coordinator") for line in lines(run, process) for key in json.loads(line)}
    named = set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))
    assert fields <= named


def test_the_content_of_a_log_is_never_rendered_as_markup(run: Path) -> None:
    rewrite(run, "silo-00", reseal([line.replace('"delta"', '"x[/nope]y"') for line in lines(run, "silo-00")]))
    done = CliRunner().invoke(app, ["audit", str(run)])
    assert done.exit_code == 3, done.exception
    rewrite(run, "silo-00", reseal([line.replace("nope", "conceal") for line in lines(run, "silo-00")]))
    table = CliRunner().invoke(app, ["audit", str(run), "--policy", str(written(run, "up: {kinds: [loss]}"))])
    assert table.exit_code == 3
    assert "[/conceal]" in table.stdout


def test_brackets_in_a_path_are_not_rendered_as_markup(tmp_path: Path) -> None:
    place = tmp_path / "q[/b] br[old]"
    done = CliRunner().invoke(app, ["keys", "init", str(place), "--silos", "2"])
    assert (done.exit_code, done.exception) == (0, None)
    assert "br[old]" in done.stdout
    shown = CliRunner().invoke(app, ["keys", "show", str(place)])
    prints = [fingerprint(key) for key in load_accepted(place).values()]
    assert all(each in re.sub(r"[\s│┃]", "", shown.stdout) or each[:30] in shown.stdout for each in prints)


def test_a_folder_in_place_of_a_log_is_an_input_error(run: Path) -> None:
    (run / "messages" / "silo-07.jsonl").mkdir()
    with pytest.raises(InputError, match=r"silo-07\.jsonl: found 'Is a directory'"):
        audit_run(run)
