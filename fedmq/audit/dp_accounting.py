"""What the noise on a silo's updates guarantees it: the epsilon of all that its logs say it sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedmq.audit.log_checks import Audit
from fedmq.config.loader import load
from fedmq.config.scenario import Privacy
from fedmq.errors import InputError
from fedmq.federation.update_transforms import TRANSFORMED
from fedmq.storage.run_folder import RunFolder
from fedmq.text import printable
from fedmq.wire.messages import COORDINATOR, EVALUATOR


@dataclass(frozen=True)
class Spent:
    """The guarantee of one silo.

    Args:
        updates: different updates that left it; the same one again says nothing new.
        epsilon: of all of them together.
        beside: kinds of payloads that left it without noise, of which epsilon does not speak.
    """

    updates: int
    epsilon: float
    beside: tuple[str, ...]


@dataclass(frozen=True)
class Accounts:
    """The guarantees of a run.

    Args:
        delta: the chance with which epsilon may be exceeded.
        privacy: the scenario's noise.
        silos: by name.
    """

    delta: float
    privacy: Privacy
    silos: Mapping[str, Spent]

    def to_plain(self) -> dict[str, Any]:
        """As JSON-serialisable data."""
        return {
            "delta": self.delta,
            "noise_multiplier": self.privacy.noise_multiplier,
            "noise_from": self.privacy.noise_from,
            "silos": {name: asdict(spent) for name, spent in self.silos.items()},
        }


def account(run: Path, audit: Audit, delta: float) -> Accounts:
    """Epsilon of every silo's updates together, at a delta.

    Balle and Wang 2018, Theorem 8, for one update, and Dong et al. 2022, Corollary 3.3, for all: updates, each chosen
    in sight of those before, are as one with noise less by the root of their number. Two runs are neighbours when one
    silo's updates are as they are, or zeros before the noise: clipped, they differ by clip_norm at most. Nothing is
    claimed for whether a silo trained at all: an idle one's update of zeros goes without noise. Nor is for not being
    asked in a round, which the coordinator knows, nor for the number of samples in an update.

    Args:
        run: the run folder.
        audit: of its logs.
        delta: in (0, 1).

    Raises:
        InputError: delta is not between 0 and 1, or the scenario, which must be there, adds no noise.
    """
    from dp_accounting import get_epsilon_gaussian  # noqa: PLC0415 - seconds, which other audits do without

    if not 0 < delta < 1:
        raise InputError("--delta", delta, "a number between 0 and 1, like 1e-5")
    path = RunFolder(run).scenario
    privacy = load(path).privacy
    if privacy.noise_multiplier == 0:
        raise InputError(f"{path}: privacy.noise_multiplier", 0, "above 0: without noise there is no epsilon")
    noised = {payload.KIND for payload in TRANSFORMED}
    sent, beside = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for _, record in audit.messages:
        if (silo := record.header.sender) in (COORDINATOR, EVALUATOR):
            continue
        for (kind, _size), content in zip(record.payloads, record.digests, strict=False):
            (sent if kind in noised else beside)[silo].add(content if kind in noised else kind)
    multiplier = privacy.noise_multiplier
    silos = {
        name: Spent(
            len(sent[name]),
            get_epsilon_gaussian(multiplier / len(sent[name]) ** 0.5, delta) if sent[name] else 0.0,
            tuple(sorted(beside[name])),
        )
        for name in sorted(sent.keys() | beside.keys())
    }
    return Accounts(delta, privacy, silos)


def show(accounts: Accounts, console: Console) -> None:
    """Print the guarantees, and what they do not speak of."""
    table = Table("silo", "updates", "epsilon", "sent beside them without noise", title="what noise guarantees")
    for name, spent in accounts.silos.items():
        more = ", ".join(spent.beside)
        table.add_row(escape(printable(name)), str(spent.updates), f"{spent.epsilon:.3g}", escape(printable(more)))
    console.print(table)
    lines = [
        f"At delta {accounts.delta:g}, noise multiplier {accounts.privacy.noise_multiplier:g}: of a silo's updates "
        "alone, with all of its data or without. The numbers of samples in them, and what was sent beside them, have "
        "no guarantee."
    ]
    if accounts.privacy.noise_from == "seed":
        lines.append(
            "The noise was drawn from the scenario's seed: against whoever knows that, as the coordinator does, there "
            "is no guarantee at all (privacy.noise_from: key)."
        )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
