"""A whole run in one process: coordinator, evaluator and silos as threads over memory://, with real sealed messages."""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import protocols
from coordinator.program import CoordinatorArguments, CoordinatorResult, run_coordinator
from fedmq.config.resolve import ResolvedRun, Source, read, resolve
from fedmq.config.scenario import Scenario
from fedmq.data.item_digests import item_digests
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.federation.population import build_population, run_name
from fedmq.wire import channel
from fedmq.wire.handshake import complete, initiate
from fedmq.wire.keys import init_keys, load_accepted, load_identity
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Payload
from fedmq.wire.sessions import Session, seal_message
from fedmq.wire.transports.base import Connection
from fedmq.wire.transports.registry import connect
from silos.program import run_silo
from silos.tasks import Silo, SiloArguments
from tests.log_causes import check_causes
from tests.waiting import PATIENCE, wait_for

_NUMBERS = itertools.count()
_LIVES = 3


def resolved(path: Path, *settings: str) -> Scenario:
    return resolve(read(path, settings), protocols, weights=False).scenario


def run_of(scenario: Scenario) -> ResolvedRun:
    """The run of a scenario."""
    return resolve(Source(Path(f"{scenario.name}.yaml"), scenario), protocols)


def watched(over: threading.Event, function: Callable[..., Any], *arguments: object) -> Callable[[], None]:
    """A function that is restarted when it dies, as the supervisor of real processes does, and reports the cause."""

    def call() -> None:
        for _ in range(_LIVES):
            try:
                function(*arguments)
                break
            except Exception:
                traceback.print_exc(file=sys.stderr)
            if over.is_set():
                break

    return call


class Unanswered:
    """A log that ends a peer that connected after the run had ended and received no stop.

    A real process is ended by a signal.
    """

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def debug(self, event: str, **values: object) -> None: ...
    def info(self, event: str, **values: object) -> None: ...
    def error(self, event: str, **values: object) -> None: ...

    def warning(self, event: str, **values: object) -> None:
        if self._over.is_set() and "no answer" in event:
            raise RuntimeError(event)
        if "error" in values:  # a silo's own log has the full text
            print(f"{event}: {values['error']}", file=sys.stderr)


def hold(monkeypatch: pytest.MonkeyPatch, until: Callable[[], object]) -> None:
    """Have silos answer no task until a condition holds: the run does not end before."""
    respond = Silo.respond

    def held(silo: Silo, message: Message) -> tuple[Payload, ...]:
        wait_for(until)
        return respond(silo, message)

    monkeypatch.setattr(Silo, "respond", held)


def state_data(connection: Connection, session: Session, scenario: Scenario, name: str) -> None:
    """Send a manual silo's statement about its data, after which the coordinator lets it join."""
    run = run_name(scenario)
    population = build_population(scenario)
    items = item_digests(population.prepared, scenario.dataset)
    stated = population.statement(population.facts(name), items, run)
    header = Header(run=run, kind=Kind.STATEMENT, sender=name, receiver="coordinator", sequence=0, sent_at=0.0)
    connection.send(seal_message(session, Message(header, (stated,))).frames)


def joined(scenario: Scenario, uri: str, keys: Path) -> tuple[Connection, Session, Header]:
    """A manual silo-00: its connection, its session and the header of its heartbeats."""
    connection, name = connect(uri), run_name(scenario)
    hello, initiated = initiate(load_identity(keys, "silo-00"), "coordinator", name, 0.0)
    connection.send(hello)
    frames = connection.receive(PATIENCE)
    assert frames is not None
    ready, session = complete(initiated, load_accepted(keys), frames, 0.0)
    connection.send(ready)
    state_data(connection, session, scenario, "silo-00")
    beat = Header(run=name, kind=Kind.HEARTBEAT, sender="silo-00", receiver="coordinator", sequence=0, sent_at=0.0)
    return connection, session, beat


def run(
    scenario: Scenario,
    out: Path,
    *,
    resume: bool = False,
    stop_wanted: Callable[[], bool] = lambda: False,
    silos: Iterable[str] | None = None,
    others: Iterable[Callable[[str, Path], None]] = (),
    scheme: str = "memory",
    uri: str | None = None,
    connect_to: str | None = None,
    stop_silos: bool = True,
) -> CoordinatorResult:
    """Run a scenario to its end; ``others`` are started as threads with the URI and the keys' folder.

    ``uri`` is where the coordinator listens, ``connect_to`` where silos connect if that is a relay's address.
    """
    uri = uri or f"{scheme}://run-{next(_NUMBERS)}"
    keys = out / "keys"
    if not keys.exists():
        init_keys(keys, ("coordinator", "evaluator", *scenario.silo_names))
    over = threading.Event()
    named = silos or scenario.silo_names

    unanswered = Unanswered(over)

    made = run_of(scenario)
    targets = [
        watched(over, run_silo, SiloArguments(made, name, connect_to or uri, keys, out), unanswered) for name in named
    ]
    targets.append(watched(over, run_evaluator, EvaluatorArguments(made, uri, keys, out), unanswered))
    targets += [lambda other=other: other(uri, keys) for other in others]  # type: ignore[misc]
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    try:
        outcome = run_coordinator(
            CoordinatorArguments(made, uri, keys, out, resume, stop_silos=stop_silos, report=True),
            listening=lambda _: [thread.start() for thread in threads] and None,
            stop_wanted=stop_wanted,
        )
        check_causes(out)
        return outcome
    finally:
        over.set()
        # The silos of a failed coordinator look for it until they report that there is no answer: here at once.
        with mock.patch.object(channel, "_QUIET_SECONDS", 0.0):
            for thread in threads:
                if thread.is_alive():
                    thread.join(PATIENCE)
        # A remaining silo would continue to write its log next to that of its successor.
        assert not [target for target, thread in zip(targets, threads, strict=True) if thread.is_alive()]
