"""Silos whose data do not fit together: which of them is refused, decided by how many silos each fits with.

The silos are not compared with the first one to state its data, since that one may be wrong. If two silos do not fit
together, the one that fits with fewer silos is refused. If both fit with equally many, they wait for further silos;
once all have stated their data, the later of the two is refused.
"""

from __future__ import annotations

from fedmq.federation.agreement import difference
from fedmq.wire.payloads import DataFormat


class Disputes:
    """The formats that silos have stated, and which of them do not fit together.

    Attributes:
        formats: each silo's format, in the order in which they were stated.
    """

    def __init__(self) -> None:
        self.formats: dict[str, DataFormat] = {}
        self._against: dict[str, set[str]] = {}

    def state(self, name: str, held: DataFormat) -> None:
        """A silo states its data, for the first time or again."""
        self.withdraw(name)
        others = {other for other, format_ in self.formats.items() if difference(name, held, other, format_)}
        self.formats[name], self._against[name] = held, others
        for other in others:
            self._against[other].add(name)

    def withdraw(self, name: str) -> None:
        """Forget what a silo stated."""
        self.formats.pop(name, None)
        for other in self._against.pop(name, ()):
            self._against[other].discard(name)

    @property
    def open(self) -> str:
        """How two silos that wait for further ones differ; empty if all fit together."""
        for name, others in self._against.items():
            for other in sorted(others):
                return self._difference(name, other)
        return ""

    def _difference(self, name: str, other: str) -> str:
        return difference(name, self.formats[name], other, self.formats[other]) or ""

    def refused(self, *, complete: bool) -> dict[str, str]:
        """The silos to refuse, with the line for their operators.

        Args:
            complete: whether all silos of the run have stated their data.
        """
        found = dict[str, str]()
        for name, others in self._against.items():
            better = [other for other in others if len(self._against[other]) < len(self._against[name])]
            if better:
                found[name] = self._outvoted(name, min(better, key=lambda other: (len(self._against[other]), other)))
        if complete and not found:
            order = list(self.formats)
            for name, others in self._against.items():
                earlier = [other for other in others if order.index(other) < order.index(name)]
                if earlier:
                    found[name] = self._undecided(name, min(earlier, key=order.index))
        return found

    def _outvoted(self, name: str, other: str) -> str:
        silos = len(self.formats)
        fits = [silos - len(self._against[each]) - 1 for each in (name, other)]
        return (
            f"{self._difference(name, other)}; {name} fits with {fits[0]} of the other silos that have stated their "
            f"data, {other} with {fits[1]}. Correct the data of {name} and start it again; if {other} is wrong, "
            "correct the data of the silos that agree with it, and start them again"
        )

    def _undecided(self, name: str, other: str) -> str:
        return (
            f"{self._difference(name, other)}, and no other silo shows which of them is wrong. If it is {name}, "
            f"correct its data and start it again; if it is {other}, which stated its data first, stop {other}, "
            f"correct its data, and start both again"
        )
