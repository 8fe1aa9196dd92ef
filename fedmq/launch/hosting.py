"""Decides whether the silos of a run are separate processes or share a few host processes."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from coordinator.file_descriptors import OTHER_DESCRIPTORS
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.wire.transports.shared_connections import MAX_BRANCHES

#: Memory that a silo's process takes, and the other processes of a run [bytes]. Measured: 35 to 55 MB on features.
_SILO_MEMORY, _OTHER_MEMORY = 60 << 20, 1 << 30
#: File descriptors that the command keeps per process it started.
_DESCRIPTORS = 2
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limits:
    """What this machine grants the processes of a run.

    Args:
        memory: available memory [bytes].
        descriptors: maximum number of open files of a process.
    """

    memory: float
    descriptors: float


def limits_here() -> Limits:
    """The limits of this machine and of the control group that this process is in."""
    memory = float(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
        used = int((_CGROUP / "memory.current").read_text())
        memory = min(memory, float(int((_CGROUP / "memory.max").read_text()) - used))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(memory, float("inf") if most == resource.RLIM_INFINITY else float(most))


def allow_descriptors() -> None:
    """Raise this process's limit of open files to the most that it may have; its children inherit it."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass(frozen=True)
class Hosting:
    """Assignment of silos to processes.

    Args:
        hosts: the silos of each host; empty if each silo is a separate process.
        reason: why they share processes, as a line for the user; empty if the scenario asks for it, or they do not.
    """

    hosts: tuple[tuple[str, ...], ...] = ()
    reason: str = ""

    @property
    def most(self) -> int:
        """Number of silos of the largest host; 1 without hosts."""
        return max((len(names) for names in self.hosts), default=1)


def plan_hosting(scenario: Scenario, limits: Limits) -> Hosting:
    """Decide which silos of a run share a process on this machine.

    Args:
        scenario: the run's scenario.
        limits: the limits of this machine.

    Raises:
        InputError: so few files may be open that the run cannot start.
    """
    names = scenario.silo_names
    # A host keeps two files of each silo open: its message log, and the log for operators if there is one.
    room = int(min((limits.descriptors - OTHER_DESCRIPTORS) / 2, MAX_BRANCHES))
    if room < 1:
        allowed = f"at least {OTHER_DESCRIPTORS + 16} open files per process: raise the limit with `ulimit -n`"
        raise InputError("open files", int(limits.descriptors), allowed)
    if scenario.silos.hosts is not None:
        return Hosting(_dealt(names, min(scenario.silos.hosts, len(names)), room))
    count = len(names)
    memory, descriptors = count * _SILO_MEMORY + _OTHER_MEMORY, _DESCRIPTORS * count + OTHER_DESCRIPTORS
    if descriptors > limits.descriptors:
        need = f"{descriptors} open files, and {limits.descriptors:.0f} are allowed"
    elif memory > limits.memory:
        need = f"{memory / 2**30:.1f} GiB of memory, and {limits.memory / 2**30:.1f} GiB are available"
    else:
        return Hosting()
    hosts = _dealt(names, min(count, 2 * scenario.slots), room)
    return Hosting(hosts, f"{count} silos share {len(hosts)} host processes: a process for each needs about {need}")


def _dealt(names: tuple[str, ...], count: int, room: int) -> tuple[tuple[str, ...], ...]:
    """Distribute the silos over hosts in turn: at least ``count`` hosts, of at most ``room`` silos each."""
    hosts = max(count, -(-len(names) // room))
    return tuple(names[index::hosts] for index in range(hosts))
