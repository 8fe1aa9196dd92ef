"""What a silo tells its operator and the coordinator about failed tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedmq.errors import FedmqError
from fedmq.federation.participant import reportable
from fedmq.storage.logs import QUIET, ErrorFile, Logger
from fedmq.text import print_line, printable
from fedmq.wire.messages import Header


@dataclass(frozen=True)
class FailureReporter:
    """Reports a silo's failed tasks and evaluations.

    Args:
        name: the silo's name.
        errors: file of its tracebacks.
        logger: its log for operators.
        whole: the coordinator learns the whole text, see :func:`reportable`.
    """

    name: str
    errors: ErrorFile
    logger: Logger
    whole: bool

    def report(self, error: Exception, header: Header, what: Mapping[str, int]) -> str:
        """Report an error to the silo's operator; returns the text for the coordinator.

        Args:
            error: the error.
            header: header of the request that failed.
            what: its numbers for the log.
        """
        reported, text = reportable(error, whole=self.whole), f"{type(error).__name__}: {error}"
        if not isinstance(error, FedmqError):
            place = self.errors.add(error, self.name, f"{header.kind} {header.sequence}")
            self.logger.warning("failed", error=text, traceback=place or "above", **what)
            return reported
        self.logger.warning("failed", error=text, **what)
        if self.logger is QUIET and reported != text:  # parts of the text were removed
            print_line(f"{self.name}: task {header.sequence}: {printable(str(error))}", error=True)
        return reported
