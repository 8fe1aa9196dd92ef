"""The audit of message logs: edited, lost and forged records are found."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedmq.audit import policy
from fedmq.audit.findings import Cause
from fedmq.audit.log_checks import audit_run
from fedmq.audit.report import Evidence, verdict
from fedmq.cli.audit import print_audit
from fedmq.clock import WallClock
from fedmq.errors import InputError
from fedmq.storage.run_folder import write_whole
from fedmq.wire.codec import decode, digest, encode_body
from fedmq.wire.keys import fingerprint
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import Loss, Metrics
from tests.adversary_forged_logs import forge, lines, rebuild, reseal, rewrite
from tests.command_line import printed, refused
from tests.two_logs import KEYS, exchange, held, log_of, message, two_logs, written
from tests.waiting import PATIENCE

ENDS = ("coordinator", "silo-00")
Record = dict[str, Any]
Found = set[tuple[Cause, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with the logs of one silo and of the coordinator."""
    return two_logs(tmp_path)


def found(run: Path) -> Found:
    return {(finding.cause, finding.place) for finding in audit_run(run).findings}


def signed_again(run: Path, *processes: str) -> Found:
    """What is found after a forger with the keys of these processes, by default both, has signed their logs."""
    rebuild(run, {name: KEYS[name] for name in processes or ENDS})
    return found(run)


def both(run: Path, change: Callable[[Record], Record | None]) -> None:
    for process in ENDS:
        forge(run, process, change)


def test_untouched_logs_agree(run: Path) -> None:
    audit = audit_run(run)
    assert not audit.findings
    assert audit.payloads.bytes["silo-00"]["delta"] == 3 * 20
    assert audit.frames["silo-00"] == 300
    assert audit.refused["coordinator"] == {"replay": 1}
    assert audit.undelivered == 0
    assert "buffer" not in "".join(lines(run, "silo-00"))


# ----------------------------------------------------------------------------------------------- a log in its own order
def swapped(content: list[str]) -> list[str]:
    return [*content[:2], content[3], content[2], *content[4:]]


#: Edits of the text of a log, and the line at which each is found; another serialisation is none of a record.
EDITS: dict[str, tuple[Callable[[list[str]], list[str]], int]] = {
    "changed": (lambda c: [*c[:3], c[3].replace('"bytes":100', '"bytes":101'), *c[4:]], 4),
    "removed": (lambda c: [*c[:3], *c[4:]], 4),
    "swapped": (swapped, 3),
    "inserted": (lambda c: [*c[:4], c[2], *c[4:]], 5),
    "a key twice": (lambda c: [*c[:4], c[4].replace('{"action"', '{"bytes":1,"action"'), *c[5:]], 5),
    "spaced": (lambda c: [*c[:4], c[4].replace('"bytes":', '"bytes": '), *c[5:]], 5),
    "carriage return": (lambda c: [*c[:4], c[4] + "\r", *c[5:]], 5),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_log_is_found_by_its_chain(run: Path, edit: str) -> None:
    change, line = EDITS[edit]
    rewrite(run, "silo-00", change(lines(run, "silo-00")))
    assert (Cause.CHAIN, f"silo-00.jsonl:{line}") in found(run)


@pytest.mark.parametrize(
    ("process", "change"),
    [
        ("silo-00", {"wall": "yesterday"}),
        ("silo-00", {"tag": "d"}),
        ("silo-00", {"kind": "gossip"}),
        ("silo-00", {"session": "ab"}),
        ("silo-00", {"counter": -1}),
        ("silo-00", {"digests": None}),
        ("coordinator", {"reason": "because"}),
    ],
)
def test_a_record_with_an_invalid_field_is_found(run: Path, process: str, change: Record) -> None:
    forge(run, process, lambda record: {**record, **change} if change.keys() <= record.keys() else record)
    assert Cause.CHAIN in {cause for cause, _ in found(run)}


def test_an_unfinished_line_is_reported_by_the_audit_and_removed_at_the_next_start(run: Path) -> None:
    with (run / "messages" / "silo-00.jsonl").open("a") as file:
        file.write('{"n":6,"proc')
    assert found(run) == {(Cause.CHAIN, "silo-00.jsonl:7")}
    with log_of(run, "silo-00"):
        pass
    assert not found(run)


# --------------------------------------------------------------------------- logs that were forged and signed once more
def other_kind(record: Record) -> Record:
    return record | {"payloads": [["loss", 8]]} if record.get("counter") == 2 else record


def without(counter: int) -> Callable[[Record], Record | None]:
    return lambda record: None if record.get("counter") == counter else record


def reordered(run: Path) -> None:
    content = [json.loads(line) for line in lines(run, "coordinator")]
    content[2], content[3] = content[3] | {"wall": content[2]["wall"]}, content[2] | {"wall": content[3]["wall"]}
    rewrite(run, "coordinator", reseal(map(json.dumps, content)))


def moved_to(log: str, **changes: Any) -> Callable[[Path], None]:
    """The first message of the silo's log becomes the last one of a log."""

    def change(run: Path) -> None:
        stolen = json.loads(lines(run, "silo-00")[2]) | changes
        del stolen["head"]
        content = [json.loads(line) for line in lines(run, log)]
        rewrite(run, log, reseal(json.dumps(one) for one in [*content, stolen | {"wall": content[-1]["wall"]}]))

    return change


def no_digests(record: Record) -> Record:
    return record | {"digests": []} if "digests" in record else record


def as_handshake(record: Record) -> Record:
    return {key: record[key] for key in record if key not in ("counter", "head")} | {"peer": "x"}


C, S = "coordinator.jsonl", "silo-00.jsonl"
FORGERIES: dict[str, tuple[Callable[[Path], None], Found]] = {
    "kind at one end": (lambda run: forge(run, "silo-00", other_kind), {(Cause.ENDS, f"{C}:4")}),
    "digest at one end": (
        lambda run: forge(run, "silo-00", lambda r: r | {"digests": ["ab" * 32]} if r.get("counter") == 2 else r),
        {(Cause.ENDS, f"{C}:4")},
    ),
    "no digests": (
        lambda run: both(run, no_digests),
        {(Cause.ENDS, f"{log}:{line}") for log in (C, S) for line in (3, 4, 5)},
    ),
    "gap": (lambda run: both(run, without(2)), {(Cause.SESSION, f"{C}:4"), (Cause.SESSION, f"{S}:4")}),
    "no first message": (lambda run: both(run, without(1)), {(Cause.SESSION, f"{C}:3"), (Cause.SESSION, f"{S}:3")}),
    "another order": (reordered, {(Cause.SESSION, f"{C}:3"), (Cause.SESSION, f"{C}:4")}),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_that_is_signed_is_found_in_the_sessions_and_at_the_other_end(run: Path, forgery: str) -> None:
    change, expected = FORGERIES[forgery]
    change(run)
    assert expected <= signed_again(run, *(("silo-00",) if "one end" in forgery else ()))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (moved_to("coordinator"), (Cause.SENDER, f"{C}:8")),  # a record of another process
        # What follows a signed end does not count, whatever it says.
        (moved_to("coordinator", process="coordinator"), (Cause.SIGNATURE, C)),  # sent in its name
        (moved_to("silo-00"), (Cause.SIGNATURE, S)),  # logged twice
        (moved_to("silo-00", receiver="silo-01", session="ab" * 16), (Cause.SIGNATURE, S)),  # between silos
        (lambda run: both(run, lambda r: as_handshake(r) if "counter" in r else r), (Cause.CHAIN, f"{S}:3")),
        (lambda run: rewrite(run, "silo-00", lines(run, "silo-00")[:4]), (Cause.NOT_SENT, f"{C}:5")),
        (
            lambda run: forge(run, "silo-00", lambda r: None if r["action"] in ("start", "signed") else r),
            (Cause.SIGNATURE, S),
        ),
    ],
)
def test_a_forgery_without_keys_is_found(
    run: Path, change: Callable[[Path], None], expected: tuple[Cause, str]
) -> None:
    change(run)
    assert expected in found(run)


# ----------------------------------------------------------------------------------- what is lost, and what explains it
def test_messages_undelivered_at_the_end_are_counted_without_a_finding(run: Path) -> None:
    with log_of(run, "silo-00") as silo:
        exchange(silo, None, message(4))
    audit = audit_run(run)
    assert (audit.findings, audit.undelivered) == ([], 1)


def test_a_missing_log_is_one_finding_even_if_its_process_sent_no_message(run: Path) -> None:
    with log_of(run, "coordinator") as log:
        log.refused("unknown", "unknown_session", "task before a handshake", 100)
        assert not found(run)  # the sender of an invalid frame is unknown, so no log is missing
        log.handshake("received", Kind.READY, "silo-01", 1400)
        exchange(log, None, message(0, "coordinator", "silo-02"))
        log.refused("silo-03", "malformed", "40 MB", 40_000_000)
    late = ("silo-01", "silo-02", "silo-03")
    assert found(run) == {(Cause.NO_LOG, f"{name}.jsonl") for name in late}
    for process in late:
        with log_of(run, process):
            pass
    assert found(run) == {(Cause.NOT_SENT, f"{C}:11")}  # the ready
    with log_of(run, "silo-01") as log:
        log.handshake("sent", Kind.READY, "coordinator", 1400)
    assert not found(run)
    (run / "messages" / C).unlink()
    assert found(run) == {(Cause.NO_LOG, C)}


def test_the_coordinator_counts_from_0_in_each_session(run: Path) -> None:
    with log_of(run, "coordinator") as coordinator, log_of(run, "silo-00") as silo:
        for session, counter in ((b"s" * 16, 0), (b"t" * 16, 0), (b"s" * 16, 1)):
            down = message(counter, "coordinator", "silo-00")
            exchange(coordinator, silo, replace(down, header=replace(down.header, session=session)))
    assert not found(run)
    forge(run, "coordinator", without(0))
    assert Cause.SESSION in {cause for cause, _ in found(run)}


def test_a_refusal_explains_a_gap_and_its_removal_leaves_one(run: Path) -> None:
    with log_of(run, "silo-00") as silo, log_of(run, "coordinator") as coordinator:
        exchange(silo, None, message(4))
        coordinator.refused("silo-00", "layout", "a delta of another layout", 100)
        exchange(silo, coordinator, message(5))
        for counter in (6, 7):
            exchange(silo, None, message(counter))
        coordinator.refused("silo-00", "gap", "message 8, expected 6", 100)  # of any number of lost messages
        exchange(silo, coordinator, message(8))
        coordinator.refused("silo-00", "unexpected", "a reply without a task, logged above as received", 0)
    assert not found(run)
    assert audit_run(run).undelivered == 3
    forge(run, "coordinator", lambda record: None if record.get("reason") in ("replay", "layout") else record)
    assert signed_again(run) == {(Cause.SESSION, f"{C}:9")}


def test_a_handshake_that_its_sender_did_not_log_is_found(run: Path) -> None:
    with log_of(run, "silo-00") as silo, log_of(run, "coordinator") as coordinator:
        for kind in (Kind.HELLO, Kind.READY):
            silo.handshake("sent", kind, "coordinator", 300)
            coordinator.handshake("received", kind, "silo-00", 300)
    assert not found(run)
    forge(run, "silo-00", lambda record: None if record.get("kind") in ("hello", "ready") else record)
    # A hello may be replayed by anyone who recorded one, so its absence is no finding.
    assert signed_again(run) == {(Cause.NOT_SENT, f"{C}:11")}


# ----------------------------------------------------------------------------------- folders, and runs without messages
def test_folders_without_logs_and_folders_in_place_of_logs_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="run folder"):
        audit_run(tmp_path / "empty")
    (run / "messages" / "silo-07.jsonl").mkdir()
    with pytest.raises(InputError, match=r"silo-07\.jsonl: found 'Is a directory'"):
        audit_run(run)


def test_the_audit_of_a_run_without_messages_is_refused(tmp_path: Path) -> None:
    with MessageLog(tmp_path / "messages" / C, "coordinator", WallClock()) as log:
        log.note(LogEvent.INLINE)
    assert audit_run(tmp_path).inline
    assert "sent no messages" in refused("audit", tmp_path)


@pytest.mark.parametrize("liar", ENDS)
def test_a_note_that_nothing_was_sent_hides_nothing_in_logs_with_messages(run: Path, liar: str) -> None:
    with log_of(run, liar) as log:
        log.note(LogEvent.INLINE)
    assert len(found(run)) == 1 and not audit_run(run).inline
    rewrite(run, "silo-00", reseal([line for line in lines(run, "silo-00") if '"counter":1' not in line]))
    assert {Cause.SENDER, Cause.NOT_SENT} <= {cause for cause, _ in found(run)}


@pytest.mark.parametrize("other", ENDS)
def test_a_note_that_nothing_was_sent_counts_only_from_a_coordinator_without_a_handshake(
    tmp_path: Path, other: str
) -> None:
    with MessageLog(tmp_path / "messages" / f"{other}.jsonl", other, WallClock()) as log:
        log.note(LogEvent.INLINE)
        if other == "coordinator":
            log.handshake("received", Kind.HELLO, "silo-00", 1400)
    assert not audit_run(tmp_path).inline
    assert {(Cause.SENDER, f"{other}.jsonl:1"), (Cause.SIGNATURE, f"{other}.jsonl")} <= found(tmp_path)


# ------------------------------------------------------------------------------------------------ the log being written
def test_two_processes_cannot_write_one_log_and_the_audit_says_that_one_is_written(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "messages" / S
    with log_of(run, "silo-00"):
        before = path.read_bytes()
        with pytest.raises(InputError, match=r"silo-00\.jsonl: found .*another silo-00 is writing"):
            MessageLog(path, "silo-00", WallClock(), patience=0.1)
        assert path.read_bytes() == before
        audit = audit_run(run)
    assert audit.written == ("silo-00",)
    assert audit_run(run).written == ()
    print_audit(audit, verdict(audit, Evidence()), Console())
    assert "silo-00: still being written" in capsys.readouterr().out


FILLED = """
import resource, sys
from pathlib import Path
from fedmq.wire.log_events import LogEvent
from fedmq.storage.run_folder import write_whole
from fedmq.wire.message_log import MessageLog
from fedmq.clock import WallClock
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
    path = run / "messages" / S
    done = subprocess.run(
        [sys.executable, "-c", FILLED, path], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{path}: could not be written: File too large"] * 2
    assert [json.loads(line).get("event") for line in lines(run, "silo-00")[6:]] == ["started", "resumed"]
    assert not found(run)


def test_a_record_written_in_several_parts_is_complete(run: Path) -> None:
    class ShortWrites(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data[:7]))

    path = run / "messages" / S
    whole = path.read_bytes().splitlines(keepends=True)
    with ShortWrites(path, "wb") as file:
        for line in whole:
            write_whole(file, line)
    assert path.read_bytes() == b"".join(whole)


@pytest.mark.parametrize(
    "payload",
    [
        Loss(np.float64(0.1)),  # type: ignore[call-arg]
        Loss(1),
        Metrics({"b": np.float64(0.5), "a": 1}, {"silo-01": {"y": 1, "x": 0.25}, "silo-00": {}}),
    ],
)
def test_both_ends_compute_the_same_digest_for_any_type_of_number(payload: Any) -> None:
    header = message(1).header
    body = b"".join(map(bytes, encode_body(Message(header, (payload,)))))
    assert digest(decode(header, body).payloads[0]) == digest(payload)


# -------------------------------------------------------------------------------------------------------- what is shown
def test_the_content_of_a_log_reaches_the_terminal_neither_as_escape_sequences_nor_as_markup(run: Path) -> None:
    forge(run, "silo-00", lambda each: each | {"payloads": [["x\x1b[2Jy[/nope]", 20]]} if "payloads" in each else each)
    forge(run, "coordinator", lambda each: {**each, "peer": "z\x1b]0;t\x07"} if each["action"] == "refused" else each)
    (run / "messages" / S).rename(run / "messages" / "silo\x1b[31m.jsonl")
    console = Console(record=True, width=200)
    audit = audit_run(run)
    print_audit(audit, verdict(audit, Evidence()), console)
    policy.show(held(run, "up: {kinds: [loss]}"), console)
    shown = console.export_text()
    assert "x\\x1b[2Jy[/nope]" in shown
    assert "z\\x1b]0;t\\x07" in shown
    assert not {"\x1b", "\x07"} & set(shown)
    assert "[/nope]" in printed("audit", run, "--policy", written(run, "up: {kinds: [loss]}"), code=3)


DOCUMENT = Path(__file__).parent.parent / "docs" / "reference" / "message_logs.md"


@pytest.mark.slow
def test_the_checking_script_in_the_docs_finds_what_the_audit_finds(run: Path, tmp_path: Path) -> None:
    block = DOCUMENT.read_text().partition("    import hashlib")[2].partition("\n\nAnyone")[0]
    script, log = tmp_path / "check.py", run / "messages" / S
    script.write_text(textwrap.dedent("    import hashlib" + block))

    def check() -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, script, log], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        return done.returncode, done.stdout + done.stderr

    content = lines(run, "silo-00")
    signed = f"signed up to line 6 with the key SHA256 {fingerprint(KEYS['silo-00'].public_key())}"
    assert check() == (0, f"6 records, last hash {json.loads(content[-1])['hash']}, {signed}\n")
    for change, line in EDITS.values():
        rewrite(run, "silo-00", change(content))
        assert check() == (1, f"line {line}: not what was written\n")
    for broken in ("garbage", "[]", content[1][:50], "\udcff", ""):
        log.write_bytes("".join(f"{line}\n" for line in (content[0], broken)).encode(errors="surrogateescape"))
        assert check() == (1, "line 2: not what was written\n")
    rewrite(run, "silo-00", content)
    forge(run, "silo-00", lambda record: record | {"bytes": 101} if "bytes" in record else record)
    assert check() == (1, "line 6: not signed with the key that this log declares\n")


def test_the_docs_name_every_field_of_a_record(run: Path) -> None:
    fields = {key for process in ENDS for line in lines(run, process) for key in json.loads(line)}
    assert fields <= set(re.findall(r"`(\w+)`", DOCUMENT.read_text()))


def test_logs_of_sites_are_found_in_the_folders_of_their_runs_and_two_of_one_process_are_refused(
    run: Path, tmp_path: Path
) -> None:
    whole = audit_run(run).to_plain()
    for at in ("", "silo-00", "silo-00/own-0", "silo-00/run/own-0"):
        moved = tmp_path / "sites" / at / "messages"
        moved.mkdir(parents=True)
        log = (run / "messages" / "silo-00.jsonl").rename(moved / "silo-00.jsonl")
        assert audit_run(run).incomplete
        assert audit_run(run, elsewhere=[tmp_path / "sites"]).to_plain() == whole
        log.rename(run / "messages" / "silo-00.jsonl")
    shutil.copy(run / "messages" / "silo-00.jsonl", log)
    with pytest.raises(InputError, match=r"--logs .*sites.* is a log of silo-00.*one each"):
        audit_run(run, elsewhere=[tmp_path / "sites"])
    log.unlink()
    with pytest.raises(InputError, match=r"--logs .*found 'no log of "):
        audit_run(run, elsewhere=[tmp_path / "sites"])
