"""``fedmq status --connect``: a coordinator sends its status to holders of accepted keys, and nothing to others."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.program import CoordinatorArguments, run_coordinator
from coordinator.status import Inquiries
from fedmq.clock import WallClock
from fedmq.errors import InputError, RemoteWireError, RunError
from fedmq.runs.status import SiloPhase, status_of
from fedmq.wire.handshake import complete, confirm, initiate, respond
from fedmq.wire.inquiry import ask_status
from fedmq.wire.keys import accept_key, init_keys, load_accepted, load_identity, new_key
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import HandshakeRecord, NoteRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import ANY_RUN
from fedmq.wire.payloads import MAX_STATUS
from tests.command_line import completed, printed
from tests.threaded_run import resolved, run_of
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def keys(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of a run, and in ``operator`` next to them those of an operator who takes no part in it."""
    folder = tmp_path_factory.mktemp("inquiries") / "keys"
    init_keys(folder, ("coordinator", "evaluator", *resolved(tiny).silo_names))
    operator = new_key(folder.parent / "operator", "operator")
    accept_key(folder, "operator", operator.key.public_key())
    accept_key(folder.parent / "operator", "coordinator", load_accepted(folder)["coordinator"])
    return folder


@pytest.fixture(scope="module")
def uri(tiny: Path, keys: Path) -> Iterator[str]:
    """Address of a coordinator that waits for its silos."""
    listening, over, found = threading.Event(), threading.Event(), list[str]()

    def note(address: str) -> None:
        found.append(address)
        listening.set()

    arguments = CoordinatorArguments(run_of(resolved(tiny)), "tcp://127.0.0.1:*", keys, keys.parent / "run")
    options = {"listening": note, "stop_wanted": over.is_set}
    thread = threading.Thread(target=run_coordinator, args=(arguments,), kwargs=options)
    thread.start()
    assert listening.wait(PATIENCE)
    yield found[0]
    over.set()
    thread.join()


def test_a_silo_and_an_operator_learn_the_status(uri: str, keys: Path) -> None:
    for folder, name in ((keys, "silo-00"), (keys.parent / "operator", "operator"), (keys, "silo-00")):
        status = status_of(ask_status(uri, load_identity(folder, name), load_accepted(folder)))
        assert (status.phase, status.round, status.rounds) == ("gathering", 0, 4)
        # Asking with a silo's key does not make the silo present.
        assert {each.phase for each in status.silos.values()} == {SiloPhase.ABSENT}
    shown = printed("status", "--connect", uri, "--keys", keys.parent / "operator")
    assert "gathering, round 0 of 4" in shown
    assert "silo-03" in shown
    status = printed("status", "--connect", uri, "--keys", keys, "--name", "silo-01", "--json")
    assert json.loads(status)["rounds"] == 4
    log = [record for _, record in read_log(keys.parent / "run" / "messages" / "coordinator.jsonl")]
    asked = [
        each.facts["peer"] for each in log if isinstance(each, NoteRecord) and each.event is LogEvent.STATUS_REQUESTED
    ]
    assert asked == ["silo-00", "operator", "silo-01"]
    assert not [each for each in log if isinstance(each, HandshakeRecord)]


def test_an_unknown_sender_learns_one_line(uri: str, keys: Path, tmp_path: Path) -> None:
    new_key(tmp_path / "keys", "silo-00")
    shutil.copytree(keys.parent / "operator" / "accepted", tmp_path / "keys" / "accepted")
    told = completed("status", "--connect", uri, "--keys", tmp_path / "keys")
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.count("\n") == 1
    assert "the coordinator there does not accept this key of silo-00" in told.stderr
    assert "fedmq keys accept" in told.stderr


@pytest.mark.slow
def test_an_absent_coordinator_is_reported(keys: Path) -> None:
    silo = load_identity(keys, "silo-00")
    with pytest.raises(RunError, match=r"no answer from tcp://127\.0\.0\.1:1: no coordinator listens there"):
        ask_status("tcp://127.0.0.1:1", silo, load_accepted(keys), 0.3)
    unknown = f"{'x' * 64}.invalid"
    with pytest.raises(RunError, match=f"no answer from tcp://{unknown}:1: the name {unknown} is unknown"):
        ask_status(f"tcp://{unknown}:1", silo, load_accepted(keys), 0.3)
    with pytest.raises(InputError, match="no key of the coordinator"):
        ask_status("tcp://127.0.0.1:1", silo, {})


@pytest.mark.parametrize("asks", [True, False])
def test_a_peer_that_names_no_run_can_only_query_the_status(keys: Path, asks: bool) -> None:
    silo, coordinator, accepted = (
        load_identity(keys, "silo-00"),
        load_identity(keys, "coordinator"),
        load_accepted(keys),
    )
    hello, initiated = initiate(silo, "coordinator", ANY_RUN, 0.0)
    welcome, responded = respond(coordinator, accepted, "run-1", hello, 0.0)
    third, session = complete(initiated, accepted, welcome, 0.0)
    assert session.run == "run-1"
    if asks:
        assert confirm(responded, third).peer == "silo-00"
        return
    joining = type(initiated)(silo, "coordinator", "run-1", initiated.ephemeral, hello)
    ready, _ = complete(joining, accepted, welcome, 0.0)
    with pytest.raises(RemoteWireError, match="a ready, expected: inquire"):
        confirm(responded, ready)


def test_the_status_of_many_silos_with_long_errors_fits(tmp_path: Path) -> None:
    class Peers:
        refused: dict[str, int] = {}  # noqa: RUF012
        refusal, refused_at = "", 0.0
        failures: dict[str, str] = {}  # noqa: RUF012

        def online(self, name: str) -> bool:
            return name != "silo-0000"

        def heard(self) -> dict[str, float]:
            return {}

        joining = heard

    log = MessageLog(tmp_path / "log.jsonl", "coordinator", WallClock())
    names = [f"silo-{number:04d}" for number in range(1024)]
    inquiries = Inquiries("run-1", names, 9, WallClock(), log)
    status = status_of(inquiries.answer("operator", Peers()).json)  # type: ignore[arg-type]
    assert status.silos["silo-0000"].phase is SiloPhase.ABSENT
    long = {name: each.model_copy(update={"error": "ä" * 300}) for name, each in status.silos.items()}
    longer = {f"{name}-{part}": each for name, each in long.items() for part in "ab"}
    inquiries.latest = lambda: status.model_copy(update={"silos": longer})
    sent = inquiries.answer("operator", Peers()).json  # type: ignore[arg-type]
    assert len(sent.encode()) <= MAX_STATUS
    assert status_of(sent).silos["silo-0000-a"].error == "ä" * 40
    log.close()
