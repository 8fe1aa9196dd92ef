"""``launcher: ray``: silos and the evaluator as processes on the machines of a Ray cluster.

Ray places and restarts processes; messages do not pass through it. They are sealed and go to the coordinator's socket,
as from everywhere. The coordinator runs beside the command, which keeps the run folder.

Ray's own channel carries to each process its arguments and its private key, which is made for this run only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedmq.config.faults import Freeze
from fedmq.config.scenario import Scenario
from fedmq.errors import FedmqError, InputError
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.extras import package
from fedmq.launch.process_group import PeerArguments
from fedmq.storage.run_folder import RunFolder
from fedmq.text import print_line
from fedmq.wire.messages import COORDINATOR, EVALUATOR
from silos.host import HostArguments, run_host
from silos.program import SiloArguments, run_silo

#: Exit codes of a process: it refused its input, failed in another way, or its machine died.
_REFUSED, _FAILED, _DIED = 2, 1, 137
#: Time to wait for a cluster's machine [s].
_CONNECT_SECONDS = 5.0
#: Parts of a run folder that a silo or the evaluator writes.
_WRITTEN = ("messages", "silos")


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


def run_peer(arguments: PeerArguments, keys: Mapping[str, bytes]) -> Ended:
    """Run a silo, a host or the evaluator on the machine that it was placed on.

    It writes into the run folder if this machine has it, otherwise into a temporary folder.

    Args:
        arguments: as for a process of the coordinator's machine.
        keys: the key files that it needs, by path in the folder of keys.
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
                    run_evaluator(replace(arguments, keys=folder, out=out, data=data))
                case SiloArguments():
                    run_silo(replace(arguments, keys=folder, out=out, data=data))
                case HostArguments():
                    run_host(replace(arguments, silo=replace(arguments.silo, keys=folder, out=out, data=data)))
        except FedmqError as error:
            code = _REFUSED if isinstance(error, InputError) else _FAILED
            return Ended(code, str(error), {} if shared else _files(out))
        return Ended(0, "", {} if shared else _files(out))


def _files(out: Path) -> dict[str, bytes]:
    paths = (path for part in _WRITTEN for path in (out / part).rglob("*"))
    return {str(path.relative_to(out)): path.read_bytes() for path in paths if path.is_file()}


class RayProcess:
    """A process of the cluster; see :class:`fedmq.launch.process_group.RemoteProcess`."""

    def __init__(self, ray: Any, reference: Any, name: str, folder: RunFolder) -> None:
        self.name = name
        self._ray, self._reference, self._folder = ray, reference, folder
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """See the interface."""
        if self._code is None and self._ray.wait([self._reference], timeout=0)[0]:
            self._code = self._ended()
        return self._code

    def _ended(self) -> int:
        try:
            ended: Ended = self._ray.get(self._reference)
        except self._ray.exceptions.RayError as error:
            print_line(f"{self.name}: {type(error).__name__}", error=True)
            return _DIED
        if ended.error:
            print_line(f"{self.name}: {ended.error}", error=True)
        for path, content in ended.files.items():
            target = self._folder.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        return ended.code

    def is_alive(self) -> bool:
        """See the interface."""
        return self.exitcode is None

    def terminate(self) -> None:
        """See the interface: the coordinator's stop reaches all that have joined; the others are killed later."""

    def kill(self) -> None:
        """See the interface."""
        self._ray.cancel(self._reference, force=True)

    def join(self, timeout: float | None = None) -> None:
        """See the interface."""
        until = time.monotonic() + (10.0 if timeout is None else timeout)
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.05)


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster; see :class:`fedmq.launch.process_group.Cluster`.

    Args:
        ray: the package.
        bind: where the coordinator listens.
        folder: the run folder.
        options: of each process for Ray: cores, GPUs, memory, environment.
    """

    ray: Any
    bind: str
    folder: RunFolder
    options: Mapping[str, Any]

    @classmethod
    @contextlib.contextmanager
    def connected(cls, scenario: Scenario, folder: RunFolder) -> Iterator[RayCluster]:
        """Connect to the cluster that ``RAY_ADDRESS`` names, or to the one that this machine belongs to.

        Raises:
            InputError: Ray is not installed, there is no cluster, it is too small, or the scenario has faults that
                cannot be carried out there.
        """
        ray = package("ray", "ray", "launcher ray")
        if any(isinstance(fault, Freeze) for fault in scenario.faults):
            raise InputError("faults", "freeze", "no freeze with launcher ray, which cannot pause a process")
        fresh = not ray.is_initialized()
        if fresh:
            _connect(ray, os.environ.get("RAY_ADDRESS", "auto"))
        try:
            _check_room(scenario, ray.cluster_resources())
            address = ray.util.get_node_ip_address()
            # Ray prints what happens to its nodes; standard output is for the result of the command.
            with contextlib.redirect_stdout(sys.stderr):
                yield cls(ray, f"tcp://{address}:*", folder, _options(scenario))
        finally:
            if fresh:
                ray.shutdown()

    def start(self, name: str, arguments: PeerArguments) -> RayProcess:
        """See the interface."""
        task = self.ray.remote(run_peer).options(name=f"fedmq {name}", **self.options)
        keys = _keys_of(arguments)
        return RayProcess(self.ray, task.remote(_on_a_node(arguments, self.options), keys), name, self.folder)


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster.

    Raises:
        InputError: there is none.
    """
    host, separator, port = address.rpartition(":")
    try:
        if separator and port.isdecimal():
            # Ray itself tries for minutes.
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except OSError as error:
        found = f"{address}: {str(error).splitlines()[0]}"
        allowed = "a running cluster: `ray start --head` on one machine, `ray start --address HOST:6379` on the others"
        raise InputError("launcher ray", found, f"{allowed}; RAY_ADDRESS names another one") from None


def _on_a_node(arguments: PeerArguments, options: Mapping[str, Any]) -> PeerArguments:
    """The arguments for a machine where Ray shows a process only the GPUs that it was given."""
    device = "cuda:0" if options["num_gpus"] else "cpu"
    if isinstance(arguments, HostArguments):
        return replace(arguments, silo=replace(arguments.silo, device=device))
    return replace(arguments, device=device)


def _keys_of(arguments: PeerArguments) -> dict[str, bytes]:
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


def _options(scenario: Scenario) -> dict[str, Any]:
    needs = scenario.silos.needs
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {**dict.fromkeys(threads, "1"), "MALLOC_ARENA_MAX": "2"}
    return {
        "num_cpus": needs.cpus,
        "num_gpus": needs.gpus,
        "memory": None if needs.memory_gb is None else int(needs.memory_gb * 1e9),
        "scheduling_strategy": "SPREAD",
        # The supervisor restarts what dies, with its own limit.
        "max_retries": 0,
        "runtime_env": {"env_vars": environment},
    }


def _check_room(scenario: Scenario, resources: Mapping[str, float]) -> None:
    """Refuse a cluster on which the processes could never run at the same time.

    Raises:
        InputError: its cores, GPUs or memory do not suffice for all of them.
    """
    needs, count = scenario.silos.needs, scenario.silos.hosts or scenario.silos.count
    wanted = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": (needs.memory_gb or 0.0) * 1e9}
    keys = {"CPU": "cpus", "GPU": "gpus", "memory": "memory_gb"}
    for resource, each in wanted.items():
        # The evaluator is one more.
        if each * (count + 1) > resources.get(resource, 0.0) + 1e-6:
            here = resources.get(resource, 0.0)
            found = f"{each * (count + 1):g} {resource} for {count} silo processes and the evaluator"
            allowed = (
                f"at most {here:g}, all that the cluster has; lower it, or let silos share processes (silos.hosts)"
            )
            raise InputError(f"silos.needs.{keys[resource]}", found, allowed)
