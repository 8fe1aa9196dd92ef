"""Other people's files are read in a child process, by the libraries that people use for them.

A damaged or hostile data set, image or file of weights may crash a library, keep it busy for ever, or make it ask for
any amount of memory. Each of these ends at most the child, and becomes an error of one line that names the file. The
child has limits of memory and processor time that grow with the size of the files, and can write no large file. It
receives and returns JSON, arrays, bytes and dataclasses, never pickles. The caller checks shapes, values and meaning.

A child starts with the first call and serves further ones; threads that call at the same time have a child each. What
a child calls in its turn runs in the child itself.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import json
import math
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from fedmq.errors import InputError
from fedmq.packages import MissingPackageError
from fedmq.storage.regular_files import check_regular

T = TypeVar("T")

#: Memory that a call may use [bytes], and further bytes for each byte of its files.
MEMORY, MEMORY_PER_BYTE = 1 << 31, 16
#: Processor time that a call may use [s], and the bytes of files for which it gets a further second.
CPU_S, BYTES_PER_S = 20, 100_000
#: A call that waits, e.g. for a file system that does not answer, ends after this many times its processor time.
WAITS: Final = 10
_IDLE_S, _IDLE = 60.0, 3  # a child without calls exits after this time, with this code
_WRITTEN: Final = 1 << 20  # size of a file that a library may write [bytes], e.g. to try a temporary folder
_ARRAY, _BYTES, _PATH, _OBJECT = "\0array", "\0bytes", "\0path", "\0object"
_LENGTH = struct.Struct("<Q")
_MAX_LINE = 300  # characters of a library's message


class _Child:
    """One child process and the socket to it."""

    def __init__(self) -> None:
        self.served = False  # whether it has replied to a call
        self._line, theirs = socket.socketpair()
        # Both are open as long as the process, and hold at most _WRITTEN.
        self._errors, self._notes = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            numbers = theirs.fileno(), self._notes.fileno()
            folders = [str(Path(folder).absolute()) for folder in sys.path]
            start = f"import sys; sys.path[:] = {folders!r}; import {__name__} as child; child.serve{numbers}"
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                [sys.executable, "-P", "-c", start],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                # The child outlives the folder it was started in: MKL ends a process whose working folder was removed.
                cwd="/",
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: dict[str, object], wait_s: float) -> Any:
        """The child's reply; TimeoutError, EOFError or ConnectionError without one."""
        self._errors.truncate(0)
        self._errors.seek(0)
        self._line.settimeout(wait_s)
        _send(self._line, _packed(request))
        return _receive(self._line, time.monotonic() + wait_s)

    def end(self) -> int:
        """End the process; its exit code."""
        self._line.close()
        self._process.kill()
        return self._process.wait()

    def code(self) -> int:
        """Exit code of a process that has closed its socket."""
        try:
            return self._process.wait(10)
        except subprocess.TimeoutExpired:
            return self.end()

    def last_line(self) -> str:
        """The last line that a library wrote before it ended the process, empty if there is none."""
        self._errors.seek(0)
        lines = self._errors.read(_WRITTEN).decode(errors="replace").split("\n")
        return next((line.strip()[-_MAX_LINE:] for line in reversed(lines) if line.strip()), "")

    def noted(self) -> tuple[str, str] | None:
        """What the child last said that it reads, and what this should be; see :func:`note`."""
        line = os.pread(self._notes.fileno(), _WRITTEN, 0).partition(b"\n")[0]
        return tuple(json.loads(line)) if line else None


_waiting: list[_Child] = []  # children without a call
os.register_at_fork(after_in_child=_waiting.clear)  # a child serves one process


@atexit.register
def end_children() -> None:
    """End the children without a call."""
    while _waiting:
        _waiting.pop().end()


def _take() -> _Child:
    while _waiting:
        with suppress(IndexError):  # another thread took the last one
            if (child := _waiting.pop()).alive:
                return child
    return _Child()


def read(
    function: Callable[..., T],
    *arguments: object,
    place: str,
    allowed: str,
    files: Sequence[Path] = (),
    size: int = 0,
    libraries: Sequence[str] = (),
    error: type[InputError] = InputError,
    limit_memory: bool = True,
) -> T:
    """The result of a function that runs in a child.

    Args:
        function: a function of a module, whose arguments and result are JSON, arrays and bytes; tuples become lists.
            The result may also hold paths and dataclasses of modules that the caller has imported, whose fields have
            tuples; a field whose name starts with an underscore keeps its default.
        arguments: its arguments; paths become strings, which are absolute.
        place: what is read, for the error.
        allowed: what it should be, likewise.
        files: the files that are read, which must be regular files; their sizes determine the limits.
        size: size of further files [bytes].
        libraries: modules to import before the limits apply, as importing takes memory, too.
        error: what is raised for a file that the function cannot read.
        limit_memory: false where a GPU is used, whose driver reserves addresses far beyond the memory.

    Raises:
        InputError: raised by the function, or the function raised another error, which is quoted, crashed, or exceeded
            a limit.
    """
    for file in files:
        check_regular(file, allowed)
    arguments = tuple(str(Path(each).absolute()) if isinstance(each, os.PathLike) else each for each in arguments)
    if _notes is not None:
        return _here(function, arguments, place, allowed, error)
    size += sum(file.stat().st_size for file in files) + sum(len(each) for each in arguments if isinstance(each, bytes))
    memory, seconds = MEMORY + MEMORY_PER_BYTE * size, CPU_S + size // BYTES_PER_S
    request: dict[str, object] = {
        "function": [function.__module__, function.__qualname__],
        "arguments": arguments,
        "libraries": libraries,
        "memory": memory if limit_memory else None,
        "seconds": seconds,
    }
    reply = _reply(request, WAITS * seconds)
    place, allowed = reply.pop("noted", None) or (place, allowed)
    match reply:
        case {"value": value}:
            return cast("T", value)
        case {"refused": [found_place, found, wanted, str(kind)]}:
            raise (MissingPackageError if kind == "package" else InputError)(found_place, found, wanted)
        case {"failed": reason}:
            raise error(place, reason, allowed)
        case {"died": code, "last": last}:
            raise error(place, _death(code, seconds) + (f": {last}" if last else ""), allowed)
    raise error(place, f"no answer in {WAITS * seconds} s", allowed)


def _here(
    function: Callable[..., T], arguments: Sequence[object], place: str, allowed: str, error: type[InputError]
) -> T:
    """The result of a function that runs in this process, which is a child, within the limits of the child's call."""
    note(place, allowed)
    try:
        return function(*arguments)
    except (InputError, MemoryError):  # the caller's own process says how much memory was allowed
        raise
    except Exception as failure:
        raise error(place, line_of(failure), allowed) from None


def _reply(request: dict[str, object], wait_s: float) -> dict[str, Any]:
    while True:
        child = _take()
        try:
            reply: dict[str, Any] = child.ask(request, wait_s)
        except TimeoutError:
            child.end()
            return {"noted": child.noted()}
        except (EOFError, ConnectionError):
            if (code := child.code()) != _IDLE or not child.served:  # else it exited between two calls
                return {"died": code, "last": child.last_line(), "noted": child.noted()}
        except BaseException:  # e.g. Ctrl-C
            child.end()
            raise
        else:
            if "failed" in reply:
                reply["noted"] = child.noted()
            if reply.pop("memory", False):
                child.end()  # it may not have returned what it used
            else:
                child.served = True
                _waiting.append(child)
            return reply


def _death(code: int, seconds: int) -> str:
    if -code == signal.SIGXCPU:
        return f"more than {seconds} s of processor time"
    return f"its reader died of {signal.Signals(-code).name}" if code < 0 else f"its reader died with code {code}"


# --- messages -------------------------------------------------------------------------------------------------------


def _packed(value: object) -> list[bytes | memoryview]:
    """JSON in which arrays and bytes are replaced by references, and then these."""
    parts: list[bytes | memoryview] = []

    def referred(item: object) -> object:
        match item:
            case bytes():
                parts.append(item)
                return {_BYTES: len(item)}
            case np.ndarray():
                plain = np.ascontiguousarray(item).reshape(item.shape)
                if plain.dtype.kind not in "biufcSU":
                    raise TypeError(f"an array of {plain.dtype}")
                content = plain.tobytes() if plain.dtype.kind in "SU" else plain.reshape(-1).view(np.uint8).data
                if plain.dtype.kind == "U":  # NumPy does not check characters
                    numbers = np.frombuffer(content, np.dtype(np.uint32).newbyteorder(plain.dtype.byteorder))
                    _ = list(map(chr, np.unique(numbers)))
                parts.append(content)
                return {_ARRAY: plain.dtype.str, "shape": plain.shape}
            case np.generic():
                return item.item()
            case os.PathLike():
                return {_PATH: str(item)}
        module, name = type(item).__module__, type(item).__qualname__
        if dataclasses.is_dataclass(item) and _class_of(module, name) is type(item):
            names = [field.name for field in dataclasses.fields(item) if field.name[0] != "_"]
            return {_OBJECT: [module, name], **{name: getattr(item, name) for name in names}}
        raise TypeError(f"an object of type {type(item).__name__}")

    text = json.dumps(value, default=referred).encode()
    return [_LENGTH.pack(len(text)), text, *parts]


def _send(line: socket.socket, message: Sequence[bytes | memoryview]) -> None:
    for part in message:
        line.sendall(part)


def _receive(line: socket.socket, ends: float) -> Any:
    head = _exactly(line, _LENGTH.size, ends)
    text = _exactly(line, _LENGTH.unpack(head)[0], ends)

    def resolved(item: dict[str, Any]) -> Any:
        if _BYTES in item:
            return bytes(_exactly(line, item[_BYTES], ends))
        if _ARRAY in item:
            kind, shape = np.dtype(item[_ARRAY]), tuple(item["shape"])
            content = _exactly(line, math.prod(shape) * kind.itemsize, ends)
            array: npt.NDArray[Any] = np.frombuffer(content, kind).reshape(shape) if content else np.empty(shape, kind)
            return array
        if _PATH in item:
            return Path(item[_PATH])
        if _OBJECT in item:
            module, name = item.pop(_OBJECT)
            if (kind := _class_of(module, name)) is None:
                raise InputError(
                    f"{module}.{name}", "a class that was not imported before", "one of the reader's module"
                )
            return kind(**{field: _in_tuples(value) for field, value in item.items()})
        return item

    return json.loads(bytes(text), object_hook=resolved)  # calls it in the order in which the parts were sent


def _class_of(module: str, name: str) -> Any:
    """A dataclass of a module that this process has imported; None if there is none of this name."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _in_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_in_tuples, value))
    return {name: _in_tuples(each) for name, each in value.items()} if isinstance(value, dict) else value


def _exactly(line: socket.socket, size: int, ends: float) -> bytearray:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        line.settimeout(max(1e-3, ends - time.monotonic()))
        if not (count := line.recv_into(view)):
            raise EOFError
        view = view[count:]
    return content


# --- the child ------------------------------------------------------------------------------------------------------


_notes: int | None = None  # in a child, file descriptor of what it is reading; else None


def note(place: str, allowed: str) -> None:
    """Say what is read next, for the error if this process is a child and does not survive it."""
    if _notes is not None:
        os.pwrite(_notes, json.dumps([place, allowed]).encode() + b"\n", 0)


def serve(number: int, notes: int) -> None:
    """Serve calls until the parent is gone, or has no call for a while.

    ``number`` is the file descriptor of the socket to the parent, ``notes`` that of the file with what is being read.
    """
    global _notes  # noqa: PLW0603 - this process is a child from now on
    _notes = notes
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    sys.dont_write_bytecode = True
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, _WRITTEN)
    with suppress(OSError):  # without memory, the kernel ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    line = socket.socket(fileno=number)
    try:
        while True:
            request = _receive(line, time.monotonic() + _IDLE_S)
            os.pwrite(notes, b"\n", 0)
            message = _result(request)
            line.settimeout(None)
            _send(line, message)
    except (EOFError, OSError):
        os._exit(_IDLE)  # at once, whatever the libraries would do at exit


def _result(request: dict[str, Any]) -> list[bytes | memoryview]:
    module, name = request["function"]
    for limited in (resource.RLIMIT_AS, resource.RLIMIT_CPU):
        _limit(limited, resource.RLIM_INFINITY)  # those of the last call do not hold for imports
    try:
        function = getattr(importlib.import_module(module), name)
        for library in request["libraries"]:
            with suppress(ImportError):  # the function says what is missing
                importlib.import_module(library)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + request["seconds"])
        with suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            most = resource.RLIM_INFINITY
            if request["memory"] is not None:
                most = pages * resource.getpagesize() + request["memory"]
            _limit(resource.RLIMIT_AS, most)
        return _packed({"value": function(*request["arguments"])})
    except InputError as error:
        kind = "package" if isinstance(error, MissingPackageError) else ""
        found = error.found if isinstance(error.found, str | int | float | None) else str(error.found)
        return _packed({"refused": [error.place, found, error.allowed, kind]})
    except MemoryError as error:
        return _packed({"failed": str(error) or f"more than {request['memory']:,} bytes of memory", "memory": True})
    except (Exception, SystemExit) as error:
        return _packed({"failed": line_of(error)})


def _limit(kind: int, most: int) -> None:
    """Set a soft limit, at most the hard one; RLIM_INFINITY is -1."""
    hard = resource.getrlimit(kind)[1]
    unlimited = resource.RLIM_INFINITY
    resource.setrlimit(kind, (min((limit for limit in (most, hard) if limit != unlimited), default=unlimited), hard))


def line_of(error: BaseException) -> str:
    """A library's own words: the first line of its message, or the name of the error."""
    return (next(iter(str(error).splitlines()), "") or type(error).__name__)[:_MAX_LINE]
