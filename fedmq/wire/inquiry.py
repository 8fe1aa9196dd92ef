"""Ask a coordinator for its run's status, and which keys of its scenario differ (docs/reference/wire.md, inquire).

Also what the operator reads while the coordinator does not answer, or refuses this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from fedmq.config.run_id import MOST_NAMED, KeyDigests, named
from fedmq.errors import FedmqError, InputError, RemoteWireError, RunError
from fedmq.packages import __version__
from fedmq.storage.json_files import Stored
from fedmq.wire.handshake import Accepted, HelloRefusedError, complete, initiate
from fedmq.wire.keys import Identity, words
from fedmq.wire.messages import ANY_RUN, COORDINATOR, WIRE_VERSION, Kind, Message, Reason
from fedmq.wire.payloads import Error, RunStatus
from fedmq.wire.sessions import open_message, seal_message
from fedmq.wire.transports.base import Connection, ConnectionRefusal
from fedmq.wire.transports.builtin import unknown_host
from fedmq.wire.transports.registry import connect
from fedmq.wire.transports.tickets import ConnectionKeys


class NoAnswerError(RunError):
    """Nothing answered in time."""


class UnknownHostError(NoAnswerError):
    """The name in the coordinator's address is unknown on this machine."""


#: Time to wait for the coordinator, which does not answer during a merge [s].
ANSWER_SECONDS = 10.0
#: Interval between two checks of the connection [s].
_STEP_SECONDS = 0.1


def ask_status(
    uri: str,
    identity: Identity,
    accepted: Accepted,
    patience: float = ANSWER_SECONDS,
    report: Callable[[str], Error | None] = lambda _: None,
) -> str:
    """Ask a coordinator for the ``status.json`` of its run.

    Args:
        uri: URI at which it listens.
        identity: the sender of the inquiry; the coordinator must have accepted this key under this name.
        accepted: accepted public keys, with that of the coordinator.
        patience: time to wait for the answer [s].
        report: given the answer, what to tell the coordinator in return, if anything.

    Raises:
        InputError: the coordinator does not accept the key, or the process that listens there does not have the
            coordinator's.
        NoAnswerError: nothing answers.
        RunError: the answer cannot be used.
    """
    until = time.monotonic() + patience
    connection = connect(uri, keys=ConnectionKeys.to_coordinator(identity, accepted))
    try:
        hello, initiated = initiate(identity, COORDINATOR, ANY_RUN, 0.0)
        connection.send(hello)
        inquire, session = complete(initiated, accepted, _answer(connection, uri, identity, until), 0.0)
        connection.send(inquire)
        message, _ = open_message(session, _answer(connection, uri, identity, until))
        match message.header.kind, message.payloads:
            case Kind.STATUS, (RunStatus(json=text),):
                pass
            case kind, _:
                raise RunError(f"the answer of {uri} cannot be used: a {kind}, expected a status")
        if (error := report(text)) is not None:
            answer = Message(message.header.answered(Kind.ERROR, 0.0), (error,))
            connection.send(seal_message(session, answer).frames)
        return text
    except HelloRefusedError as refusal:
        if refusal.reason == Reason.UNKNOWN_SENDER:
            raise _not_accepted(uri, identity) from None
        raise RunError(f"the coordinator at {uri} does not answer: {refusal.reason}: {refusal.detail}") from None
    except RemoteWireError as error:
        raise RunError(f"the answer of {uri} cannot be used: {error.reason}: {error.detail}") from None
    finally:
        connection.close()


def _answer(connection: Connection, uri: str, identity: Identity, until: float) -> list[memoryview]:
    """The frames of the coordinator's next message before ``until``, on the monotonic clock."""
    while time.monotonic() < until:
        frames = connection.receive(_STEP_SECONDS)
        if frames is not None:
            return frames
        match connection.refusal():
            case ConnectionRefusal.REFUSED:
                raise _not_accepted(uri, identity)
            case ConnectionRefusal.FOREIGN:
                allowed = "the coordinator whose key is in the folder accepted/ here"
                raise InputError(uri, "another process, or a coordinator with another key", allowed)
    if host := unknown_host(uri):
        raise UnknownHostError(f"no answer from {uri}: the name {host} is unknown on this machine")
    raise NoAnswerError(f"no answer from {uri}: no coordinator listens there, or it is busy")


def _not_accepted(uri: str, identity: Identity) -> InputError:
    found = f"the coordinator there does not accept this key of {identity.name} ({words(identity)})"
    return InputError(uri, found, "an accepted key: its operator accepts one with `fedmq keys accept`")


#: Code of the error with which a silo or the evaluator names the keys that differ.
OTHER_SCENARIO = "other_scenario"
#: Time to wait for the answer [s].
_PATIENCE_SECONDS = 5.0
#: Maximum number of inquiries about a run: a coordinator that does not tell would be asked again and again.
_MOST_ASKED = 3


class _Coordinator(Stored):
    scenario: KeyDigests | None = None


class _Answer(Stored):
    coordinator: _Coordinator | None = None


def differing_keys(answer: str, scenario: Mapping[str, object]) -> tuple[str, ...]:
    """Keys of which the coordinator has another value, by the JSON of its status; none if it does not tell."""
    try:
        facts = _Answer.model_validate_json(answer).coordinator
    except ValidationError:
        return ()
    return () if facts is None or facts.scenario is None else facts.scenario.differing(scenario)


class ScenarioComparison:
    """Finds the keys that differ from a coordinator's scenario and tells it, so that both operators know."""

    def __init__(
        self,
        uri: str,  # URI at which it listens
        identity: Identity,  # this process, a silo of its run or the evaluator
        accepted: Accepted,  # accepted public keys, with that of the coordinator
        scenario: Mapping[str, object],  # this side's scenario as plain data
        *,
        tells: bool = True,  # tell the coordinator
    ) -> None:
        self._uri, self._identity, self._accepted, self._scenario = uri, identity, accepted, scenario
        self._tells = tells
        self._found, self._times_asked = ("", ""), 0

    def keys(self, refusal: HelloRefusedError) -> str:
        """The keys in one line; empty if the refusal has another reason, or the coordinator does not tell.

        It waits some seconds for the coordinator's answer, for each run that the coordinator names: until there is an
        answer, but a few times at most.
        """
        if refusal.reason != Reason.WRONG_RUN:
            return ""
        run, keys = self._found
        if run != refusal.detail:
            keys, self._times_asked = "", 0
        if not keys and self._times_asked < _MOST_ASKED:
            self._times_asked += 1
            keys = named(self._asked())
        self._found = refusal.detail, keys
        return self._found[1]

    def _asked(self) -> tuple[str, ...]:
        found: tuple[str, ...] = ()

        def report(answer: str) -> Error | None:
            nonlocal found
            found = differing_keys(answer, self._scenario)
            return Error(OTHER_SCENARIO, "\n".join(found[:MOST_NAMED])) if found and self._tells else None

        try:
            ask_status(self._uri, self._identity, self._accepted, _PATIENCE_SECONDS, report)
        except FedmqError:
            return ()
        return found


#: What to do about another scenario.
SAME_SCENARIO = "both sides need the same file and the same --set and --seed"


def no_answer(uri: str, seconds: float) -> str:
    """The line about a coordinator that has not answered for a time [s]."""
    why = "no coordinator listens there yet, a firewall is in between, or it is busy; it keeps trying"
    if host := unknown_host(uri):
        why = f"the name {host} is unknown on this machine"
    return f"no answer from {uri} for {seconds:.0f} s: {why}"


def foreign_listener(uri: str, accepted: Accepted) -> str:
    """The line about a process that has another key than the accepted one of the coordinator."""
    key = accepted.get(COORDINATOR)
    return (
        f"what listens at {uri} does not have the coordinator's key in the folder accepted/ here "
        f"({'which has none' if key is None else words(key)}): it is another process, or the coordinator has a new "
        "key; accept that with `fedmq keys accept`, and this process connects"
    )


def refused_handshake(uri: str, identity: Identity, refusal: HelloRefusedError, differing: str) -> str:
    """The line about a coordinator that refuses the handshake; ``differing`` are keys with other values there."""
    match refusal.reason:
        case Reason.UNKNOWN_SENDER:
            ask = f"its operator accepts it with `fedmq keys accept` ({words(identity)})"
            ask += ", or this process was started with the wrong key file (--keys), or a clock is wrong by a day"
            return f"the coordinator at {uri} does not accept this key of {identity.name}: {ask}"
        case Reason.WRONG_RUN:
            which = f"{refusal.detail}{f', with other values of {differing}' if differing else ''}"
            return f"the coordinator at {uri} has another scenario: {which}; {SAME_SCENARIO}"
        case Reason.WIRE_VERSION:
            here = f"fedmq {__version__} here has wire version {WIRE_VERSION}"
            said = f"the coordinator at {uri} has another version of fedmq and says: {refusal.detail}"
            return f"{said}; {here}; install the same release at both ends"
        case _:
            return f"the coordinator at {uri} refuses the handshake: {refusal.reason}: {refusal.detail}"
