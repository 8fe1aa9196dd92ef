"""What a silo or the evaluator tells the coordinator about its errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedmq.config import user_files
from fedmq.errors import DiskError, FedmqError, InputError
from fedmq.wire.channel import Channel
from fedmq.wire.messages import Kind
from fedmq.wire.payloads import Error

#: Errors that end the process instead of failing the task or evaluation, which is repeated after a restart; a silo
#: starts from the state before the task. After a GPU error, e.g. an illegal address or a failed memory cell, the
#: process can no longer use the GPU.
FATAL_ERRORS: tuple[type[Exception], ...] = (DiskError, *filter(None, (getattr(torch, "AcceleratorError", None),)))
#: From a possible start of a path to the last slash, since folder names may contain any character.
_FOLDERS = re.compile(r"(?<![^\s'\"(\[=:])[.~]*/(?:.*/)?", re.DOTALL)


@contextmanager
def end_reported(link: Channel, who: str = "silo") -> Iterator[None]:
    """Report an error that ends this process to the coordinator, which otherwise would only miss its heartbeats.

    Args:
        link: the channel to the coordinator.
        who: the process: ``silo`` or ``evaluator``.
    """
    try:
        yield
    except Exception as error:
        failed = Error.saying(f"{who}_failed", f"the {who} has ended: {reportable(error)}")
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
