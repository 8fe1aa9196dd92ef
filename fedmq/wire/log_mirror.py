"""Passes the records of a message log on to a log for operators, each with the level of its kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fedmq.storage.logs import Logger
from fedmq.wire.log_records import (
    EventRecord,
    HandshakeRecord,
    LogRecord,
    MessageRecord,
    NoteKind,
    NoteRecord,
    RefusedRecord,
    SignatureRecord,
    StartRecord,
)
from fedmq.wire.messages import Kind

_INFO = frozenset(
    {
        NoteKind.STARTED, NoteKind.RESUMED, NoteKind.EXTENDED, NoteKind.ENDED, NoteKind.RELEASED, NoteKind.ALL_MERGED,
        NoteKind.INLINE, NoteKind.REPLY_DISCARDED, NoteKind.LEFT_OUT_BY_KRUM, NoteKind.FAULT, NoteKind.STATE_KEPT,
        NoteKind.RECONNECTED, NoteKind.FORMER_SESSIONS, NoteKind.JOINED,
    }
)  # fmt: skip
_WARNING = frozenset(
    {
        NoteKind.EXPELLED, NoteKind.PEER_LOST, NoteKind.NOT_DELIVERED, NoteKind.NOT_MEASURED, NoteKind.TASK_FAILED,
        NoteKind.REFUSALS_COUNTED, NoteKind.FAULT_NOT_CARRIED_OUT, NoteKind.WALL_CLOCK_FAULTS, NoteKind.STATE_GONE,
        NoteKind.STATE_OLDER,
        NoteKind.COORDINATOR_SILENT, NoteKind.STOOD_STILL, NoteKind.QUEUE_FULL, NoteKind.MESSAGE_LOST,
        NoteKind.WITHHELD, NoteKind.EVALUATOR_GIVEN_UP, NoteKind.HELLO_REFUSED, NoteKind.TOO_OFTEN, NoteKind.TOO_MANY,
        NoteKind.OTHER_SCENARIO,
    }
)  # fmt: skip
_ERROR = frozenset({NoteKind.ERROR_REPORTED, NoteKind.CHECKPOINT_REFUSED})


#: Notes that a silo can cause in every round, with the facts that tell whether two of them say the same.
_REPEATED: Mapping[str, tuple[str, str]] = {
    NoteKind.ERROR_REPORTED: ("peer", "error"),
    NoteKind.TASK_FAILED: ("silo", "reason"),
}
#: Maximum number of different notes whose repetitions are counted; then counting begins again.
_MOST = 4096


class Mirror:
    """Logs the records of a message log for operators.

    If a silo's tasks fail for the same reason again and again, the first failure is logged as it is, the 10th, 100th,
    1000th, ... with the number of times, and the others as ``debug``.

    Args:
        logger: the log for operators.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._seen: Counter[tuple[object, ...]] = Counter()

    def __call__(self, record: LogRecord) -> None:
        """Log a record."""
        if not isinstance(record, NoteRecord) or record.text not in _REPEATED:
            mirror(self._logger, record)
            return
        facts = record.facts
        key = (record.text, *(facts.get(name) for name in _REPEATED[record.text]))
        if key not in self._seen and len(self._seen) >= _MOST:
            self._seen.clear()
        self._seen[key] += 1
        times = self._seen[key]
        if times == 1:
            mirror(self._logger, record)
        elif str(times).strip("0") == "1":
            self._logger.warning(str(record.text), times=times, **facts)
        else:
            self._logger.debug(str(record.text), **facts)


def mirror(logger: Logger, record: LogRecord) -> None:
    """Log a record of a message log; kinds that are not listed above are logged as ``debug``."""
    match record:
        case MessageRecord(header=header):
            peer = header.receiver if record.action == "sent" else header.sender
            values = _given(sequence=header.sequence, reply_to=header.reply_to, version=header.base_version)
            logger.debug(f"{header.kind.value} {record.action}", peer=peer, bytes=record.bytes, **values)
        case HandshakeRecord(kind=Kind.READY, action="received"):
            # It has not joined: the coordinator may still refuse the data that it states next.
            logger.info("connected", peer=record.peer)
        case HandshakeRecord():
            logger.debug(f"{record.kind.value} {record.action}", peer=record.peer, bytes=record.bytes)
        case RefusedRecord():
            logger.warning("message refused", peer=record.peer, reason=record.reason.value, detail=record.detail)
        case EventRecord():
            values = _given(silo=record.silo or None, sequence=record.sequence or None, number=record.number)
            logger.debug(f"event {record.event}", now=record.now, version=record.version, **values)
        case StartRecord():
            logger.debug("start record signed", protocol=record.protocol)
        case SignatureRecord():
            logger.debug("log signed", at=record.at.value, records=record.n)
        case NoteRecord():
            kind, values = record.text, _given(version=record.version, **record.facts)
            if kind in _ERROR:
                logger.error(str(kind), **values)
            elif kind in _WARNING:
                logger.warning(str(kind), **values)
            elif kind in _INFO:
                logger.info(str(kind), **values)
            else:
                logger.debug(str(kind), **values)


def _given(**values: object) -> Mapping[str, object]:
    return {name: value for name, value in values.items() if value is not None}
