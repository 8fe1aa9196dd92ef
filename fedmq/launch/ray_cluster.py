"""``launcher: ray``: silos and the evaluator as processes on the machines of a Ray cluster.

Ray places and ends processes; see :mod:`fedmq.launch.remote_peer` for what they do. fedmq passes only bytes through Ray
and decodes them itself. This does not protect Ray's machines from each other: Ray's own serialisation can run code.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.launch.forkserver import PEER, private_folder
from fedmq.launch.remote_peer import (
    DIED,
    ENVIRONMENT,
    Cluster,
    PeerArguments,
    PeerFiles,
    PeerTask,
    RemoteProcess,
    decode,
    earlier_files,
    encode,
    key_files,
    run_peer,
    split_keys,
    write_private,
)
from fedmq.packages import package
from fedmq.storage.run_folder import RunFolder

#: Time to wait for a cluster's machine [s].
_CONNECT_SECONDS = 5.0


def run_there(task: bytes, files: bytes) -> bytes:
    """Run a task on a machine of the cluster, with its keys and what it wrote into the run folder before."""
    private, others = split_keys(decode(PeerFiles, files, "files of this process").files)
    with private_folder(PEER) as place:
        write_private(place, others)
        return encode(run_peer(task, place, private))


class RayProcess(RemoteProcess):
    """A process of the cluster."""

    def __init__(self, ray: Any, reference: Any, name: str, task: PeerTask, folder: RunFolder) -> None:
        super().__init__(name, task.names, folder)
        self._ray, self._reference = ray, reference

    @override
    def poll(self) -> int | None:
        if not self._ray.wait([self._reference], timeout=0)[0]:
            return None
        try:
            return self.collect(lambda: self._ray.get(self._reference))
        except self._ray.exceptions.RayError as error:
            self.say(type(error).__name__)
            return DIED

    @override
    def kill(self) -> None:
        self._ray.cancel(self._reference, force=True)


@dataclass(frozen=True)
class RayCluster(Cluster):
    """A Ray cluster."""

    ray: Any
    bind: str  # URI at which the coordinator listens
    folder: RunFolder
    options: Mapping[str, Any]  # Ray's options for each process: cores, GPUs, memory, environment

    @classmethod
    @contextlib.contextmanager
    def connected(cls, scenario: Scenario, folder: RunFolder) -> Iterator[RayCluster]:
        """Connect to the cluster that ``RAY_ADDRESS`` names, or to the one that this machine belongs to.

        Raises:
            InputError: Ray is not installed, there is no cluster, or it is too small.
        """
        ray = package("ray", "ray", "launcher ray")
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

    @override
    def start(self, name: str, arguments: PeerArguments) -> RayProcess:
        task = PeerTask.of(arguments, gpu=self.options["num_gpus"] > 0)
        remote = self.ray.remote(run_there).options(name=f"fedmq {name}", **self.options)
        files = PeerFiles(files=(*key_files(arguments), *earlier_files(arguments)))
        reference = remote.remote(encode(task), encode(files))
        return RayProcess(self.ray, reference, name, task, self.folder)


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster, if there is one."""
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


def _options(scenario: Scenario) -> dict[str, object]:
    needs = scenario.silos.needs
    return {
        "num_cpus": needs.cpus,
        "num_gpus": needs.gpus,
        "memory": None if needs.memory_gb is None else int(needs.memory_gb * 1e9),
        "scheduling_strategy": "SPREAD",
        # The supervisor restarts what dies, with its own limit.
        "max_retries": 0,
        "runtime_env": {"env_vars": dict(ENVIRONMENT)},
    }


def _check_room(scenario: Scenario, resources: Mapping[str, float]) -> None:
    """Refuse a cluster on which the processes could never run at the same time."""
    needs, count = scenario.silos.needs, scenario.silos.hosts or len(scenario.silo_names)
    wanted = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": (needs.memory_gb or 0.0) * 1e9}
    keys = {"CPU": "cpus", "GPU": "gpus", "memory": "memory_gb"}
    for resource, each in wanted.items():
        # One more for the evaluator.
        if each * (count + 1) > resources.get(resource, 0.0) + 1e-6:
            here = resources.get(resource, 0.0)
            found = f"{each * (count + 1):g} {resource} for {count} silo processes and the evaluator"
            allowed = (
                f"at most {here:g}, all that the cluster has; lower it, or let silos share processes (silos.hosts)"
            )
            raise InputError(f"silos.needs.{keys[resource]}", found, allowed)
