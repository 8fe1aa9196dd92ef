"""A silo with another scenario than the coordinator's learns which keys differ, and so does the coordinator."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.program import CoordinatorArguments, run_coordinator
from fedmq.clock import WallClock
from fedmq.config.run_id import MOST_NAMED, KeyDigests, keys_in, named
from fedmq.config.scenario import Scenario
from fedmq.runs.status import read_status, status_of
from fedmq.wire.channel import Channel, OtherRunError
from fedmq.wire.inquiry import OTHER_SCENARIO, ScenarioComparison, ask_status, differing_keys
from fedmq.wire.keys import accept_key, init_keys, load_accepted, load_identity, new_key
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord, RefusedRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.payloads import Error
from tests.threaded_run import resolved, run_of
from tests.waiting import PATIENCE, wait_for

SILO = "silo-01"
OTHER = ("training.learning_rate=0.5", "training.local_epochs=7", "missing_modality.silos={silo-01: text}")
KEYS = "missing_modality.silos, training.learning_rate, training.local_epochs"


def uri_of(keys: Path) -> str:
    """The coordinator's address: the folder of the keys has a name of its own."""
    return f"memory://{keys.parent.name}"


def plain(scenario: Scenario) -> dict[str, object]:
    return scenario.model_dump(mode="json")


@pytest.fixture(scope="module")
def keys(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other-scenario") / "keys"
    init_keys(folder, ("coordinator", "evaluator", *resolved(tiny).silo_names))
    operator = new_key(folder.parent / "operator", "operator")
    accept_key(folder, "operator", operator.key.public_key())
    return folder


@contextlib.contextmanager
def waiting_coordinator(tiny: Path, keys: Path, uri: str, out: Path) -> Iterator[Path]:
    """Folder of a coordinator that waits for its silos."""
    listening, over = threading.Event(), threading.Event()
    arguments = CoordinatorArguments(run_of(resolved(tiny)), uri, keys, out)
    options = {"listening": lambda _: listening.set(), "stop_wanted": over.is_set}
    thread = threading.Thread(target=run_coordinator, args=(arguments,), kwargs=options)
    thread.start()
    try:
        assert listening.wait(PATIENCE)
        yield out
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def run(tiny: Path, keys: Path) -> Iterator[Path]:
    with waiting_coordinator(tiny, keys, uri_of(keys), keys.parent / "run") as out:
        yield out


def notes(path: Path, kind: LogEvent) -> list[dict[str, object]]:
    records = [record for _, record in read_log(path)]
    return [dict(each.facts) for each in records if isinstance(each, NoteRecord) and each.event is kind]


def refused(scenario: Scenario, keys: Path, folder: Path, name: str = SILO, **options: object) -> list[str]:
    """What a silo with another scenario prints until it is refused; its log is ``folder/silo.jsonl``."""
    reports = list[str]()
    log = MessageLog(folder / "silo.jsonl", name, WallClock())
    identity, accepted = load_identity(keys, name), load_accepted(keys)
    link = Channel(
        uri_of(keys),
        identity,
        accepted,
        run_of(scenario).id,
        log,
        WallClock(),
        lambda: 0.0,
        reports.append,
        comparison=ScenarioComparison(
            uri_of(keys), identity, accepted, plain(scenario), tells="forbidden" not in options
        ),
        **options,  # type: ignore[arg-type]
    )
    link.start()
    wait_for(lambda: reports)
    link.close()
    return reports


def test_both_operators_learn_the_keys_but_no_values(tiny: Path, run: Path, keys: Path, tmp_path: Path) -> None:
    line = refused(resolved(tiny, *OTHER), keys, tmp_path)[0]
    assert line.startswith(f"{SILO}: the coordinator at {uri_of(keys)} has another scenario: ")
    assert f", with other values of {KEYS}; both sides need the same file" in line
    assert {note["keys"] for note in notes(tmp_path / "silo.jsonl", LogEvent.HELLO_REFUSED)} == {KEYS}
    log = run / "messages" / "coordinator.jsonl"
    wait_for(lambda: notes(log, LogEvent.OTHER_SCENARIO))
    assert notes(log, LogEvent.OTHER_SCENARIO) == [{"peer": SILO, "keys": KEYS}]
    # A status is computed once a second.
    wait_for(lambda: read_status(run / "status.json").silos[SILO].error)
    asked = ask_status(uri_of(keys), load_identity(keys, SILO), load_accepted(keys))
    status = status_of(asked)
    assert status.silos[SILO].error == f"another scenario: {KEYS}"
    assert status.last_refused == f"{SILO}: another scenario: {KEYS}"
    assert differing_keys(asked, plain(resolved(tiny))) == ()
    # A second silo of the same machine says the same again; it is noted for each silo once.
    refused(resolved(tiny, *OTHER), keys, tmp_path / "second")
    assert len(notes(log, LogEvent.OTHER_SCENARIO)) == 1


@pytest.mark.usefixtures("run")
def test_an_accepted_key_of_no_silo_learns_nothing_of_the_scenario(tiny: Path, keys: Path) -> None:
    operator = load_identity(keys.parent / "operator", "operator")
    asked = ask_status(uri_of(keys), operator, load_accepted(keys))
    facts = json.loads(asked)["coordinator"]
    assert facts["scenario"] is None and facts["offer"] is None
    assert differing_keys(asked, plain(resolved(tiny, "seed=9"))) == ()


@pytest.mark.usefixtures("run")
def test_a_standing_silo_leaves_a_run_when_the_coordinator_has_begun_another(
    tiny: Path, keys: Path, tmp_path: Path
) -> None:
    identity, accepted = load_identity(keys, SILO), load_accepted(keys)
    log = MessageLog(tmp_path / "silo.jsonl", SILO, WallClock())
    other = run_of(resolved(tiny, *OTHER)).id
    link = Channel(uri_of(keys), identity, accepted, other, log, WallClock(), lambda: 0.0, ends_with_other_run=True)
    link.start()
    with pytest.raises(OtherRunError, match="has begun another run: "):
        link.receive(PATIENCE)
    link.close()
    offer = status_of(ask_status(uri_of(keys), identity, accepted)).coordinator
    assert offer is not None and offer.offer is not None and "seed: " in offer.offer.scenario


def test_a_silo_with_a_policy_compares_keys_but_reports_none(tiny: Path, run: Path, keys: Path, tmp_path: Path) -> None:
    line = refused(resolved(tiny, "seed=5"), keys, tmp_path, "silo-02", forbidden=lambda *_: None)[0]
    assert "with other values of seed;" in line
    log = run / "messages" / "coordinator.jsonl"
    assert "silo-02" not in {note["peer"] for note in notes(log, LogEvent.OTHER_SCENARIO)}


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (Error(OTHER_SCENARIO, "seed\nsalary: 3000 EUR"), "malformed"),
        (Error(OTHER_SCENARIO, "\n".join(f"training.k{n}" for n in range(MOST_NAMED + 1))), "malformed"),
        (Error("training_failed", "seed"), "unexpected"),
    ],
)
def test_a_report_other_than_a_list_of_keys_is_refused(report: Error, reason: str, run: Path, keys: Path) -> None:
    log = run / "messages" / "coordinator.jsonl"
    before = len(notes(log, LogEvent.OTHER_SCENARIO))
    ask_status(uri_of(keys), load_identity(keys, "silo-03"), load_accepted(keys), report=lambda _: report)

    def reasons() -> list[str]:
        return [record.reason for _, record in read_log(log) if isinstance(record, RefusedRecord)]

    wait_for(lambda: reasons()[-1:] == [reason])
    assert len(notes(log, LogEvent.OTHER_SCENARIO)) == before


def test_digests_differ_with_the_salt_and_leave_out_what_may_differ_between_machines(tiny: Path) -> None:
    here = resolved(tiny)
    first, second = (KeyDigests.of(plain(here), bytes([salt] * 16)) for salt in (1, 2))
    assert first.keys.keys() == second.keys.keys()
    assert not set(first.keys.values()) & set(second.keys.values())
    assert not {"device", "data.path", "silos.slots"} & first.keys.keys()
    assert first.differing(plain(here.model_copy(update={"device": "cuda:7"}))) == ()
    other = replace(run_of(here)).scenario.model_copy(update={"name": "other", "seed": 4})
    assert first.differing(plain(other)) == ("name", "seed")
    assert first.differing({**plain(here), "new": {"key": 1}}) == ("new.key",)


def test_long_lists_of_keys_are_cut_and_only_keys_are_read() -> None:
    keys = tuple(f"section.key-{number}" for number in range(MOST_NAMED + 2))
    assert named(keys).endswith(f"section.key-{MOST_NAMED - 1} and 2 more")
    assert keys_in("seed\ntraining.learning_rate") == ("seed", "training.learning_rate")
    assert keys_in("") is keys_in("a b") is keys_in("a.b.c") is keys_in("x" * 49) is None
