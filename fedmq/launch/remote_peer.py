"""What the launchers of clusters have in common: silos, hosts and the evaluator as processes on other machines.

Messages do not pass through a cluster's engine: they are sealed and go to the coordinator's socket, as from everywhere.
The coordinator runs on the machine of the command, which has the run folder. The engine itself passes to each process
its arguments and its private key, which is made for this run only.
"""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from fedmq.config.faults import Freeze
from fedmq.config.scenario import Scenario
from fedmq.errors import FedmqError, InputError
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.storage.run_folder import RunFolder
from fedmq.text import print_line
from fedmq.wire.messages import COORDINATOR, EVALUATOR
from silos.host import HostArguments, run_host
from silos.program import SiloArguments, run_silo

#: Arguments of a silo, a host or the evaluator.
PeerArguments = SiloArguments | HostArguments | EvaluatorArguments

#: Exit code of a process whose machine died, or that was killed.
DIED = 137
#: Exit codes of a process that refused its input, or failed in another way.
_REFUSED, _FAILED = 2, 1
#: Environment of a process: one thread each, and few arenas of the C library, as on the coordinator's machine.
ENVIRONMENT: Mapping[str, str] = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MALLOC_ARENA_MAX": "2",
}
#: Parts of a run folder that a silo or the evaluator writes.
_WRITTEN = ("messages", "silos")
#: Time to wait for the end of a process that was killed [s].
_JOIN_SECONDS = 10.0


class RemoteProcess(ABC):
    """A process on a machine of a cluster; its methods are those of :class:`multiprocessing.Process`.

    Args:
        name: the name that it was started with.
        folder: the run folder, into which its files are fetched.
    """

    def __init__(self, name: str, folder: RunFolder) -> None:
        self.name = name
        self.folder = folder
        self._code: int | None = None

    @abstractmethod
    def poll(self) -> int | None:
        """The exit code, None while it waits for a place or runs."""

    @abstractmethod
    def terminate(self) -> None:
        """End it unless it has joined the run, which the coordinator ends."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

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
        print_line(f"{self.name}: {text}", error=True)

    def collect(self, ended: Ended) -> int:
        """Print the error of a process that has ended and store its files; returns its exit code."""
        if ended.error:
            self.say(ended.error)
        for path, content in ended.files.items():
            target = self.folder.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return ended.code


class Cluster(Protocol):
    """Machines on which an existing engine places processes."""

    @property
    def bind(self) -> str:
        """Where the coordinator listens, so that these machines reach it."""

    def start(self, name: str, arguments: PeerArguments) -> RemoteProcess:
        """Start a silo, a host or the evaluator where it finds a place."""


@dataclass(frozen=True)
class Ended:
    """What a process returns at its end.

    Args:
        code: exit code.
        error: its error in one line; empty without one.
        files: what it wrote, by path in the run folder, if it did not write into the run folder itself.
    """

    code: int
    error: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


def run_peer(arguments: PeerArguments, keys: Mapping[str, bytes], joined: Callable[[], None] = lambda: None) -> Ended:
    """Run a silo, a host or the evaluator on the machine that it was placed on.

    It writes into the run folder if this machine has it, otherwise into a temporary folder.

    Args:
        arguments: as for a process of the coordinator's machine.
        keys: the key files that it needs, by path in the folder of keys.
        joined: called when it has joined the run and the coordinator can end it.
    """
    with tempfile.TemporaryDirectory(prefix="fedmq-peer-") as name:
        folder = Path(name) / "keys"
        for path, content in keys.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).touch(mode=0o600)
            (folder / path).write_bytes(content)
        first = arguments.silo if isinstance(arguments, HostArguments) else arguments
        shared = RunFolder(first.out).scenario.is_file()
        out = first.out if shared else Path(name) / "run"
        data = first.data if first.data is not None and first.data.is_dir() else None
        try:
            match arguments:
                case EvaluatorArguments():
                    run_evaluator(replace(arguments, keys=folder, out=out, data=data), measured=joined)
                case SiloArguments():
                    run_silo(replace(arguments, keys=folder, out=out, data=data), joined=joined)
                case HostArguments():
                    silo = replace(arguments.silo, keys=folder, out=out, data=data)
                    run_host(replace(arguments, silo=silo), joined=joined)
        except FedmqError as error:
            code = _REFUSED if isinstance(error, InputError) else _FAILED
            return Ended(code, str(error), {} if shared else _files(out))
        return Ended(0, "", {} if shared else _files(out))


def _files(out: Path) -> dict[str, bytes]:
    paths = (path for part in _WRITTEN for path in (out / part).rglob("*"))
    return {str(path.relative_to(out)): path.read_bytes() for path in paths if path.is_file()}


def on_device(arguments: PeerArguments, *, gpu: bool) -> PeerArguments:
    """The arguments for a machine whose engine shows a process only the GPUs that it was given.

    Args:
        arguments: as for a process of the coordinator's machine.
        gpu: whether it was given one.
    """
    device = "cuda:0" if gpu else "cpu"
    if isinstance(arguments, HostArguments):
        return replace(arguments, silo=replace(arguments.silo, device=device))
    return replace(arguments, device=device)


def keys_of(arguments: PeerArguments) -> dict[str, bytes]:
    """The key files of a process: its own, those of the silos it hosts, and the accepted public keys."""
    names: tuple[str, ...]
    match arguments:
        case EvaluatorArguments():
            folder, names = arguments.keys, (EVALUATOR,)
        case SiloArguments():
            folder, names = arguments.keys, (arguments.name,)
        case HostArguments():
            folder, names = arguments.silo.keys, arguments.names
    public = [f"accepted/{name}.pub" for name in (COORDINATOR, *names)]
    return {path: (folder / path).read_bytes() for path in (*public, *(f"{name}.key" for name in names))}


def refuse_freeze(scenario: Scenario) -> None:
    """Refuse the one fault that cannot be carried out on a cluster.

    Raises:
        InputError: the scenario has it.
    """
    if any(isinstance(fault, Freeze) for fault in scenario.faults):
        allowed = f"no freeze with launcher {scenario.launcher}, which cannot pause a process"
        raise InputError("faults", "freeze", allowed)
