"""Differential-privacy accounting: epsilon of each silo, and of its single items, over all that the logs record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fedmq.audit.log_checks import Audit
from fedmq.config.privacy import Privacy
from fedmq.config.resolve import load
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.federation.noise import CLIP_BIT, UPDATES, epsilon_of, item_epsilon, spent, spent_by_items
from fedmq.runs.results import read_summary
from fedmq.storage.run_folder import RunFolder
from fedmq.text import printable
from fedmq.wire.messages import COORDINATOR, EVALUATOR
from fedmq.wire.payloads import MaskedUpdate, RevealedShares, SealedShares


@dataclass(frozen=True)
class Spent:
    """The privacy guarantee of one silo, or of each of its training items."""

    updates: int  # number of updates that the silo sent; resending one for the same task reveals nothing new
    epsilon: float  # epsilon of all payloads with noise together; of items, with noise in its local steps
    beside: tuple[str, ...]  # kinds of the payloads that the silo sent without noise; epsilon does not cover them


@dataclass(frozen=True)
class Accounts:
    """The privacy guarantees of a run."""

    delta: float  # delta of (epsilon, delta)-differential privacy
    privacy: Privacy
    silos: Mapping[str, Spent]  # guarantee of each silo, by name; empty if nothing that silos send gets noise
    items: Mapping[str, Spent]  # of each training item, by the name of its silo; empty without noise in local steps

    def to_plain(self) -> dict[str, object]:
        """As JSON-serialisable data."""
        return {
            "delta": self.delta,
            "noise_multiplier": self.privacy.noise_multiplier,
            "statistics": {kind: noise.model_dump() for kind, noise in self.privacy.statistics.items()},
            "noise_from": self.privacy.noise_from,
            "local_steps": None if self.privacy.items is None else self.privacy.items.model_dump(),
            "silos": {name: asdict(spent) for name, spent in self.silos.items()},
            "items": {name: asdict(spent) for name, spent in self.items.items()},
        }


def account(run: Path, audit: Audit, delta: float) -> Accounts:
    """Compute the epsilon of each silo over all payloads with noise that it sent, at a given delta.

    Each payload is a Gaussian mechanism; :func:`fedmq.federation.noise.epsilon_of` composes them. Two runs are
    neighbours if they differ in one silo's payloads, which are either its real ones or zeros before the noise: after
    clipping, they differ by at most clip_norm. A masked update counts as all payloads that went through its sum, whose
    noise is that of the sum. Epsilon does not cover whether a silo was selected in a round, which the
    coordinator knows, or the numbers of samples in updates, prototypes and memories.

    With ``privacy.items``, :func:`fedmq.federation.noise.item_epsilon` composes the steps of all tasks that a silo
    answered: two runs are neighbours if one training item of the silo is replaced by another.

    Args:
        run: the run folder; it must contain the scenario, and with ``privacy.items`` the summary.
        audit: the audit of the run's logs.
        delta: in (0, 1).

    Raises:
        InputError: the scenario cannot be read or adds no noise; or the summary, which has the numbers of items,
            cannot be read or lacks a silo.
    """
    path = RunFolder(run).scenario
    scenario = load(path)
    privacy = scenario.privacy
    if not privacy.noised:
        raise InputError(f"{path}: privacy.noise_multiplier", 0, "above 0: without noise there is no epsilon")
    sent = defaultdict[str, set[_Sent]](set)
    for _, record in audit.messages:
        if (silo := record.header.sender) in (COORDINATOR, EVALUATOR):
            continue
        version = record.header.base_version
        for (sent_as, _size), content in zip(record.payloads, record.digests, strict=False):
            if sent_as in _SHARES:
                continue
            through = audit.through_sums.get((silo, version), ()) if sent_as == MaskedUpdate.KIND else ()
            sent[silo] |= {(kind, record.header.sequence, version, content) for kind in through or (sent_as,)}
    by_name = sorted(sent.items())
    silos = (
        {name: _of_silo(each, privacy, delta) for name, each in by_name} if any(privacy.multipliers.values()) else {}
    )
    items = dict[str, Spent]()
    if privacy.items is not None and privacy.items.noise_multiplier:
        known = read_summary(RunFolder(run)).per_silo
        for name, each in by_name:
            if name not in known or known[name].samples < 1:
                raise InputError(str(RunFolder(run).summary), f"no number of items of {name}", "that of each silo")
            items[name] = _of_items(each, scenario, known[name].samples, delta)
    return Accounts(delta, privacy, silos, items)


#: Kind of a payload, number and version of its task, and its digest.
_Sent = tuple[str, int, int, str]
_UPDATES = frozenset(update.KIND for update in UPDATES)
#: Shares of secrets that are drawn at random, and so say nothing about data.
_SHARES = {SealedShares.KIND, RevealedShares.KIND}


def _of_silo(sent: Set[_Sent], privacy: Privacy, delta: float) -> Spent:
    noised = sorted(each for each in sent if spent(each[:1], privacy))
    beside = {kind for kind, *_ in sent} - {kind for kind, *_ in noised}
    epsilon = epsilon_of(
        spent((kind for kind, *_ in noised), privacy), delta, sums=privacy.secure_aggregation is not None
    )
    return Spent(sum(kind in _UPDATES for kind, *_ in noised), epsilon, tuple(sorted(beside)))


def _of_items(sent: Set[_Sent], scenario: Scenario, samples: int, delta: float) -> Spent:
    privacy, kinds = scenario.privacy, [kind for kind, *_ in sorted(sent)]
    updates = sum(kind in _UPDATES or kind == MaskedUpdate.KIND for kind in kinds)
    beside = {kind for kind in kinds if kind not in _UPDATES and not spent_by_items((kind,), privacy)}
    epsilon = item_epsilon(scenario, samples, updates, spent_by_items(kinds, privacy), delta)
    return Spent(updates, epsilon, tuple(sorted(beside)))


def show(accounts: Accounts, console: Console) -> None:
    """Print the guarantees, and what they do not cover."""
    for title, each in (
        ("what the noise guarantees", accounts.silos),
        ("what the noise in local steps guarantees a training item", accounts.items),
    ):
        table = Table(Column("silo", overflow="fold"), "updates", "epsilon", "also sent, without noise", title=title)
        for name, one in each.items():
            without = ", ".join(one.beside)
            table.add_row(escape(printable(name)), str(one.updates), f"{one.epsilon:.3g}", escape(printable(without)))
        if each:
            console.print(table)
    lines = [*_covered_silos(accounts), *_covered_items(accounts)]
    if accounts.privacy.noise_from == "seed":
        lines.append(
            "The noise was drawn from the scenario's seed: there is no guarantee against anyone who knows the seed, "
            "such as the coordinator (to protect against it, set privacy.noise_from: key)."
        )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def _covered_silos(accounts: Accounts) -> list[str]:
    if not accounts.silos:
        return []
    privacy = accounts.privacy
    covered = {"updates": privacy.noise_multiplier} if privacy.noise_multiplier else {}
    covered |= {kind: noise.noise_multiplier for kind, noise in privacy.statistics.items() if noise.noise_multiplier}
    if privacy.adaptive_clip is not None and privacy.adaptive_clip.noise_multiplier:
        covered[CLIP_BIT] = privacy.adaptive_clip.noise_multiplier
    noises = ", ".join(f"{kind} {multiplier:g}" for kind, multiplier in covered.items())
    return [
        f"At delta {accounts.delta:g}, with noise multipliers: {noises}. Epsilon covers these of each silo only, with "
        "or without all of its data. It covers neither their numbers of samples nor the other payloads."
    ]


def _covered_items(accounts: Accounts) -> list[str]:
    if not accounts.items or (items := accounts.privacy.items) is None:
        return []
    return [
        f"At delta {accounts.delta:g}, with noise multiplier {items.noise_multiplier:g} in local steps on groups of "
        f"{items.group} items. Epsilon covers one training item of a silo, replaced by another one, in its updates and "
        "in statistics with noise. It does not cover the other payloads."
    ]
