"""What silos and the evaluator report after an inquiry: the keys of the scenario that differ from theirs."""

from __future__ import annotations

from collections.abc import Sequence

from fedmq.config.scenario_digests import keys_in, named
from fedmq.errors import RemoteWireError
from fedmq.wire.limits import BoundedDict
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Kind, Reason
from fedmq.wire.payloads import Error
from fedmq.wire.scenario_query import OTHER_SCENARIO
from fedmq.wire.sealed_sessions import Session, open_message

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
