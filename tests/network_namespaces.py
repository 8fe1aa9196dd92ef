"""Network namespaces joined by virtual Ethernet pairs and a bridge: each process sees only its own network."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence

#: Subnet of the bridge, from the range for benchmarks of network devices (RFC 2544).
SUBNET = "198.18.77"


def available() -> bool:
    """Whether this process may create network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"fq{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Network:
    """The namespaces of some machines.

    Args:
        machines: their names; the first one has the address ``SUBNET.1``.
    """

    def __init__(self, machines: Sequence[str]) -> None:
        self._number = {machine: place for place, machine in enumerate(machines, 1)}
        self._id = f"fq{os.getpid() % 10_000}"
        self._switch = f"{self._id}s"

    def address(self, machine: str) -> str:
        """A machine's address."""
        return f"{SUBNET}.{self._number[machine]}"

    def command(self, machine: str) -> tuple[str, ...]:
        """The words before a command that run it on a machine."""
        return ("ip", "netns", "exec", f"{self._id}n{self._number[machine]}")

    def set_link(self, machine: str, *, up: bool) -> None:
        """Cut or restore a machine's only link."""
        _ip("-n", self._switch, "link", "set", f"v{self._number[machine]}", "up" if up else "down")

    def cut(self, machine: str, seconds: float) -> None:
        """Cut a machine's link for a while."""
        self.set_link(machine, up=False)
        time.sleep(seconds)
        self.set_link(machine, up=True)

    def move(self, machine: str) -> None:
        """Give a machine another address; its connections from the old one break."""
        number = self._number[machine]
        space, new = f"{self._id}n{number}", number + len(self._number)
        _ip("-n", space, "address", "delete", f"{SUBNET}.{number}/24", "dev", "eth0")
        _ip("-n", space, "address", "add", f"{SUBNET}.{new}/24", "dev", "eth0")

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """The network exists while the block runs."""
        # The bridge has a namespace of its own, where this machine's firewall (Docker's, say) does not filter.
        _ip("netns", "add", self._switch)
        try:
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for number in self._number.values():
                space, outer = f"{self._id}n{number}", f"v{number}"
                _ip("netns", "add", space)
                _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", outer, "netns", self._switch)
                _ip("-n", self._switch, "link", "set", outer, "master", "bridge", "up")
                _ip("-n", space, "address", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
                _ip("-n", space, "link", "set", "lo", "up")
            yield
        finally:
            for space in (*(f"{self._id}n{number}" for number in self._number.values()), self._switch):
                subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)
