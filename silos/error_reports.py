"""What a silo tells its operator and the coordinator about its errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from fedmq.config import user_files
from fedmq.errors import FedmqError, InputError
from fedmq.storage.error_files import ErrorFile
from fedmq.storage.logs import QUIET, Logger
from fedmq.text import print_line, printable
from fedmq.wire.channel import Channel
from fedmq.wire.messages import Header, Kind
from fedmq.wire.payloads import Error

#: From a possible start of a path to the last slash, since folder names may contain any character.
_FOLDERS = re.compile(r"(?<![^\s'\"(\[=:])[.~]*/(?:.*/)?", re.DOTALL)


@contextmanager
def end_reported(link: Channel) -> Iterator[None]:
    """Report an error that ends the silo to the coordinator, which otherwise would only miss its heartbeats."""
    try:
        yield
    except Exception as error:
        failed = Error.saying("silo_failed", f"the silo has ended: {reportable(error)}")
        link.send(Kind.ERROR, (failed,), sequence=0, reply_to=None, base_version=0)
        raise


def reportable(error: Exception, *, whole: bool = False) -> str:
    """The description of an error that is sent to the coordinator; the full text goes only to the silo's stderr.

    Paths are reduced to file names, since folders may contain user names. Of an error that is not fedmq's, only the
    type is sent, since its text may contain anything, and the line of the user's own file, which all processes have.

    Args:
        error: the error.
        whole: send its text, too: all processes of the run belong to one user of this machine.
    """
    name = type(error).__name__
    match error:
        case InputError():
            place, found, allowed = (_FOLDERS.sub("", each) for each in (error.place, repr(error.found), error.allowed))
            return f"{name}: {place}: found {found}, allowed: {allowed}"
        case FedmqError():
            return f"{name}: {_FOLDERS.sub('', str(error))}"
        case _:
            place = user_files.place_of_error(error)
            return f"{f'{place}: ' if place else ''}{name}{f': {error}' if whole else ''}"


@dataclass(frozen=True)
class FailureReport:
    """Reports of a silo's failed tasks and evaluations.

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

    def made(self, error: Exception, header: Header, what: Mapping[str, int]) -> str:
        """Report an error to the silo's operator; returns what the coordinator is told.

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
