"""Peers in the coordinator's own process: functions answer tasks, without a transport, keys or threads.

They replace the transport and the roster of a run with separate processes. The loop runs the same rounds, tasks and
merges, so that the model is bit-identical. Messages are neither encoded, sealed nor logged, so that there is nothing to
audit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from coordinator.peers import HeaderMaker, Ready, Unusable
from fedmq.clock import Clock
from fedmq.errors import DiskError, FedmqError, RemoteWireError
from fedmq.storage.error_files import ErrorFile
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.fields import all_finite
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message, Reason
from fedmq.wire.payloads import Error, Payload, tensors

#: Answers a task or an evaluation request with the payloads of the reply.
PeerFunction = Callable[[Message], tuple[Payload, ...]]


class InProcessPeers:
    """All peers of a run as functions.

    Args:
        answers: the function of each silo and of the evaluator, by name.
        run: name of the run.
        log: the coordinator's message log; receives notes only.
        clock: clock for time stamps.
        folder: the run folder, for tracebacks.
    """

    uri: ClassVar[str] = "inline"
    wired: ClassVar[bool] = False

    def __init__(
        self, answers: Mapping[str, PeerFunction], run: str, log: MessageLog, clock: Clock, folder: RunFolder
    ) -> None:
        self._errors = {name: ErrorFile(folder.errors(name)) for name in answers}
        self._answers, self._run, self._log, self._clock = answers, run, log, clock
        self.header = HeaderMaker(run, COORDINATOR, clock)
        self.queue: deque[Ready | Message] = deque(Ready(name, returned=False) for name in sorted(answers))
        self._joined: set[str] = set()
        self.sent = 0
        self.received = 0
        self.refused: Counter[str] = Counter()
        self.refusal, self.refused_at = "", 0.0
        self.failures: dict[str, str] = {}
        self.undelivered: dict[str, int] = {}
        self.unaccepted: dict[str, int] = {}  # functions of this process have no keys

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[Any]] | None:
        """The next peer that joins, or the answer to the oldest open request, computed in this call."""
        if not self.queue:
            return None
        item = self.queue.popleft()
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
            raise  # it would end a silo's process, too; the run can be resumed
        except Exception as error:
            if not isinstance(error, FedmqError):  # the text of a known error suffices
                self._errors[header.receiver].add(error, header.receiver, f"{header.kind} {header.sequence}")
            text = f"task {header.sequence}: {type(error).__name__}: {error}"
            payloads, kind = (Error.of_task(error, text),), Kind.ERROR
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
        """Take a message of :meth:`receive`; a reply with non-finite numbers is refused as by the codec."""
        taken = frames[0]
        bulk = [array for payload in getattr(taken, "payloads", ()) for array in tensors(payload)]
        if not all(map(all_finite, bulk)):
            error = RemoteWireError(Reason.NOT_FINITE, "NaN or infinity")
            self.refuse(taken.header.sender, error, 0)
            return Unusable(taken.header, error.reason, str(error))
        return taken

    def online(self, name: str) -> bool:
        """Whether a peer has joined."""
        return name in self._joined

    def send(self, name: str, message: Message | Header) -> int:
        """Queue a request; layouts and stops need no answer. Returns 1, or 0 if the peer has not joined."""
        if name not in self._joined:
            return 0
        self.sent += 1
        if isinstance(message, Message) and message.header.kind in (Kind.TASK, Kind.EVALUATE):
            self.queue.append(message)
        return 1

    def refuse(self, name: str, error: RemoteWireError, size: int) -> int:
        """Count and log a refusal; returns the number of its log record."""
        self.refused[error.reason] += 1
        self.refusal, self.refused_at = f"{name}: {error.detail}", self._clock.stopwatch()
        return self._log.refused(name, error.reason, error.detail, size)

    def silent(self, seconds: float, at: float) -> list[str]:
        """Always empty: functions do not go silent."""
        return []

    def heard(self) -> Mapping[str, float]:
        """Always empty: functions send no heartbeats."""
        return {}

    def joining(self) -> Mapping[str, float]:
        """Always empty: functions need not wait."""
        return {}

    def drop(self, name: str) -> bool:
        """Remove a peer; returns whether it had joined."""
        joined = name in self._joined
        self._joined.discard(name)
        return joined

    def dismiss(self, names: Sequence[str]) -> list[str]:
        """Tell peers that the run is over; returns those that have not joined."""
        return [name for name in names if not self.send(name, self.header(name, Kind.STOP))]

    def note_unlogged(self) -> None:
        """Nothing to note: every refusal is logged."""
