"""What travels: messages, their headers, and the closed set of payloads; see docs/reference/wire.md.

A ``Message`` is a ``Header`` plus a tuple of payloads, plus a ``TaskInfo`` in a task, plus a ``Layout`` in a layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fedmq.wire.fields import I63, U64, FieldError, check_name, check_real, check_whole, shown
from fedmq.wire.layout import Layout
from fedmq.wire.payloads import (
    IMAGE,
    PAYLOADS,
    TEXT,
    Buffer,
    ClassPrototypes,
    Delta,
    DiscriminatorDelta,
    Error,
    Geometry,
    LabelCount,
    Loss,
    MeanAveragePrecision,
    Memory,
    Metrics,
    ModalityPrototypes,
    Model,
    PartialDelta,
    Payload,
    Representations,
    RouterStatistics,
    SecretShare,
    digest,
    tensor_bytes,
    tensors,
)

# One place to import from: whoever makes or takes a message needs its payloads too.
__all__ = [
    "CARRIES",
    "COORDINATOR",
    "EVALUATOR",
    "IMAGE",
    "MAX_PAYLOADS",
    "PAYLOADS",
    "SESSION_BYTES",
    "TEXT",
    "WIRE_VERSION",
    "WIRE_VERSIONS",
    "Buffer",
    "ClassPrototypes",
    "Delta",
    "DiscriminatorDelta",
    "Error",
    "Geometry",
    "Header",
    "Kind",
    "LabelCount",
    "Layout",
    "Loss",
    "MeanAveragePrecision",
    "Memory",
    "Message",
    "Metrics",
    "ModalityPrototypes",
    "Model",
    "PartialDelta",
    "Payload",
    "Reason",
    "Representations",
    "RouterStatistics",
    "SecretShare",
    "TaskInfo",
    "digest",
    "tensor_bytes",
    "tensors",
]

WIRE_VERSION = 1
#: Versions this build can speak; the handshake takes the highest that both sides have.
WIRE_VERSIONS: tuple[int, ...] = (1,)
SESSION_BYTES = 16
MAX_PAYLOADS = 64
#: What the two processes that are no silo are called; every other name is a silo's.
COORDINATOR, EVALUATOR = "coordinator", "evaluator"


class Kind(StrEnum):
    """Kinds of message."""

    HELLO = "hello"
    WELCOME = "welcome"
    READY = "ready"
    LAYOUT = "layout"
    TASK = "task"
    REPLY = "reply"
    EVALUATE = "evaluate"
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
    LAYOUT = "layout"


@dataclass(frozen=True, kw_only=True)
class Header:
    """The envelope's header: travels in clear, authenticated.

    Args:
        run: the run's name.
        kind: of message.
        sender: name of the sending process: ``coordinator``, ``evaluator``, ``silo-00``, ...
        receiver: name of the receiving process.
        sequence: of a task, its number, unique per silo and rising; of others, a number of the sender's choice.
        sent_at: on the run's clock [s].
        reply_to: the sequence this message answers; a reply must have it.
        base_version: version (number of merges) the message stands on.
        session: 16 bytes from the handshake; empty in hello and welcome. Filled in by sealing.
        counter: of the AEAD, per direction. Filled in by sealing.
        wire_version: number of the wire's description.

    Raises:
        FieldError: a part is of another type or out of bounds.
    """

    run: str
    kind: Kind
    sender: str
    receiver: str
    sequence: int
    sent_at: float
    reply_to: int | None = None
    base_version: int = 0
    session: bytes = b""
    counter: int = 0
    wire_version: int = WIRE_VERSION

    def __post_init__(self) -> None:
        if type(self.kind) is not Kind:
            raise FieldError(f"kind: {shown(self.kind)} is not a Kind")
        check_name("run", self.run)
        check_name("sender", self.sender)
        check_name("receiver", self.receiver)
        check_whole("sequence", self.sequence, 0, U64)
        check_real("sent_at", self.sent_at, 0.0)
        if self.reply_to is not None:
            check_whole("reply_to", self.reply_to, 0, U64)
        elif self.kind is Kind.REPLY:
            raise FieldError("reply_to: a reply names the task it answers")
        check_whole("base_version", self.base_version, 0, I63)
        if type(self.session) is not bytes or len(self.session) not in (0, SESSION_BYTES):
            raise FieldError(f"session: not 0 or {SESSION_BYTES} bytes")
        check_whole("counter", self.counter, 0, U64)
        check_whole("wire_version", self.wire_version, 1, 0xFFFF)


_DATA = frozenset(PAYLOADS) - {Error.KIND}
#: Which payload kinds each kind of message may carry.
CARRIES: Mapping[Kind, frozenset[str]] = {
    Kind.HELLO: frozenset(),
    Kind.WELCOME: frozenset(),
    Kind.READY: frozenset(),
    Kind.LAYOUT: frozenset(),
    Kind.TASK: _DATA,
    Kind.REPLY: _DATA,
    Kind.EVALUATE: _DATA,
    Kind.HEARTBEAT: frozenset({Metrics.KIND}),
    Kind.STOP: frozenset({Metrics.KIND}),
    Kind.ERROR: frozenset({Error.KIND}),
}


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """The small numbers of a task.

    Args:
        round: number of this task's round, from 0.
        rounds: rounds in all, at least 1.
        settled: every reply of this silo up to this task sequence is durably merged or given up; 0 says nothing.
        learning_rate: above 0.
    """

    round: int
    rounds: int
    settled: int
    learning_rate: float

    def __post_init__(self) -> None:
        check_whole("task.round", self.round, 0, I63)
        check_whole("task.rounds", self.rounds, 1, I63)
        check_whole("task.settled", self.settled, 0, U64)
        check_real("task.learning_rate", self.learning_rate)
        if self.learning_rate <= 0:
            raise FieldError(f"task.learning_rate: {self.learning_rate} is not above 0")


@dataclass(frozen=True, eq=False)
class Message:
    """A header and what it carries.

    Args:
        header: of any kind.
        payloads: at most 64, of the kinds that ``CARRIES`` allows for the header's kind; an error carries exactly one.
        task: in a task always, in an evaluate if wished, nowhere else.
        layout: in a layout message always, nowhere else.

    Raises:
        FieldError: a part is missing or out of place.
    """

    header: Header
    payloads: tuple[Payload, ...] = ()
    task: TaskInfo | None = None
    layout: Layout | None = None

    def __post_init__(self) -> None:
        kind = self.header.kind
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
            raise FieldError(f"task: missing from, or out of place in, a message of kind {kind}")
        if (kind is Kind.LAYOUT) is (self.layout is None):
            raise FieldError(f"layout: missing from, or out of place in, a message of kind {kind}")
