"""The audit reports a start that the coordinator refused before the silo joined, and such a start hides nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.round_events import Phase
from fedmq.clock import WallClock
from fedmq.wire.keys import Identity, init_keys, load_accepted, load_identity
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import SignedAt
from fedmq.wire.message_log import MessageLog, StartFacts
from fedmq.wire.messages import Kind, Reason
from tests import threaded_run
from tests.adversary_forged_logs import lines, reseal, rewrite
from tests.command_line import audited
from tests.threaded_run import resolved

pytestmark = pytest.mark.slow

Record = dict[str, Any]
SETTINGS = ("rounds=1", "participation=1.0", "evaluation.every=1")
OTHER_RUN = "other-0123456789ab"


def refused_start(run: Path, identity: Identity, facts: StartFacts, reason: Reason) -> None:
    """What a silo's log says after a start that was refused."""
    with MessageLog(run / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        log.note(LogEvent.STARTED, run=facts.run)
        accepted = load_accepted(run / "keys")
        log.start(identity, {"coordinator": accepted["coordinator"]}, facts)
        log.handshake("sent", Kind.HELLO, "coordinator", 1508)
        log.note(LogEvent.HELLO_REFUSED, reason=str(reason), detail="refused")
        log.sign(SignedAt.END)


@pytest.fixture(scope="module")
def honest(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose silo-00 was started with a wrong key and with another scenario before it joined."""
    out = tmp_path_factory.mktemp("refused") / "run"
    scenario = resolved(tiny, *SETTINGS)
    names = ("coordinator", "evaluator", *(f"silo-{n:02d}" for n in range(scenario.silos.count)))
    init_keys(out / "keys", names)
    init_keys(out.parent / "wrong", names)
    facts = StartFacts.of(threaded_run.run_of(scenario), "0" * 64)
    other = StartFacts(OTHER_RUN, "1" * 64, facts.protocol, facts.privacy, "2" * 64)
    refused_start(out, load_identity(out.parent / "wrong", "silo-00"), facts, Reason.UNKNOWN_SENDER)
    refused_start(out, load_identity(out / "keys", "silo-00"), other, Reason.WRONG_RUN)
    assert threaded_run.run(scenario, out).phase is Phase.DONE
    return out


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "run"))


def test_a_refused_start_is_reported_and_is_no_difference(run: Path) -> None:
    for options in ((), ("--keys", str(run / "keys"))):
        code, found = audited(run, *options)
        assert (code, found["findings"]) == (0, [])
        assert len(found["refused_starts"]) == 1
        line = found["refused_starts"][0]
        assert line.startswith("silo-00 was not admitted at 2 starts: unknown key, another scenario")
        assert "the coordinator's log has no such refusal" in line  # it was never asked in this test
    assert OTHER_RUN not in (run / "audit.html").read_text().split("</h1>")[0]


def moved(change: Callable[[list[Record]], list[Record]]) -> Callable[[Path], None]:
    """A forgery of silo-00's log with a valid chain."""

    def forgery(run: Path) -> None:
        content = change([json.loads(line) for line in lines(run, "silo-00")])
        rewrite(run, "silo-00", reseal(map(json.dumps, content)))

    return forgery


def _places(content: list[Record], action: str) -> list[int]:
    return [n for n, record in enumerate(content) if record["action"] == action]


def message_in_a_refused_start(content: list[Record]) -> list[Record]:
    """A message is said to have been sent under the other scenario."""
    message = next(r for r in content if r["action"] == "sent" and "payloads" in r)
    second = _places(content, "start")[1]
    extra = message | {"run": OTHER_RUN, "wall": content[second]["wall"]}
    return [*content[: second + 3], extra, *content[second + 3 :]]


def session_in_a_refused_start(content: list[Record]) -> list[Record]:
    """The coordinator is said to have welcomed the silo under the other scenario."""
    welcome = next(r for r in content if r.get("kind") == "welcome")
    second = _places(content, "start")[1]
    extra = welcome | {"wall": content[second]["wall"]}
    return [*content[: second + 3], extra, *content[second + 3 :]]


def whole_session_under_another_key(content: list[Record]) -> list[Record]:
    """The true start is removed: the session follows the declaration of the other scenario."""
    third = _places(content, "start")[2]
    return content[: third - 1] + content[third + 1 :]


def note_between_declaration_and_session(content: list[Record]) -> list[Record]:
    """As above, but a note that the silo was started stands before the session."""
    third = _places(content, "start")[2]
    return content[:third] + content[third + 1 :]


def unknown_record(content: list[Record]) -> list[Record]:
    """A refused start has a note of something that only a silo with a session does."""
    second = _places(content, "start")[1]
    note = {"action": "note", "event": str(LogEvent.STATE_KEPT), "process": "silo-00", "wall": content[second]["wall"]}
    return [*content[: second + 2], note | {"n": 0, "hash": "", "previous": ""}, *content[second + 2 :]]


FORGERIES = (
    message_in_a_refused_start,
    session_in_a_refused_start,
    whole_session_under_another_key,
    note_between_declaration_and_session,
    unknown_record,
)


@pytest.mark.parametrize("change", FORGERIES, ids=lambda change: change.__name__)
def test_a_session_or_message_under_another_key_or_scenario_is_found(
    run: Path, change: Callable[[list[Record]], list[Record]]
) -> None:
    moved(change)(run)
    code, found = audited(run)
    places = [each["what"] for each in found["findings"]]
    assert code == 3
    assert any(OTHER_RUN in what or "another scenario than" in what for what in places), places


def test_a_refused_start_in_a_log_with_a_broken_chain_counts(run: Path) -> None:
    content = lines(run, "silo-00")
    rewrite(run, "silo-00", [content[0], *content[2:]])
    code, found = audited(run)
    assert code == 3 and any(OTHER_RUN in each["what"] for each in found["findings"])
    assert found["refused_starts"] == []
