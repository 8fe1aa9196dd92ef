"""Frames of accepted peers and of strangers for a real roster: handshakes, sessions, new keys and rate limits.

Two silos with accepted keys, and a stranger, send valid, damaged, repeated and lost messages over up to six connections
of ``memory://`` to a coordinator's end without or with hidden headers, padding, and admission by stated data. The clock
is advanced explicitly. After each frame, what the roster holds and has answered is compared with the rate limits, from
counts of this module.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import handshakes
from coordinator import sessions as rosters
from coordinator.data_admission import Admission, OwnDataAdmission, SimulatedAdmission
from coordinator.peers import Ready, Unusable
from coordinator.sessions import Roster
from coordinator.status import Inquiries
from fedmq.clock import WallClock
from fedmq.config.sections import Wire
from fedmq.data.splits import SPLITS
from fedmq.errors import RemoteWireError
from fedmq.wire import codec
from fedmq.wire.codec import BytesLike
from fedmq.wire.handshake import SIGNATURE_BYTES, Initiated, complete, initiate
from fedmq.wire.key_agreement import MOST_REKEYS_ANSWERED, Ephemeral, Rekeying, begin_rekey, finish_rekey
from fedmq.wire.keys import Identity, init_keys, load_accepted, load_identity
from fedmq.wire.limits import PER_MINUTE, UNKNOWN
from fedmq.wire.log_records import HandshakeRecord, RefusedRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import ANY_RUN, COORDINATOR, Header, Kind, Message, Reason
from fedmq.wire.payloads import DataStatement
from fedmq.wire.sessions import Session
from fedmq.wire.transports.base import Connection
from fedmq.wire.transports.registry import connect, listen
from tests.damaged_frames import damaged_body, damaged_bytes, damaged_msgpack, golden_messages
from tests.waiting import memory_uri

RUN = "golden-1"
#: Frames of an exchange.
EXCHANGE = 500
_SILOS = ("silo-00", "silo-01")
_MAX_BODY = 1 << 20
#: What a silo has to state about its data.
_STATED = DataStatement("a" * 64, 3, np.ones((len(SPLITS), 3), np.int64))
_OPTIONS = (Wire(), Wire(hide_names=True), Wire(padding=True))

#: Shares of the senders' actions, in the order of ``_kinds``: mostly on open sessions, or with many handshakes.
_STEADY = (0.004, 0.004, 0.004, 0.97, 0.014, 0.004)
_CHANGING = (0.05, 0.05, 0.05, 0.73, 0.07, 0.05)

Frames = Sequence[BytesLike]


class HandClock(WallClock):
    """A clock that tests advance explicitly.

    Attributes:
        at: the stopwatch's time [s].
    """

    at = 100.0

    def stopwatch(self) -> float:
        """See the interface."""
        return self.at


@dataclass(eq=False)
class _Line:
    """A connection, and what its silo knows: a handshake under way, a session, and a request for new keys."""

    connection: Connection
    initiated: Initiated | None = None
    welcome: list[memoryview] | None = None
    session: Session | None = None
    rekeying: Rekeying | None = None


class RosterSenders:
    """The senders, the coordinator's end, and the checks; use it as a context manager."""

    def __init__(self, draw: random.Random) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fedmq-fuzz-roster-")
        root = Path(self._folder.name)
        init_keys(root / "keys", (COORDINATOR, *_SILOS))
        self._accepted = load_accepted(root / "keys")
        self._identities = {name: load_identity(root / "keys", name) for name in (COORDINATOR, *_SILOS)}
        self._strangers = [Identity(name, Ed25519PrivateKey.generate()) for name in ("silo-00", "stranger")]
        self._messages, self._ephemeral = golden_messages(), Ephemeral.generate()
        self._listener = listen(memory_uri())
        self._kinds: dict[str, Callable[[random.Random, _Line], Frames]] = {
            "hello": self._hello,
            "copy": self._copy,
            "ready": self._ready,
            "message": self._message,
            "rekey": self._rekey,
            "raw": self._raw,
        }
        self._open(draw)

    def __enter__(self) -> RosterSenders:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()
        for line in self._lines:
            line.connection.close()
        self._listener.close()
        self._folder.cleanup()

    # ------------------------------------------------------------------------------------------------ coordinator's end
    def _open(self, draw: random.Random) -> None:
        self.clock = HandClock()
        log = self._log = MessageLog(Path(self._folder.name) / "log.jsonl", COORDINATOR, self.clock)
        self._options = _OPTIONS[draw.randrange(len(_OPTIONS))]
        admission: Admission | None = (
            None,
            SimulatedAdmission(dict.fromkeys(_SILOS, _STATED), RUN),
            OwnDataAdmission(_SILOS, RUN, evaluator=False, minimum=1),
        )[draw.randrange(3)]
        self.roster = Roster(
            self._listener, self._identities[COORDINATOR], self._accepted, RUN, log, self.clock, _MAX_BODY,
            admission=admission, options=self._options,
        )  # fmt: skip
        self.roster.inquiries = Inquiries(RUN, _SILOS, 10, self.clock, log, admission)
        self._steady = draw.random() < 0.5
        self._lines = [_Line(connect(self._listener.uri)) for _ in range(2 if self._steady else 6)]
        self._hellos: list[tuple[tuple[bytes, bytes], Initiated]] = []
        self._pace = draw.choice([0.0001, 0.003, 0.02])
        self._lost = draw.choice([0.0, 0.2, 1.0])
        self._began, self._granted = self.clock.at, Counter[str]()
        self._accepted_messages, self._answers, self._readies = Counter[str](), Counter[str](), 0

    def read(self, draw: random.Random) -> tuple[str, Callable[[], object]]:
        """The name of a sender's action, and a function that has the roster take its frames."""
        self._let_time_pass(draw)
        name = draw.choices(list(self._kinds), _STEADY if self._steady else _CHANGING)[0]
        line = self._lines[draw.randrange(len(self._lines))]
        frames = self._kinds[name](draw, line)
        return name, lambda: self._pass(line, frames)

    def _let_time_pass(self, draw: random.Random) -> None:
        """Move the clock; now and then, silos get tasks, keys are read again, and a connection is made again."""
        self.clock.at += draw.expovariate(1 / self._pace) + (5.0 if draw.random() < 0.001 else 0.0)
        if draw.random() < 0.05:
            name = _SILOS[draw.randrange(2)]
            header = self.roster.header(name, Kind.EVALUATE)
            self._granted[name] += self.roster.send(name, Message(header)) > 0
        if draw.random() < 0.01:
            self.roster.watch_keys()
            self.roster.note_unlogged()
        if draw.random() < 0.01 and not self._steady:
            at = draw.randrange(len(self._lines))
            self._lines[at].connection.close()
            self._lines[at] = _Line(connect(self._listener.uri))

    def _pass(self, line: _Line, frames: Frames) -> None:
        """Send frames, have the roster take them, and process its answers."""
        before = self.roster.refused.copy()
        line.connection.send(frames)
        got = self._listener.receive(5.0)
        assert got is not None, "the frames did not arrive"
        taken = self.roster.take(*got)
        if isinstance(taken, Message):
            self._accepted_messages[taken.header.sender] += 1
        elif taken is not None and not isinstance(taken, Ready | Unusable):
            raise AssertionError(f"the roster returned {taken!r}"[:200])
        for each in self._lines:
            while (answer := each.connection.receive(0)) is not None:
                self._answered(each, answer)
        self._check_bounds()
        if refused := self.roster.refused - before:
            if set(refused) & {Reason.UNKNOWN_SESSION, Reason.TOO_OFTEN}:
                line.session = None  # its silo starts again with a hello, a while later
                self.clock.at += 0.2
            raise RemoteWireError(next(iter(refused)), self.roster.refusal)

    def _answered(self, line: _Line, frames: list[memoryview]) -> None:
        """What a silo does with an answer."""
        header = codec.decode_clear(frames[0])
        kind = header.kind if isinstance(header, Header) else None
        if kind is Kind.WELCOME:
            line.welcome = frames
            self._answers["welcome"] += 1
        elif kind is Kind.REJECT:
            self._answers["reject"] += 1
        elif line.session is not None:
            try:
                opened = line.session.open(frames)
                if opened.header.kind is Kind.REKEYED and line.rekeying is not None:
                    self._answers["rekeyed"] += 1
                    finish_rekey(line.rekeying, self._accepted[COORDINATOR], line.session, opened)
                    line.rekeying = None
            except RemoteWireError:
                return  # of an earlier session on this connection

    # ---------------------------------------------------------------------------------------------------------- checks
    def _check_bounds(self) -> None:
        """Compare what was answered, kept and logged with the rate limits."""
        seconds, peers = self.clock.at - self._began, len(_SILOS)
        for name, count in self._accepted_messages.items():
            most = rosters.MESSAGES + seconds + self._granted[name] + 1
            assert count <= most, f"{count} messages of {name}, allowed {most:.0f}"
        welcomes = 2 * peers * (handshakes.HELLOS + handshakes.COPIES + 11 * seconds + 2)
        rekeyed = peers * (MOST_REKEYS_ANSWERED + seconds + 1)
        bounds = {"welcome": welcomes, "reject": handshakes.REJECTIONS + 10 * seconds + 1, "rekeyed": rekeyed}
        for what, bound in bounds.items():
            assert self._answers[what] <= bound, f"{self._answers[what]} x {what}, allowed {bound:.0f}"
        answering = self.roster._handshakes
        for what, held in (("hellos", answering._answered), ("handshakes", answering._pending)):
            assert len(held) <= handshakes.MAX_PENDING, f"{len(held)} {what} are kept"
        for each in (answering._hellos, answering._copies, self.roster._rekeys, self.roster._messages):
            most = 2 * len(self._accepted)  # handshakes and inquiries
            assert len(each) <= most, f"{len(each)} rate limits for {most // 2} keys"

    def check_log(self) -> None:
        """Compare the number of log records with the rate limits.

        Raises:
            AssertionError: there are more.
        """
        seconds = self.clock.at - self._began
        refused, opened = Counter[str](), Counter[str]()
        for _, record in read_log(self._log.path):
            if isinstance(record, RefusedRecord):
                refused[record.peer] += 1
            elif isinstance(record, HandshakeRecord) and record.kind == Kind.READY:
                opened[record.peer] += 1
        allowed = {UNKNOWN: PER_MINUTE * (seconds // 60 + 1)}
        for name in _SILOS:
            # One message beyond the limit ends a session.
            messages = rosters.MESSAGES + MOST_REKEYS_ANSWERED + 2 * seconds + self._granted[name]
            allowed[name] = messages + opened[name] + 2
        for name, most in allowed.items():
            assert refused[name] <= most, f"{refused[name]} log records of refusals of {name}, allowed {most:.0f}"

    # --------------------------------------------------------------------------------------------------------- senders
    def _hello(self, draw: random.Random, line: _Line) -> Frames:
        """A hello or an inquiry, of a silo or a stranger; half of them damaged, half of these signed again."""
        known = draw.random() < (0.98 if self._steady else 0.8)
        identity = (
            self._identities[_SILOS[self._lines.index(line) if self._steady else draw.randrange(2)]]
            if known
            else self._strangers[draw.randrange(2)]
        )
        run = draw.choices([RUN, ANY_RUN, "other-1"], [0.8, 0.15, 0.05])[0]
        # One key agreement for all hellos saves most of the time; the nonce makes them different.
        ephemeral = replace(self._ephemeral, nonce=draw.randbytes(len(self._ephemeral.nonce)))
        hello, line.initiated = initiate(identity, COORDINATOR, run, 0.0, ephemeral, options=self._options)
        line.welcome = None
        if draw.random() < (0.95 if self._steady else 0.5):
            if known and run == RUN:
                self._hellos = [*self._hellos[-50:], (hello, line.initiated)]
            return hello
        clear, body = hello
        if draw.random() < 0.5:
            return damaged_msgpack(clear, draw), body
        return clear, body[:SIGNATURE_BYTES] + damaged_msgpack(body[SIGNATURE_BYTES:], draw)

    def _copy(self, draw: random.Random, line: _Line) -> Frames:
        """A copy of an earlier hello, on any connection."""
        if not self._hellos:
            return self._hello(draw, line)
        hello, line.initiated = self._hellos[draw.randrange(len(self._hellos))]
        return hello

    def _ready(self, draw: random.Random, line: _Line) -> Frames:
        """The ready or inquire after a welcome, one in three damaged; a hello without a welcome."""
        if line.initiated is None or line.welcome is None:
            return self._hello(draw, line)
        try:
            ready, session = complete(line.initiated, self._accepted, line.welcome, 0.0)
        except RemoteWireError:
            return self._hello(draw, line)
        frames = [bytes(frame) for frame in ready]
        if draw.random() < 0.33:
            at = draw.randrange(2)
            frames[at] = (damaged_bytes if at else damaged_msgpack)(frames[at], draw)
        else:
            line.session, line.rekeying, line.welcome = session, None, None
        return frames

    def _message(self, draw: random.Random, line: _Line) -> Frames:
        """A sealed message of any kind and body: damaged before or after sealing, repeated, or after a lost one."""
        session = line.session
        if session is None or draw.random() < 0.02:
            return self._ready(draw, line)
        clear, body = self._messages[draw.randrange(len(self._messages))]
        golden = codec.decode_header(clear)
        header = replace(golden, run=session.run, sender=session.name, receiver=session.peer)
        if draw.random() < 0.2:
            header, body = replace(header, kind=Kind.HEARTBEAT, reply_to=None), b""
        body = damaged_body(body, draw) if body and draw.random() < 0.3 else body
        if draw.random() < self._lost:
            session.seal(header, [body])  # lost
        frames = [bytes(frame) for frame in session.seal(header, [body]).frames]
        if draw.random() < 0.2:
            at = draw.randrange(2)
            frames[at] = (damaged_bytes if at else damaged_msgpack)(frames[at], draw)
        elif draw.random() < 0.05:
            line.connection.send(frames)
            got = self._listener.receive(5.0)
            assert got is not None
            taken = self.roster.take(*got)
            self._accepted_messages[session.name] += isinstance(taken, Message)
        return frames

    def _rekey(self, draw: random.Random, line: _Line) -> Frames:
        """A request for new keys, one in three damaged; the next one may come before the answer."""
        if line.session is None:
            return self._ready(draw, line)
        session = line.session
        header = Header(
            run=session.run, kind=Kind.REKEY, sender=session.name, receiver=session.peer, sequence=0, sent_at=0.0
        )
        if draw.random() < 0.33:
            return session.seal(header, [draw.randbytes(draw.randrange(200))]).frames
        sealed, line.rekeying = begin_rekey(self._identities[session.name], session, header, self._ephemeral)
        return sealed.frames

    def _raw(self, draw: random.Random, line: _Line) -> Frames:
        """A golden message without a seal."""
        del line
        clear, body = self._messages[draw.randrange(len(self._messages))]
        return damaged_msgpack(clear, draw), damaged_bytes(body, draw)


def exchanged(draw: random.Random, frames: int = EXCHANGE) -> Counter[str]:
    """Have a roster take a number of frames; returns how often each action of the senders had each outcome.

    Raises:
        AssertionError: a rate limit was exceeded.
    """
    outcomes = Counter[str]()
    with RosterSenders(draw) as senders:
        for _ in range(frames):
            name, take = senders.read(draw)
            try:
                take()
            except RemoteWireError as error:
                outcomes[f"{name} {error.reason}"] += 1
            else:
                outcomes[f"{name} accepted"] += 1
        senders.check_log()
    return outcomes
