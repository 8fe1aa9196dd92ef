"""What the launchers of clusters have in common: silos, hosts and the evaluator as processes on other machines.

Messages do not pass through a cluster's engine: they are sealed and go to the coordinator's socket, as from any other
machine. The coordinator runs on the machine on which the command was started and which has the run folder. The engine
only passes each process its task and its keys, and returns the files that the process wrote, as the records of
:mod:`fedmq.launch.peer_records`.

The command creates private keys for this run only, and sends them. A process that created its own key would have to
return the public half before the coordinator lets it join, but a Ray task returns nothing before its end. Also, a silo
that is started again on another machine keeps its key, from which ``privacy.noise_from: key`` derives its noise. On its
way, a key is as well protected as the engine's jobs: on Slurm by files that only one user can read, see
:mod:`fedmq.launch.slurm_cluster`; on Ray by the limits on access to the cluster.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedmq.config.faults import Freeze
from fedmq.config.scenario import Scenario
from fedmq.errors import FedmqError, InputError
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.launch.peer_records import Ended, PeerArguments, PeerTask, decode, store_files, written_files
from fedmq.storage.run_folder import RunFolder
from fedmq.text import print_line, printable
from fedmq.wire.keys import Identity, identity_of
from fedmq.wire.messages import EVALUATOR
from silos.host import HostArguments, run_host
from silos.program import SiloArguments, run_silo

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
    """A process on a machine of a cluster; its methods are those of :class:`multiprocessing.Process`.

    Args:
        name: the name with which it was started.
        silos: the names under which it writes: those of its silos, or the evaluator's.
        folder: the run folder, into which its files are fetched.
    """

    def __init__(self, name: str, silos: Sequence[str], folder: RunFolder) -> None:
        self.name = name
        self.silos = silos
        self.folder = folder
        self._code: int | None = None

    @abstractmethod
    def poll(self) -> int | None:
        """The exit code, None while it waits for a place or runs."""

    @abstractmethod
    def terminate(self) -> None:
        """End it unless it has joined the run; the coordinator ends those that have."""

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
        """Check the result of a process that has ended, store its files and print its error.

        Args:
            result: fetches an encoded :class:`fedmq.launch.peer_records.Ended`; raises InputError if it is unreadable.

        Returns:
            The exit code; that of a failure if the result is not allowed.

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
    """Machines on which an existing engine places processes.

    Attributes:
        bind: the address at which the coordinator listens, so that these machines reach it.
    """

    bind: str

    @abstractmethod
    def start(self, name: str, arguments: PeerArguments) -> RemoteProcess:
        """Start a silo, a host or the evaluator where it finds a place."""


def run_peer(
    task: bytes, place: Path, private: Mapping[str, bytes], joined: Callable[[], None] = lambda: None
) -> Ended:
    """Run a silo, a host or the evaluator on the machine that it was placed on.

    It writes into the run folder if this machine has it, otherwise into its own folder.

    Args:
        task: a :class:`fedmq.launch.peer_records.PeerTask`.
        place: the process's own folder, with the public keys that it needs in ``keys/``.
        private: its private keys by name, as PEM. They are only in memory, so a process that is killed leaves none.
        joined: called when it has joined the run and the coordinator can end it.
    """
    try:
        given = decode(PeerTask, task, "task of this process")
        identities = {name: _identity(name, private, place) for name in given.names}
    except InputError as refused:
        return Ended.saying(_REFUSED, str(refused))
    shared = RunFolder(given.out).scenario.is_file()
    out = given.out if shared else place / "run"
    code, error = _run(given.arguments(place / "keys", out), identities, joined)
    return Ended.saying(code, error, () if shared else written_files(out, given.names))


def _identity(name: str, private: Mapping[str, bytes], place: Path) -> Identity:
    path = place / "keys" / f"{name}.key"
    if name not in private:
        raise InputError(str(path), "no such key", "the private key that the command created for this process")
    return identity_of(name, private[name], path)


def _run(arguments: PeerArguments, identities: Mapping[str, Identity], joined: Callable[[], None]) -> tuple[int, str]:
    """Run a program; returns its exit code and its error."""
    try:
        match arguments:
            case EvaluatorArguments():
                run_evaluator(arguments, measured=joined, identity=identities[EVALUATOR])
            case SiloArguments():
                run_silo(arguments, joined=joined, identity=identities[arguments.name])
            case HostArguments():
                run_host(arguments, joined=joined, identities=identities)
    except FedmqError as error:
        return _REFUSED if isinstance(error, InputError) else _FAILED, str(error)
    except Exception as error:
        print_line(traceback.format_exc(), error=True)
        return _FAILED, f"{type(error).__name__}: {error}"
    return 0, ""


def refuse_freeze(scenario: Scenario) -> None:
    """Refuse the only fault that cannot be carried out on a cluster.

    Raises:
        InputError: the scenario has it.
    """
    if any(isinstance(fault, Freeze) for fault in scenario.faults):
        allowed = f"no freeze with launcher {scenario.launcher}, which cannot pause a process"
        raise InputError("faults", "freeze", allowed)
