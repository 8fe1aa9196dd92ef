"""A run's peers in the coordinator's own process: tasks are answered by calls, without messages, keys or threads.

It stands where the transport and the roster stand in a run with real processes, and the loop cannot tell: the same
rounds, the same tasks, the same merges, hence the same model to the bit. What it leaves out is what a message passes on
its way (encoding, sealing, the message logs), so there is nothing for an auditor to read.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from coordinator.peers import Ready, Unusable
from fedmq.clock import Clock
from fedmq.errors import DiskError, FedmqError, RemoteWireError
from fedmq.wire.fields import all_finite
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Error, Header, Kind, Message, Payload, Reason, tensors

#: What a peer answers to a task or to an evaluation.
PeerFunction = Callable[[Message], tuple[Payload, ...]]


class InProcessPeers:
    """All peers of a run as functions.

    Args:
        answers: of each silo and of the evaluator, by name.
        run: the run's name.
        log: the coordinator's message log; takes notes only.
        clock: for stamps.
    """

    uri: ClassVar[str] = "inline"
    wired: ClassVar[bool] = False

    def __init__(self, answers: Mapping[str, PeerFunction], run: str, log: MessageLog, clock: Clock) -> None:
        self._answers, self._run, self._log, self._clock = answers, run, log, clock
        self._queue: deque[Ready | Message] = deque(Ready(name, returned=False) for name in sorted(answers))
        self._joined: set[str] = set()
        self.sent = 0
        self.received = 0
        self.refused: Counter[str] = Counter()
        self.refusal = ""  # the last one

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[Any]] | None:
        """The next peer that joins, or the answer to the oldest open request, computed now."""
        if not self._queue:
            return None
        item = self._queue.popleft()
        if isinstance(item, Ready):
            self._joined.add(item.name)
            return b"", [item]
        self.received += 1
        return b"", [self._answer(item)]

    def _answer(self, request: Message) -> Message:
        header = request.header
        payloads: tuple[Payload, ...]
        kind = Kind.REPLY
        try:
            payloads = self._answers[header.receiver](request)
        except DiskError:
            raise  # as it ends a silo's process, to go on from there
        except Exception as error:
            if not isinstance(error, FedmqError):  # what the other side is told says all there is to a known one
                traceback.print_exc(file=sys.stderr)
            text = f"task {header.sequence}: {type(error).__name__}: {error}"
            payloads, kind = (Error.saying("training_failed", text),), Kind.ERROR
        return Message(
            Header(
                run=self._run,
                kind=kind,
                sender=header.receiver,
                receiver=COORDINATOR,
                sequence=header.sequence,
                reply_to=header.sequence,
                base_version=header.base_version,
                sent_at=self._clock.now(),
            ),
            payloads,
        )

    def take(self, address: bytes, frames: Sequence[Any]) -> Any:
        """What :meth:`receive` gave; a reply that no codec would let through is refused as the roster does."""
        taken = frames[0]
        bulk = [array for payload in getattr(taken, "payloads", ()) for array in tensors(payload)]
        if not all(map(all_finite, bulk)):
            self.refuse(taken.header.sender, RemoteWireError(Reason.NOT_FINITE, "NaN or infinity"), 0)
            return Unusable(taken.header, Reason.NOT_FINITE)
        return taken

    def online(self, name: str) -> bool:
        """Whether a peer has joined."""
        return name in self._joined

    def header(
        self, receiver: str, kind: Kind, *, sequence: int = 0, reply_to: int | None = None, base_version: int = 0
    ) -> Header:
        """A header of ours for a message to ``receiver``, stamped now."""
        return Header(
            run=self._run,
            kind=kind,
            sender=COORDINATOR,
            receiver=receiver,
            sequence=sequence,
            reply_to=reply_to,
            base_version=base_version,
            sent_at=self._clock.now(),
        )

    def send(self, name: str, message: Message | Header) -> int:
        """Open a request; layouts and stops need no answer. Returns 1, or 0 if the peer has not joined."""
        if name not in self._joined:
            return 0
        self.sent += 1
        if isinstance(message, Message) and message.header.kind in (Kind.TASK, Kind.EVALUATE):
            self._queue.append(message)
        return 1

    def refuse(self, name: str, error: RemoteWireError, size: int) -> None:
        """Count and log a refusal."""
        self.refused[error.reason] += 1
        self.refusal = f"{name}: {error.detail}"
        self._log.refused(name, error.reason, error.detail, size)

    def silent(self, seconds: float, at: float) -> list[str]:
        """Nobody: a function does not go away."""
        return []

    def drop(self, name: str) -> bool:
        """Forget a peer; returns whether it was there."""
        here = name in self._joined
        self._joined.discard(name)
        return here

    def note_unlogged(self) -> None:
        """Nothing is left out."""
