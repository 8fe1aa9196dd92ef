"""Differential-privacy accounting: the epsilon of each silo over all updates that the logs record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fedmq.audit.log_checks import Audit
from fedmq.config.privacy import Privacy
from fedmq.config.resolve import load
from fedmq.errors import InputError
from fedmq.federation.updates import TRANSFORMED
from fedmq.storage.run_folder import RunFolder
from fedmq.text import printable
from fedmq.wire.messages import COORDINATOR, EVALUATOR


@dataclass(frozen=True)
class Spent:
    """The privacy guarantee of one silo."""

    updates: int  # number of updates that the silo sent; resending one for the same task reveals nothing new
    epsilon: float  # epsilon of all these updates together
    beside: tuple[str, ...]  # kinds of the payloads that the silo sent without noise; epsilon does not cover them


@dataclass(frozen=True)
class Accounts:
    """The privacy guarantees of a run."""

    delta: float  # delta of (epsilon, delta)-differential privacy
    privacy: Privacy
    silos: Mapping[str, Spent]  # guarantee of each silo, by name

    def to_plain(self) -> dict[str, object]:
        """As JSON-serialisable data."""
        return {
            "delta": self.delta,
            "noise_multiplier": self.privacy.noise_multiplier,
            "noise_from": self.privacy.noise_from,
            "silos": {name: asdict(spent) for name, spent in self.silos.items()},
        }


def account(run: Path, audit: Audit, delta: float) -> Accounts:
    """Compute the epsilon of each silo over all its updates, at a given delta.

    One update is a Gaussian mechanism (Balle and Wang 2018, Theorem 8). The adaptive composition of n of them is one
    Gaussian mechanism with noise multiplier z / sqrt(n) (Dong et al. 2022, Corollary 3.3). Two runs are neighbours if
    they differ in one silo's updates, which are either its real ones or zeros before the noise: after clipping, they
    differ by at most clip_norm. Epsilon does not cover whether a silo was selected in a round, which the coordinator
    knows, or the number of samples in an update.

    Args:
        run: the run folder; it must contain the scenario.
        audit: the audit of the run's logs.
        delta: in (0, 1).

    Raises:
        InputError: delta is not between 0 and 1, or the scenario cannot be read or adds no noise.
    """
    from dp_accounting import get_epsilon_gaussian  # noqa: PLC0415 - takes seconds; other audits do not need it

    if not 0 < delta < 1:
        raise InputError("--delta", delta, "a number between 0 and 1, like 1e-5")
    path = RunFolder(run).scenario
    privacy = load(path).privacy
    if privacy.noise_multiplier == 0:
        raise InputError(f"{path}: privacy.noise_multiplier", 0, "above 0: without noise there is no epsilon")
    noised = {payload.KIND for payload in TRANSFORMED}
    sent, unnoised = defaultdict[str, set[tuple[int, int, str]]](set), defaultdict[str, set[str]](set)
    for _, record in audit.messages:
        if (silo := record.header.sender) in (COORDINATOR, EVALUATOR):
            continue
        for (kind, _size), content in zip(record.payloads, record.digests, strict=False):
            if kind in noised:
                sent[silo].add((record.header.sequence, record.header.base_version, content))
            else:
                unnoised[silo].add(kind)
    multiplier = privacy.noise_multiplier
    silos = {
        name: Spent(
            len(sent[name]),
            get_epsilon_gaussian(multiplier / len(sent[name]) ** 0.5, delta) if sent[name] else 0.0,
            tuple(sorted(unnoised[name])),
        )
        for name in sorted(sent.keys() | unnoised.keys())
    }
    return Accounts(delta, privacy, silos)


def show(accounts: Accounts, console: Console) -> None:
    """Print the guarantees, and what they do not cover."""
    table = Table(
        Column("silo", overflow="fold"),
        "updates",
        "epsilon",
        "also sent, without noise",
        title="what the noise guarantees",
    )
    for name, spent in accounts.silos.items():
        without = ", ".join(spent.beside)
        table.add_row(escape(printable(name)), str(spent.updates), f"{spent.epsilon:.3g}", escape(printable(without)))
    console.print(table)
    lines = [
        f"At delta {accounts.delta:g}, noise multiplier {accounts.privacy.noise_multiplier:g}. Epsilon covers "
        "each silo's updates only, with or without all of its data. It covers neither their numbers of samples nor "
        "the other payloads."
    ]
    if accounts.privacy.noise_from == "seed":
        lines.append(
            "The noise was drawn from the scenario's seed: there is no guarantee against anyone who knows the seed, "
            "such as the coordinator (to protect against it, set privacy.noise_from: key)."
        )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
