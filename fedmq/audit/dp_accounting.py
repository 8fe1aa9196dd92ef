"""Differential-privacy accounting: the epsilon of each silo over all payloads with noise that the logs record."""

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
from fedmq.federation.noise import CLIP_BIT, UPDATES, epsilon_of, spent
from fedmq.storage.run_folder import RunFolder
from fedmq.text import printable
from fedmq.wire.messages import COORDINATOR, EVALUATOR
from fedmq.wire.payloads import MaskedUpdate


@dataclass(frozen=True)
class Spent:
    """The privacy guarantee of one silo."""

    updates: int  # number of updates that the silo sent; resending one for the same task reveals nothing new
    epsilon: float  # epsilon of all payloads with noise together
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
            "statistics": {kind: noise.model_dump() for kind, noise in self.privacy.statistics.items()},
            "noise_from": self.privacy.noise_from,
            "silos": {name: asdict(spent) for name, spent in self.silos.items()},
        }


def account(run: Path, audit: Audit, delta: float) -> Accounts:
    """Compute the epsilon of each silo over all payloads with noise that it sent, at a given delta.

    Each payload is a Gaussian mechanism; :func:`fedmq.federation.noise.epsilon_of` composes them. Two runs are
    neighbours if they differ in one silo's payloads, which are either its real ones or zeros before the noise: after
    clipping, they differ by at most clip_norm. A masked update counts as all payloads that went through its sum, whose
    noise is that of the sum. Epsilon does not cover whether a silo was selected in a round, which the
    coordinator knows, or the numbers of samples in updates, prototypes and memories.

    Args:
        run: the run folder; it must contain the scenario.
        audit: the audit of the run's logs.
        delta: in (0, 1).

    Raises:
        InputError: delta is not between 0 and 1, or the scenario cannot be read or adds no noise.
    """
    if not 0 < delta < 1:
        raise InputError("--delta", delta, "a number between 0 and 1, like 1e-5")
    path = RunFolder(run).scenario
    privacy = load(path).privacy
    if not privacy.noised:
        raise InputError(f"{path}: privacy.noise_multiplier", 0, "above 0: without noise there is no epsilon")
    sent, unnoised = defaultdict[str, set[tuple[str, int, int, str]]](set), defaultdict[str, set[str]](set)
    for _, record in audit.messages:
        if (silo := record.header.sender) in (COORDINATOR, EVALUATOR):
            continue
        version = record.header.base_version
        for (sent_as, _size), content in zip(record.payloads, record.digests, strict=False):
            through = audit.through_sums.get((silo, version), ()) if sent_as == MaskedUpdate.KIND else ()
            for kind in through or (sent_as,):
                if spent((kind,), privacy):
                    sent[silo].add((kind, record.header.sequence, version, content))
                else:
                    unnoised[silo].add(kind)
    kinds, sums = {update.KIND for update in UPDATES}, privacy.secure_aggregation is not None
    silos = {
        name: Spent(
            sum(kind in kinds for kind, *_ in sent[name]),
            epsilon_of(spent((kind for kind, *_ in sorted(sent[name])), privacy), delta, sums=sums),
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
    for name, one in accounts.silos.items():
        without = ", ".join(one.beside)
        table.add_row(escape(printable(name)), str(one.updates), f"{one.epsilon:.3g}", escape(printable(without)))
    console.print(table)
    privacy = accounts.privacy
    covered = {"updates": privacy.noise_multiplier} if privacy.noise_multiplier else {}
    covered |= {kind: noise.noise_multiplier for kind, noise in privacy.statistics.items() if noise.noise_multiplier}
    if privacy.adaptive_clip is not None and privacy.adaptive_clip.noise_multiplier:
        covered[CLIP_BIT] = privacy.adaptive_clip.noise_multiplier
    noises = ", ".join(f"{kind} {multiplier:g}" for kind, multiplier in covered.items())
    lines = [
        f"At delta {accounts.delta:g}, with noise multipliers: {noises}. Epsilon covers these of each silo only, with "
        "or without all of its data. It covers neither their numbers of samples nor the other payloads."
    ]
    if accounts.privacy.noise_from == "seed":
        lines.append(
            "The noise was drawn from the scenario's seed: there is no guarantee against anyone who knows the seed, "
            "such as the coordinator (to protect against it, set privacy.noise_from: key)."
        )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
