"""Messages and their headers; payloads are in :mod:`fedmq.wire.payloads`. See docs/reference/wire.md.

A ``Message`` has a ``Header`` and a tuple of payloads; a task also has a ``TaskInfo``, a layout message a ``Layout``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fedmq.wire.fields import I63, U64, FieldError, Real, Whole, check_name, shown
from fedmq.wire.layout import Layout
from fedmq.wire.payloads import (
    PAYLOADS,
    DataFormat,
    DataStatement,
    Error,
    Metrics,
    Payload,
    Refusal,
    RunStatus,
    SealedShares,
    SiloMetrics,
    SiloModalities,
    SumKeys,
    SumWeights,
    Survivors,
)

#: Version of the wire format; each header states it, and another version is refused by name.
WIRE_VERSION = 1
SESSION_BYTES = 16
#: Size of the head of a message log, a SHA-256.
HEAD_BYTES = 32
MAX_PAYLOADS = 64
#: Names of the two processes that are not silos; every other name is a silo's.
COORDINATOR, EVALUATOR = "coordinator", "evaluator"
_U64, _I63, _VERSION, _TIME = Whole(0, U64), Whole(0, I63), Whole(1, 0xFFFF), Real(0.0)
#: In a hello that asks for the run's status, in place of the run's name, which the asker need not know.
ANY_RUN = "any"


class Kind(StrEnum):
    """Kinds of message."""

    HELLO = "hello"
    WELCOME = "welcome"
    READY = "ready"
    REJECT = "reject"
    REKEY = "rekey"
    REKEYED = "rekeyed"
    INQUIRE = "inquire"
    STATUS = "status"
    STATEMENT = "statement"
    AGREEMENT = "agreement"
    LAYOUT = "layout"
    TASK = "task"
    REPLY = "reply"
    SUM = "sum"
    EVALUATE = "evaluate"
    EVALUATE_SILO = "evaluate_silo"
    SILO_RESULT = "silo_result"
    HEARTBEAT = "heartbeat"
    STOP = "stop"
    ERROR = "error"


class Reason(StrEnum):
    """Why a peer's message is refused: the ``reason`` of every RemoteWireError."""

    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    NOT_FINITE = "not_finite"
    WIRE_VERSION = "wire_version"
    WRONG_RUN = "wrong_run"
    UNKNOWN_SENDER = "unknown_sender"
    WRONG_RECEIVER = "wrong_receiver"
    BAD_SIGNATURE = "bad_signature"
    UNKNOWN_SESSION = "unknown_session"
    UNEXPECTED = "unexpected"
    REPLAY = "replay"
    GAP = "gap"
    TAMPERED = "tampered"
    EXHAUSTED = "exhausted"
    TOO_OFTEN = "too_often"
    LAYOUT = "layout"
    DATA = "data"
    UNSCHEDULED = "unscheduled"
    SUM = "sum"


@dataclass(frozen=True, kw_only=True)
class Header:
    """A message's header: authenticated but not encrypted.

    Raises:
        FieldError: a field is of the wrong type or out of bounds.
    """

    wire_version: int = WIRE_VERSION  # version of the wire format
    run: str
    kind: Kind  # kind of message
    sender: str  # name of the sending process: ``coordinator``, ``evaluator``, ``silo-00``,
    receiver: str  # name of the receiving process
    # For a task its number, unique per silo and increasing; for other kinds, chosen by the sender.
    sequence: int = 0
    reply_to: int | None = None  # sequence of the message that this one answers; required in a reply
    base_version: int = 0  # version (number of merges) of the model that the message is based on
    sent_at: float  # the run's time [s]
    session: bytes = b""  # 16 bytes from the handshake; empty in hello and welcome. Set when the message is sealed.
    counter: int = 0  # counter of the AEAD, per direction. Set when the message is sealed.

    def __post_init__(self) -> None:
        if type(self.kind) is not Kind:
            raise FieldError(f"kind: {shown(self.kind)} is not a Kind")
        for name in ("run", "sender", "receiver"):
            check_name(name, getattr(self, name))
        _U64.check("sequence", self.sequence)
        _TIME.check("sent_at", self.sent_at)
        if self.reply_to is not None:
            _U64.check("reply_to", self.reply_to)
        elif self.kind is Kind.REPLY:
            raise FieldError("reply_to: missing from a reply")
        _I63.check("base_version", self.base_version)
        if type(self.session) is not bytes or len(self.session) not in (0, SESSION_BYTES):
            raise FieldError(f"session: not 0 or {SESSION_BYTES} bytes")
        _U64.check("counter", self.counter)
        _VERSION.check("wire_version", self.wire_version)

    def answered(self, kind: Kind, sent_at: float) -> Header:
        """The header of an answer of this kind to this message, at a time of the run [s]."""
        return Header(
            run=self.run, kind=kind, sender=self.receiver, receiver=self.sender, reply_to=self.sequence, sent_at=sent_at
        )


@dataclass(frozen=True, kw_only=True)
class ShortHeader:
    """The clear header of a message whose header is sealed with its body: what is needed to open it.

    Raises:
        FieldError: a field is of the wrong type or out of bounds.
    """

    wire_version: int  # version of the wire format
    session: bytes  # 16 bytes
    counter: int  # counter of the AEAD, per direction

    def __post_init__(self) -> None:
        _VERSION.check("wire_version", self.wire_version)
        if type(self.session) is not bytes or len(self.session) != SESSION_BYTES:
            raise FieldError(f"session: not {SESSION_BYTES} bytes")
        _U64.check("counter", self.counter)


#: Payloads of the agreement on the data, and of silos' own evaluations.
_STATED = frozenset({DataStatement.KIND, DataFormat.KIND})
_AGREED = frozenset({DataFormat.KIND, SiloModalities.KIND})
_OF_SUMS = frozenset({SumKeys.KIND, SealedShares.KIND, SumWeights.KIND, Survivors.KIND})
_OTHERS = _STATED | _AGREED | _OF_SUMS - {SealedShares.KIND}
_DATA = frozenset(PAYLOADS) - {Error.KIND, Refusal.KIND, SiloMetrics.KIND, RunStatus.KIND} - _OTHERS
#: Payload kinds allowed in each kind of message.
CARRIES: Mapping[Kind, frozenset[str]] = {
    **dict.fromkeys(Kind, frozenset[str]()),
    Kind.STATUS: frozenset({RunStatus.KIND}),
    Kind.STATEMENT: _STATED,
    Kind.AGREEMENT: _AGREED,
    **dict.fromkeys((Kind.TASK, Kind.REPLY, Kind.EVALUATE, Kind.EVALUATE_SILO), _DATA),
    Kind.SUM: _OF_SUMS,
    Kind.SILO_RESULT: frozenset({SiloMetrics.KIND, Error.KIND}),
    **dict.fromkeys((Kind.HEARTBEAT, Kind.STOP), frozenset({Metrics.KIND})),
    Kind.ERROR: frozenset({Error.KIND, Refusal.KIND}),
}


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """Scalars of a task."""

    round: int  # number of this task's round, from 0
    rounds: int  # total number of rounds, at least 1
    # All replies of this silo up to this task number are merged and checkpointed, or discarded; 0 if none was merged.
    committed: int
    learning_rate: float  # learning rate of local training, above 0

    def __post_init__(self) -> None:
        _I63.check("task.round", self.round)
        Whole(1, I63).check("task.rounds", self.rounds)
        _U64.check("task.committed", self.committed)
        Real().check("task.learning_rate", self.learning_rate)
        if self.learning_rate <= 0:
            raise FieldError(f"task.learning_rate: {self.learning_rate} is not above 0")


@dataclass(frozen=True, eq=False)
class Message:
    """A message: a header and its contents.

    Raises:
        FieldError: an argument is missing or not allowed.
    """

    header: Header  # a header of any kind
    # At most 64, of the kinds that ``CARRIES`` allows for the header's kind; exactly one in an error.
    payloads: tuple[Payload, ...] = ()
    task: TaskInfo | None = None  # required in a task, optional in an evaluate message, None in all others
    layout: Layout | None = None  # required in a layout message, None in all others
    # Head of the sender's message log before it logged this message, 32 bytes; None if the sender keeps no signed log.
    head: bytes | None = None

    def __post_init__(self) -> None:
        kind = self.header.kind
        if self.head is not None and (type(self.head) is not bytes or len(self.head) != HEAD_BYTES):
            raise FieldError(f"head: not {HEAD_BYTES} bytes")
        if not isinstance(self.payloads, tuple) or len(self.payloads) > MAX_PAYLOADS:
            raise FieldError(f"payloads: not a tuple of at most {MAX_PAYLOADS}")
        for payload in self.payloads:
            if payload.KIND not in CARRIES[kind]:
                raise FieldError(f"payloads: a message of kind {kind} cannot carry {payload.KIND}")
        if kind is Kind.ERROR and len(self.payloads) != 1:
            raise FieldError("payloads: an error message carries exactly one payload")
        if (kind is Kind.TASK and self.task is None) or (
            kind not in (Kind.TASK, Kind.EVALUATE) and self.task is not None
        ):
            raise FieldError(f"task: missing from, or not allowed in, a message of kind {kind}")
        if (kind is Kind.LAYOUT) is (self.layout is None):
            raise FieldError(f"layout: missing from, or not allowed in, a message of kind {kind}")
