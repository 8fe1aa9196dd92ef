"""Answers to senders without a session, at a limited rate: to handshakes, and to inquiries about the run."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from coordinator.admission import Admission, OwnDataAdmission
from coordinator.peers import Peers
from coordinator.rounds import Phase
from fedmq.clock import Clock
from fedmq.config.run_id import KeyDigests, keys_in, named
from fedmq.config.sections import Wire
from fedmq.errors import RemoteWireError
from fedmq.federation.agreement import FormatError
from fedmq.packages import versions
from fedmq.runs.data_records import StatedFormat
from fedmq.runs.status import ERROR_CHARACTERS, CoordinatorFacts, SiloPhase, SiloStatus, StatusFile
from fedmq.text import printable
from fedmq.wire.channel import BEAT_SECONDS
from fedmq.wire.handshake import Responded, confirm, reject, respond
from fedmq.wire.inquiry import OTHER_SCENARIO
from fedmq.wire.keys import AcceptedKeys, Identity
from fedmq.wire.limits import BoundedDict, PeerRateLimits, RateLimit
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import ANY_RUN, EVALUATOR, Header, Kind, Reason
from fedmq.wire.payloads import MAX_STATUS, Error, RunStatus
from fedmq.wire.sessions import Session, open_message
from fedmq.wire.transports.base import Listener

#: Maximum number of unfinished handshakes, and of digests of answered hellos, that are kept; the oldest are dropped.
MAX_PENDING = 4096
#: Maximum number of handshakes of a peer in a burst; one more is allowed per second. Copies of a hello, and refused
#: hellos of all senders, have limits of their own, so that their senders cannot use up what a peer may send.
HELLOS, COPIES, REJECTIONS = 30, 300, 100


@dataclass(frozen=True)
class PendingHandshake:
    """A handshake between welcome and ready.

    Args:
        hello: SHA-256 of the hello.
        welcome: its answer.
        responded: state of the handshake.
    """

    hello: bytes
    welcome: tuple[bytes, bytes]
    responded: Responded


class Handshakes:
    """Answers the hellos of a roster's peers, and completes their handshakes.

    Args:
        listener: the transport's listening end.
        identity: the coordinator's name and key.
        accepted: public keys of the peers that can open a session.
        run: name of the run.
        log: the coordinator's message log.
        clock: clock for the rate limits and time stamps.
        names: names of the run's silos and evaluator; holders of other accepted keys can only inquire. None admits all.
        options: what the coordinator hides of its messages.
    """

    def __init__(
        self,
        listener: Listener,
        identity: Identity,
        accepted: AcceptedKeys,
        run: str,
        log: MessageLog,
        clock: Clock,
        names: Collection[str] | None,
        options: Wire,
    ) -> None:
        self._listener, self._identity, self._accepted, self._run = listener, identity, accepted, run
        self._log, self._clock, self._names, self._options = log, clock, names, options
        self._pending = BoundedDict[bytes, PendingHandshake](MAX_PENDING)
        self._answered = BoundedDict[bytes, None](MAX_PENDING)
        # By peer, not by connection or session, as a peer could open new ones.
        self._hellos, self._copies = PeerRateLimits(HELLOS), PeerRateLimits(COPIES, 10.0)
        self._rejections = RateLimit(REJECTIONS, clock.stopwatch(), 10.0)

    def hello(self, address: bytes, header: Header, frames: Sequence[memoryview]) -> None:
        """Answer a hello.

        Args:
            address: where the frames came from.
            header: the decoded header.
            frames: the frames.

        Raises:
            RemoteWireError: it is not answered with a welcome.
        """
        digest = hashlib.sha256(b"".join(frames)).digest()
        pending = self._pending.get(address)
        if pending is not None and pending.hello == digest:
            self._listener.send(address, pending.welcome)
            return
        self._check_limits(header, copy=digest in self._answered)
        try:
            now = self._clock.now()
            welcome, responded = respond(
                self._identity, self._accepted, self._run, frames, now, options=self._options, header=header
            )
        except RemoteWireError as error:
            self._reject(address, frames, error)
            if error.reason == Reason.WRONG_RUN:  # checked before the key, so the name is a claim
                detail = f"claims to be {header.sender}, with another scenario: {error.detail}"
                raise RemoteWireError(Reason.WRONG_RUN, detail) from None
            raise
        # A hello is not encrypted, so a relay may send copies of it. Each is answered, or a copy that arrives first
        # would lock the sender out; it is logged once, since only its sender can complete the handshake.
        repeated = digest in self._answered
        (self._copies if repeated else self._hellos).take((responded.peer, responded.inquiry), self._clock.stopwatch())
        if not (responded.inquiry or self._names is None or responded.peer in self._names):
            stranger = RemoteWireError(Reason.UNEXPECTED, f"{responded.peer} is not a silo of this scenario")
            self._reject(address, frames, stranger)
            raise stranger
        self._answered[digest] = None
        self._pending[address] = PendingHandshake(digest, welcome, responded)
        # The sender of an inquiry may keep no log for an audit to compare with; the inquiry is noted instead.
        if not repeated and not responded.inquiry:
            self._log.handshake("received", Kind.HELLO, responded.peer, sum(frame.nbytes for frame in frames))
            self._log.handshake("sent", Kind.WELCOME, responded.peer, sum(map(len, welcome)))
        self._listener.send(address, welcome)

    def complete(self, address: bytes, header: Header, frames: Sequence[memoryview]) -> tuple[Responded, Session]:
        """The handshake that a ready or inquire message completes, and its session; arguments as in :meth:`hello`.

        Raises:
            RemoteWireError: there is no such handshake, or the message is not authentic.
        """
        pending = self._pending.get(address)
        if pending is None:
            raise RemoteWireError(Reason.UNEXPECTED, "a ready before a welcome")
        session = confirm(pending.responded, frames, header)
        del self._pending[address]
        return pending.responded, session

    def forget(self, address: bytes) -> None:
        """Drop the unfinished handshake on a connection, if there is one."""
        self._pending.pop(address, None)

    def forget_peer(self, name: str) -> None:
        """Drop the unfinished handshakes of a peer."""
        for address in [address for address, pending in self._pending.items() if pending.responded.peer == name]:
            del self._pending[address]

    def _check_limits(self, claim: Header, *, copy: bool) -> None:
        """Refuse a hello of a peer that has sent too many, before computing a signature or a key agreement.

        Only hellos that were signed with the peer's key count, so no other sender can use up its limit.
        """
        limits, who = self._copies if copy else self._hellos, (claim.sender, claim.run == ANY_RUN)
        if claim.sender in self._accepted and not limits.left(who, self._clock.stopwatch()):
            raise RemoteWireError(Reason.TOO_OFTEN, f"more than {HELLOS} handshakes at once, then one per second")

    def _reject(self, address: bytes, frames: Sequence[memoryview], error: RemoteWireError) -> None:
        """Answer a refused hello, unless too many were answered."""
        allowed, now = self._rejections.take(self._clock.stopwatch()), self._clock.now()
        if allowed and (rejection := reject(self._identity, self._accepted, frames, error, now)) is not None:
            self._listener.send(address, rejection)


#: Maximum length of each silo's error in a status that would otherwise be too large [characters].
_SHORT_ERROR = 40
#: Time without a message after which a silo that waits for the others is shown as lost [s].
SILENT_SECONDS = 5 * BEAT_SECONDS


class Inquiries:
    """Answers inquiries for the roster.

    Args:
        run: the run's id.
        silos: names of all silos.
        rounds: total number of rounds.
        clock: clock for the time stamp.
        log: the coordinator's message log, which notes each sender of an inquiry once.
        admission: knows what the silos stated about their data.
        scenario: the scenario as plain data, of which silos and the evaluator learn digests; None tells nothing.

    Attributes:
        latest: the last status of the rounds; None before the first.
    """

    def __init__(
        self,
        run: str,
        silos: Sequence[str],
        rounds: int,
        clock: Clock,
        log: MessageLog,
        admission: Admission | None = None,
        scenario: Mapping[str, object] | None = None,
    ) -> None:
        self._admission, self._scenario = admission, scenario
        self._run, self._silos, self._rounds, self._clock, self._log = run, tuple(silos), rounds, clock, log
        self._asked: set[str] = set()
        self.latest: Callable[[], StatusFile | None] = lambda: None

    def answer(self, name: str, peers: Peers) -> RunStatus:
        """The answer to an inquiry.

        Args:
            name: name of the key that the sender has proven to hold.
            peers: the run's peers, whose state is the status before the rounds begin.
        """
        if name not in self._asked:
            self._asked.add(name)
            self._log.note(LogEvent.STATUS_REQUESTED, peer=name)
        facts = self._facts(name)
        status = (self.latest() or self._before(peers)).model_copy(update={"coordinator": facts})
        text = status.model_dump_json()
        if len(text.encode()) > MAX_STATUS:
            short = {
                silo: each.model_copy(update={"error": each.error[:_SHORT_ERROR]})
                for silo, each in status.silos.items()
            }
            facts = facts.model_copy(update={"format": None})
            text = status.model_copy(update={"silos": short, "coordinator": facts}).model_dump_json()
        return RunStatus(text)

    def tells_scenario(self, name: str) -> bool:
        """Whether the sender of an inquiry, a silo of the run or the evaluator, learns digests of the scenario."""
        return self._scenario is not None and name in (*self._silos, EVALUATOR)

    def _facts(self, name: str) -> CoordinatorFacts:
        """Facts about this process; only silos and the evaluator learn the format of the run's data."""
        here, scenario = versions(), None
        if self._scenario is not None and self.tells_scenario(name):
            scenario = KeyDigests.of(self._scenario, secrets.token_bytes(16))
        if not isinstance(self._admission, OwnDataAdmission) or name not in (*self._silos, EVALUATOR):
            return CoordinatorFacts(versions=here, scenario=scenario)
        try:
            held = self._admission.likely
        except FormatError:  # the data stated so far do not fit together, or one modality is in none of them
            held = None
        agreed = None if held is None else StatedFormat.of(held)
        settled = self._admission.agreed is not None
        return CoordinatorFacts(versions=here, format=agreed, settled=settled, scenario=scenario)

    def _before(self, peers: Peers) -> StatusFile:
        heard = {**peers.heard(), **peers.joining()}
        silos = {name: self._before_rounds(name, peers, heard.get(name)) for name in self._silos}
        return StatusFile(
            run=self._run,
            written=self._clock.utc(),
            phase=Phase.GATHERING.value,
            round=0,
            rounds=self._rounds,
            loss=None,
            metrics={},
            up=0,
            down=0,
            now=self._clock.now(),
            elapsed=0.0,
            refused=dict(peers.refused),
            last_refused=printable(peers.refusal)[:ERROR_CHARACTERS],
            last_refused_at=self._clock.utc(peers.refused_at) if peers.refusal else None,
            silos=silos,
        )

    def _before_rounds(self, name: str, peers: Peers, heard: float | None) -> SiloStatus:
        """The status of a silo that was heard last at a stopwatch's time [s]; None if it has no session."""
        error = peers.failures.get(name, "")
        if heard is None:
            away = SiloPhase.LOST if error else SiloPhase.ABSENT
            return SiloStatus(phase=SiloPhase.WAITING if peers.online(name) else away, error=error)
        silent = self._clock.stopwatch() - heard > SILENT_SECONDS
        phase = SiloPhase.LOST if silent else SiloPhase.WAITING
        return SiloStatus(phase=phase, heard=self._clock.utc(heard), error=error)


#: Maximum number of inquiries that are remembered, the oldest are forgotten; and size of a report [bytes].
_MAX_SESSIONS, _MAX_BODY = 256, 4096


class ScenarioReports:
    """Reads the one message that may follow the answer to an inquiry.

    Args:
        log: the coordinator's message log, which notes each report once.
    """

    def __init__(self, log: MessageLog) -> None:
        self._log = log
        self._sessions = BoundedDict[bytes, Session](_MAX_SESSIONS)
        self._noted: set[tuple[str, str]] = set()

    def expect(self, address: bytes, session: Session) -> None:
        """An inquiry of a silo or the evaluator was answered, with the digests of the scenario."""
        self._sessions[address] = session

    def take(self, address: bytes, frames: Sequence[memoryview]) -> tuple[str, str] | None:
        """The sender of a report and its keys as text; None if no inquiry on this connection was answered.

        Raises:
            RemoteWireError: the message is not authentic, or no report.
        """
        session = self._sessions.pop(address, None)
        if session is None:
            return None
        message, _ = open_message(session, frames, max_body=_MAX_BODY)
        match message.header.kind, message.payloads:
            case Kind.ERROR, (Error(code=code, text=text),) if code == OTHER_SCENARIO:
                keys = keys_in(text)
            case _:
                raise RemoteWireError(Reason.UNEXPECTED, f"a {message.header.kind} after an inquiry")
        if keys is None:
            raise RemoteWireError(Reason.MALFORMED, f"{session.peer} does not list keys of a scenario")
        found = session.peer, named(keys)
        if found not in self._noted:
            self._noted.add(found)
            self._log.note(LogEvent.OTHER_SCENARIO, peer=session.peer, keys=named(keys))
        return found
