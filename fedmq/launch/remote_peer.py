"""What the launchers of clusters have in common: silos, hosts and the evaluator as processes on other machines.

Messages do not pass through a cluster's engine: they are sealed and go to the coordinator's socket, as from any other
machine. The coordinator runs on the machine on which the command was started and which has the run folder. The engine
only passes each process its task and its keys, and returns the files that the process wrote, as typed records in JSON.
Neither side trusts the other's bytes: :func:`decode` checks types, sizes and names, and :func:`store_files` the path of
each file. No value of fedmq is read from an engine's pickle files.

The command creates private keys for this run only, and sends them. A process that created its own key would have to
return the public half before the coordinator lets it join, but a Ray task returns nothing before its end. Also, a silo
that is started again on another machine keeps its key, from which ``privacy.noise_from: key`` derives its noise. On its
way, a key is as well protected as the engine's jobs: on Slurm by files that only one user can read, see
:mod:`fedmq.launch.slurm_cluster`; on Ray by the limits on access to the cluster.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedmq.config.faults import Freeze
from fedmq.config.resolve import ResolvedRun, Source
from fedmq.config.run_id import name_of
from fedmq.config.scenario import Scenario
from fedmq.config.sections import Name
from fedmq.errors import FedmqError, InputError
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.storage.json_files import refusal
from fedmq.storage.logs import LogOptions
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder, write_bytes, writing
from fedmq.text import print_line, printable
from fedmq.wire.keys import Identity, identity_of, private_names
from fedmq.wire.messages import COORDINATOR, EVALUATOR
from silos.host import HostArguments, run_host
from silos.program import run_silo
from silos.tasks import SiloArguments

#: Arguments of a silo, a host or the evaluator.
PeerArguments = SiloArguments | HostArguments | EvaluatorArguments

#: Maximum size of a record [bytes]. Its largest part is a silo's message log.
MOST_BYTES = 1 << 30
#: Maximum number of files of a process: for a host of 1,024 silos, the log of each silo and a few tensors.
_MOST_FILES = 1 << 14
#: Maximum length of a process's error message [characters].
_LONGEST_ERROR = 4000
_PRIVATE_KEY = re.compile(r"keys/([^/]+)\.key")
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"

_Text = Annotated[str, Field(min_length=1, max_length=4096)]


class _Record(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, ser_json_bytes="base64", val_json_bytes="base64"
    )


class PeerFile(_Record):
    """A file of a process, by its path in the run folder or in the process's own folder."""

    # No part begins with a dot, so the path is relative and cannot lead out of a folder.
    path: Annotated[str, Field(pattern=rf"^{_PART}(/{_PART}){{0,7}}$")]
    content: bytes


class PeerFiles(_Record):
    """Files that are sent to a process."""

    files: Annotated[tuple[PeerFile, ...], Field(max_length=_MOST_FILES)] = ()


class Ended(_Record):
    """What a process returns at its end."""

    code: Annotated[int, Field(ge=0, le=255, description="exit code")]
    error: Annotated[str, Field(max_length=_LONGEST_ERROR, description="its error; empty without one")] = ""
    files: Annotated[
        tuple[PeerFile, ...],
        Field(max_length=_MOST_FILES, description="what it wrote, unless it wrote into the run folder itself"),
    ] = ()


class PeerTask(_Record):
    """The arguments with which a process runs, except for its keys."""

    program: Literal["silo", "host", "evaluator"]
    names: Annotated[tuple[Name, ...], Field(min_length=1, max_length=1024, description="silos, or the evaluator")]
    file: Path
    scenario: Scenario
    run: _Text
    pooled: bool
    personal_only: bool
    connect: _Text
    out: Path
    device: _Text
    data: Path | None
    logs: LogOptions | None
    most: Annotated[int, Field(ge=1)] = 1
    index: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _same_run(self) -> PeerTask:
        if name_of(self.scenario.model_dump(mode="json")) != self.run:
            raise ValueError("the scenario is not that of the run")
        return self

    @classmethod
    def of(cls, arguments: PeerArguments, *, gpu: bool) -> PeerTask:
        """The task of a process; with ``gpu`` it can use only the GPU that the engine assigns to it."""
        first = _first(arguments)
        # Sites with their own data launch their silos themselves.
        assert first.site is None  # noqa: S101
        run, logs = first.run, first.logs
        if logs is not None and logs.file is not None:
            logs = replace(logs, file=logs.file.absolute())
        host = {"most": arguments.most, "index": arguments.index} if isinstance(arguments, HostArguments) else {}
        return cls(
            program="host" if host else "evaluator" if isinstance(first, EvaluatorArguments) else "silo",
            names=names_of(arguments),
            file=run.source.file.absolute(),
            scenario=run.scenario,
            run=run.id,
            pooled=run.pooled,
            personal_only=run.personal_only,
            connect=first.connect,
            out=first.out.absolute(),
            device="cuda:0" if gpu else "cpu",
            data=None if first.data is None else first.data.absolute(),
            logs=logs,
            **host,
        )

    def arguments(self, keys: Path, out: Path) -> PeerArguments:
        """The arguments on the machine where the process was placed; ``out`` is the run folder, or one in its place."""
        source = Source(self.file, self.scenario)
        run = ResolvedRun(source, self.scenario, self.run, self.pooled, self.personal_only)
        data = self.data if self.data is not None and self.data.is_dir() else None
        if self.program == "evaluator":
            return EvaluatorArguments(run, self.connect, keys, out, self.device, data, logs=self.logs)
        silo = SiloArguments(run, self.names[0], self.connect, keys, out, self.device, data, logs=self.logs)
        return silo if self.program == "silo" else HostArguments(self.names, silo, self.most, self.index)


_SomeRecord = TypeVar("_SomeRecord", PeerFiles, PeerTask, Ended)


def encode(record: PeerFiles | PeerTask | Ended) -> bytes:
    """A record as JSON."""
    return record.model_dump_json().encode()


def decode(schema: type[_SomeRecord], text: bytes, place: str) -> _SomeRecord:
    """Check a record, JSON of another machine.

    Raises:
        InputError: it is too large or not JSON, or a field is not allowed; names ``place``, its name or origin.
    """
    allowed = f"a record of fedmq ({schema.__name__}), from the same version on all machines"
    if len(text) > MOST_BYTES:
        raise InputError(place, f"{len(text):,} bytes", f"at most {MOST_BYTES:,} bytes")
    try:
        return schema.model_validate_json(text)
    except ValidationError as error:
        raise refusal(place, error, allowed) from None


def _first(arguments: PeerArguments) -> SiloArguments | EvaluatorArguments:
    return arguments.silo if isinstance(arguments, HostArguments) else arguments


def names_of(arguments: PeerArguments) -> tuple[str, ...]:
    """The silos of a process, or the evaluator."""
    match arguments:
        case HostArguments():
            return arguments.names
        case SiloArguments():
            return (arguments.name,)
        case EvaluatorArguments():
            return (EVALUATOR,)


def key_files(arguments: PeerArguments) -> tuple[PeerFile, ...]:
    """The key files of a process, below ``keys/``: its own, those of the silos it hosts, and accepted public keys."""
    names, keys = names_of(arguments), _first(arguments).keys
    paths = (*(f"accepted/{name}.pub" for name in (COORDINATOR, *names)), *(f"{name}.key" for name in names))
    return tuple(PeerFile(path=f"keys/{path}", content=(keys / path).read_bytes()) for path in paths)


def split_keys(files: Iterable[PeerFile]) -> tuple[dict[str, bytes], tuple[PeerFile, ...]]:
    """The private keys among the files of a process, by name, and the other files."""
    private: dict[str, bytes] = {}
    others = []
    for file in files:
        match = _PRIVATE_KEY.fullmatch(file.path)
        if match is None:
            others.append(file)
        else:
            private[match[1]] = file.content
    return private, tuple(others)


def take_keys(folder: Path) -> dict[str, bytes]:
    """Read the private keys of a process, by name, and remove their files: a process that is killed leaves no key.

    Raises:
        InputError: a file cannot be read or removed, or is not a regular file.
    """
    taken = {}
    for name in private_names(folder):
        path = folder / f"{name}.key"
        taken[name] = read_regular(path, "a readable key file", MOST_BYTES, links=False)
        with writing(path):
            path.unlink()
    return taken


def earlier_files(arguments: PeerArguments) -> tuple[PeerFile, ...]:
    """What a process wrote before the run was resumed, below ``run/``, for a machine without the run folder."""
    files = written_files(_first(arguments).out, names_of(arguments))
    return tuple(PeerFile(path=f"run/{file.path}", content=file.content) for file in files)


def write_private(folder: Path, files: Iterable[PeerFile]) -> None:
    """Write files that only this user can read, into folders that only this user can open."""
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(file.content)


def _own(names: Sequence[str]) -> re.Pattern[str]:
    """Paths in a run folder that these silos, or the evaluator, write: logs, tracebacks and personal states."""
    name = "|".join(map(re.escape, names))
    return re.compile(rf"messages/({name})\.jsonl|errors/({name})\.log|checkpoints/silos/({name})/{_PART}")


def written_files(out: Path, names: Sequence[str]) -> tuple[PeerFile, ...]:
    """What these silos, or the evaluator, wrote into a run folder."""
    folder = RunFolder(out)
    paths = [path for name in names for path in (folder.messages(name), folder.errors(name))]
    paths += [path for name in names for path in sorted(folder.silo_state(name).glob("*"))]
    found = [(str(path.relative_to(out)), path) for path in paths if path.is_file()]
    allowed = _own(names)
    return tuple(PeerFile(path=path, content=at.read_bytes()) for path, at in found if allowed.fullmatch(path))


def store_files(out: Path, names: Sequence[str], files: Sequence[PeerFile], place: str) -> None:
    """Store what a machine returned of these silos, or of the evaluator; nothing if one of the files is refused.

    Raises:
        InputError: a path is not one that they may write, or leads out of the run folder through a link.
        DiskError: the disk is full or broken.
    """
    allowed, root = _own(names), out.resolve()
    for file in files:
        if allowed.fullmatch(file.path) is None:
            raise InputError(f"{place}: files", file.path, f"the log or the personal state of {', '.join(names[:3])}")
        if not (out / file.path).parent.resolve().is_relative_to(root):
            raise InputError(f"{place}: files", file.path, "a path without links out of the run folder")
    for file in files:
        write_bytes(out / file.path, file.content)


#: Exit code of a process whose machine died, or that was killed.
DIED = 137
#: Exit codes of a process that refused its input, and of one that failed in another way.
_REFUSED, _FAILED = 2, 1
#: Environment of a process: one thread each, and few arenas of the C library, as on the coordinator's machine.
ENVIRONMENT: Mapping[str, str] = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MALLOC_ARENA_MAX": "2",
}
#: Time to wait for the end of a process that was killed [s].
_JOIN_SECONDS = 10.0


class RemoteProcess(ABC):
    """A process on a machine of a cluster; its methods are those of :class:`multiprocessing.Process`."""

    def __init__(self, name: str, silos: Sequence[str], folder: RunFolder) -> None:
        self.name = name
        self.silos = silos  # the names under which it writes: those of its silos, or the evaluator's
        self.folder = folder  # the run folder, into which its files are fetched
        self._code: int | None = None

    @abstractmethod
    def poll(self) -> int | None:
        """The exit code, None while it waits for a place or runs."""

    def terminate(self) -> None:  # noqa: B027 - not for subclasses
        """Do nothing: the coordinator's stop reaches all that have joined; the others are killed later."""

    @abstractmethod
    def kill(self) -> None:
        """End it immediately."""

    @property
    def exitcode(self) -> int | None:
        """0, 2 if it refused its input, another number if it or its machine died; None while it waits or runs."""
        if self._code is None:
            self._code = self.poll()
        return self._code

    def is_alive(self) -> bool:
        """Whether it waits for a place or runs."""
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most ``timeout`` [s]."""
        until = time.monotonic() + (_JOIN_SECONDS if timeout is None else timeout)
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.05)

    def say(self, text: str) -> None:
        """Print a line about this process to standard error; standard output is for the result of the command."""
        print_line(f"{self.name}: {printable(text)}", error=True)

    def collect(self, result: Callable[[], object]) -> int:
        """Check the :class:`Ended` of a process, store its files and print its error; returns the exit code.

        Raises:
            DiskError: a file cannot be stored.
        """
        place = f"result of {self.name}"
        try:
            fetched = result()
            if not isinstance(fetched, bytes):
                raise InputError(place, type(fetched).__name__, "bytes")
            ended = decode(Ended, fetched, place)
            store_files(self.folder.root, self.silos, ended.files, place)
        except InputError as error:
            self.say(str(error))
            return _FAILED
        if ended.error:
            self.say(ended.error)
        return ended.code


class Cluster(ABC):
    """Machines on which an existing engine places processes."""

    bind: str  # the address at which the coordinator listens, so that these machines reach it

    @abstractmethod
    def start(self, name: str, arguments: PeerArguments) -> RemoteProcess:
        """Start a silo, a host or the evaluator where it finds a place."""


def run_peer(task: bytes, place: Path, private: Mapping[str, bytes]) -> Ended:
    """Run a :class:`PeerTask` on the machine that it was placed on.

    It writes into the run folder if this machine has it, otherwise below ``place``, its own folder, which has the
    public keys in ``keys/``. Its private keys are only in memory, so a process that is killed leaves none.
    """
    try:
        given = decode(PeerTask, task, "task of this process")
        identities = {name: _identity(name, private, place) for name in given.names}
    except InputError as refused:
        return Ended(code=_REFUSED, error=str(refused)[:_LONGEST_ERROR])
    shared = RunFolder(given.out).scenario.is_file()
    out = given.out if shared else place / "run"
    code, error = _run(given.arguments(place / "keys", out), identities)
    files = () if shared else written_files(out, given.names)
    return Ended(code=code, error=error[:_LONGEST_ERROR], files=files)


def _identity(name: str, private: Mapping[str, bytes], place: Path) -> Identity:
    path = place / "keys" / f"{name}.key"
    if name not in private:
        raise InputError(str(path), "no such key", "the private key that the command created for this process")
    return identity_of(name, private[name], path)


def _run(arguments: PeerArguments, identities: Mapping[str, Identity]) -> tuple[int, str]:
    """Run a program; returns its exit code and its error."""
    try:
        match arguments:
            case EvaluatorArguments():
                run_evaluator(arguments, identity=identities[EVALUATOR])
            case SiloArguments():
                run_silo(arguments, identity=identities[arguments.name])
            case HostArguments():
                run_host(arguments, identities=identities)
    except FedmqError as error:
        return _REFUSED if isinstance(error, InputError) else _FAILED, str(error)
    except Exception as error:
        print_line(traceback.format_exc(), error=True)
        return _FAILED, f"{type(error).__name__}: {error}"
    return 0, ""


def refuse_local_only(scenario: Scenario) -> None:
    """Refuse on a cluster what only works on one machine: shared memory, and the fault ``freeze``.

    Raises:
        InputError: the scenario has one of them, and a launcher of several machines.
    """
    if scenario.launcher not in ("ray", "slurm"):
        return
    if scenario.wire.transport == "shm":
        allowed = f"ipc with launcher {scenario.launcher}, whose processes are on several machines"
        raise InputError("wire.transport", "shm", allowed)
    if any(isinstance(fault, Freeze) for fault in scenario.faults):
        allowed = f"no freeze with launcher {scenario.launcher}, which cannot pause a process"
        raise InputError("faults", "freeze", allowed)
