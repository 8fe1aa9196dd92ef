"""Attacks on captured payloads: what an honest-but-curious coordinator infers from what each silo sent.

Membership: is an item in a silo's training data? Members are the silo's pairs, non-members the held-out pairs that the
same partition gives to the silo; both come from one distribution. Each attack gives every item a score under the
silo's last captured payload. Scores are standardised within a silo, which needs no knowledge of membership, and the
ROC curve is that of all silos together.

- Update, ``cosine``: the similarity score of :mod:`fedmq.audit.membership_inference` under the model plus the update.
- Update, ``difference``: how much the update raises that score. The model before the update is the reference, by which
  hard and easy items become comparable (Watson et al., "On the Importance of Difficulty Calibration in Membership
  Inference Attacks", ICLR 2022).
- Update, ``gradient``: the derivative of the score along the update, which is positive for an item whose own gradient
  is part of it (Nasr et al., "Comprehensive Privacy Analysis of Deep Learning", S&P 2019, for one update).
- Prototype, ``cosine``: an item's cosine with the prototype, against that with the other silos' mean prototype.

What else payloads show: the number of items, the labels, and the training item nearest to a prototype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Column, Table

from fedmq.audit.membership_inference import (
    F64,
    FALSE_POSITIVES,
    Members,
    ProbeResult,
    Rows,
    compared,
    data_of,
    embedded,
    members_of,
    scores,
)
from fedmq.encoders.base import MODALITIES
from fedmq.errors import InputError
from fedmq.federation.population import Population
from fedmq.models.two_tower import TwoTower
from fedmq.retrieval.released_model import Release
from fedmq.runs.captured_payloads import Captured, Fields, read_captured
from fedmq.text import Progress, counted
from fedmq.wire.payloads import ClassPrototypes, Delta, Geometry, Memory, ModalityPrototypes, PartialDelta
from protocols.parts.aggregation import inserted

#: Step along the update of the derivative, as a fraction of it, in both directions.
_STEP = 0.05


@dataclass(frozen=True)
class Attack:
    """A membership attack on the payloads of a kind."""

    payload: str
    name: str
    result: ProbeResult  # ``untrained`` is the same attack without the payload: by the model before it, or by others'


@dataclass(frozen=True)
class Inference:
    """Something else that payloads of a kind show."""

    payload: str
    what: str
    found: float  # fraction of the silos, labels or prototypes for which it is right
    chance: float | None  # that of guessing; None where a guess has no clear meaning
    count: int  # number of silos, labels or prototypes


@dataclass(frozen=True)
class PayloadProbe:
    """What the captured payloads of a run reveal."""

    captured: int  # number of captured merges
    attacks: tuple[Attack, ...]
    inferences: tuple[Inference, ...]

    def to_plain(self) -> dict[str, object]:
        """As JSON-serialisable data."""
        return asdict(self)


@dataclass(frozen=True)
class _Sent:
    """What a silo sent last, and the model that it had then."""

    theta: torch.Tensor
    payloads: Mapping[str, Fields]
    layers: Sequence[str] | None


def probe_payloads(release: Release, progress: Progress | None = None) -> PayloadProbe:
    """Attack the captured payloads of a run.

    Args:
        release: the run.
        progress: called with (what, done, total).

    Raises:
        InputError: the run has no captured payloads, they are damaged or do not fit the model, or its data are not on
            this machine.
    """
    last, merges, folder, scenario = dict[str, _Sent](), 0, release.run, release.scenario
    population = data_of(release, progress)
    members, model = members_of(scenario, population), population.build_model(scenario, release.device, MODALITIES)
    for captured in read_captured(folder):
        merges += 1
        if captured.theta.shape != model.flat.shape:
            found = f"a model of {captured.theta.numel():,} parameters"
            raise InputError(str(folder.captured), found, f"the run's, of {model.flat.numel():,}")
        last |= {
            silo: _sent(captured, silo) for silo, base in captured.base_versions.items() if base == captured.version
        }
    by_name = {each.silo.name: each for each in members}
    attacks = _Attacks(population, model)
    for done, (silo, sent) in enumerate(sorted(last.items())):
        if progress is not None:
            progress("payloads of silos attacked", done, len(last))
        if silo in by_name:
            others = [_prototypes(each.payloads) for name, each in last.items() if name != silo]
            attacks.attack(by_name[silo], sent, others)
    inferences = [*_sizes(last, by_name), *_labels(last, by_name, population), *attacks.nearest(by_name, last)]
    return PayloadProbe(merges, attacks.results(), tuple(inferences))


def _sent(captured: Captured, silo: str) -> _Sent:
    return _Sent(captured.theta, captured.silos.get(silo, {}), captured.layers.get(silo))


def _prototypes(payloads: Mapping[str, Fields]) -> dict[str, npt.NDArray[np.float32]]:
    """A silo's prototypes [d] by modality, without those that are marked as missing."""
    fields = payloads.get(ModalityPrototypes.KIND)
    if fields is None:
        return {}
    mask = int(fields["mask"])
    return {name: np.asarray(fields[name], np.float32) for bit, name in enumerate(MODALITIES) if mask >> bit & 1}


class _Attacks:
    """Scores of all attacks, silo by silo."""

    def __init__(self, population: Population, model: TwoTower) -> None:
        self._population, self._model = population, model
        #: Standardised scores by payload and attack: of members and of others, under the payload and without it.
        self._scores: dict[tuple[str, str], list[tuple[F64, F64, F64, F64]]] = {}

    def _embedded(self, theta: torch.Tensor, rows: Rows) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        self._model.load(theta.numpy())
        return embedded(self._model, self._population, rows)

    def attack(self, silo: Members, sent: _Sent, others: Sequence[Mapping[str, npt.NDArray[np.float32]]]) -> None:
        """Score the items of a silo under what it sent; ``others`` are the prototypes of the other silos."""
        rows = np.concatenate([silo.trained, silo.held_out])
        if min(len(silo.trained), len(silo.held_out)) < 2:
            return
        image, text = self._embedded(sent.theta, rows)
        before = scores(image, text)
        change = self._change(sent)
        if change is not None and bool(change.any()):
            kind = PartialDelta.KIND if PartialDelta.KIND in sent.payloads else Delta.KIND
            after = scores(*self._embedded(sent.theta + change, rows))
            ahead = scores(*self._embedded(sent.theta + _STEP * change, rows))
            behind = scores(*self._embedded(sent.theta - _STEP * change, rows))
            still = np.zeros(len(rows))
            for name, value, reference in (
                ("cosine", after, before),
                ("difference", after - before, still),
                ("gradient", ahead - behind, still),
            ):
                self._add(kind, name, value, reference, len(silo.trained))
        for modality, prototype in _prototypes(sent.payloads).items():
            rest = [each[modality] for each in others if modality in each]
            items = image if modality == "image" else text
            reference = _cosine(items, np.mean(rest, axis=0)) if rest else np.zeros(len(rows))
            value = _cosine(items, prototype)
            self._add(ModalityPrototypes.KIND, f"cosine, {modality}", value, reference, len(silo.trained))

    def _change(self, sent: _Sent) -> torch.Tensor | None:
        """A silo's update of the whole model [P]; None without one."""
        if (whole := sent.payloads.get(Delta.KIND)) is not None:
            return torch.from_numpy(np.asarray(whole["buffer"], np.float32))
        if (part := sent.payloads.get(PartialDelta.KIND)) is None or sent.layers is None:
            return None
        values = torch.from_numpy(np.asarray(part["buffer"], np.float32))
        return inserted(torch.zeros_like(sent.theta), self._model.layout, sent.layers, values)

    def _add(self, kind: str, name: str, value: F64, reference: F64, members: int) -> None:
        value, reference = _standardised(value), _standardised(reference)
        parts = (value[:members], value[members:], reference[:members], reference[members:])
        self._scores.setdefault((kind, name), []).append(parts)

    def results(self) -> tuple[Attack, ...]:
        """The attacks over all silos."""
        found = []
        for (kind, name), parts in self._scores.items():
            inside, outside, before, without = (np.concatenate([part[i] for part in parts]) for i in range(4))
            result = compared((inside, outside), (before, without), MODALITIES, trained=True)
            found.append(Attack(kind, name, result))
        return tuple(found)

    def nearest(self, members: Mapping[str, Members], last: Mapping[str, _Sent]) -> list[Inference]:
        """How often the training item nearest to a prototype, of all silos, is one of the silo's own."""
        rows = np.concatenate([silo.trained for silo in members.values()])
        owner = np.concatenate([np.full(len(silo.trained), name) for name, silo in members.items()])
        right, chances = list[bool](), list[float]()
        for name, sent in sorted(last.items()):
            for modality, prototype in _prototypes(sent.payloads).items():
                image, text = self._embedded(sent.theta, rows)
                best = int(np.argmax(_cosine(image if modality == "image" else text, prototype)))
                right.append(str(owner[best]) == name)
                chances.append(float((owner == name).mean()))
        if not right:
            return []
        what = "the nearest training item is the silo's"
        return [Inference(ModalityPrototypes.KIND, what, float(np.mean(right)), float(np.mean(chances)), len(right))]


def _cosine(items: npt.NDArray[np.float32], direction: npt.NDArray[np.floating]) -> F64:
    wide, one = items.astype(np.float64), direction.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1) * np.linalg.norm(one)
    result: F64 = wide @ one / np.maximum(lengths, 1e-12)
    return result


def _standardised(values: F64) -> F64:
    spread = float(values.std())
    result: F64 = (values - values.mean()) / (spread or 1.0)
    return result


def _sizes(last: Mapping[str, _Sent], members: Mapping[str, Members]) -> list[Inference]:
    """For how many silos the number of training items is known: as a field, or from RCSR's geometry."""

    def from_geometry(payloads: Mapping[str, Fields]) -> float | None:
        if (fields := payloads.get(Geometry.KIND)) is None:
            return None
        length, per_root = float(fields["values"][0]), float(fields["values"][3])  # ||Δ|| and ||Δ|| / sqrt(n)
        return (length / per_root) ** 2 if per_root else None

    def as_field(payloads: Mapping[str, Fields]) -> float | None:
        counts = [int(fields["n_samples"]) for fields in payloads.values() if "n_samples" in fields]
        return counts[0] if counts else None

    found = []
    reads: tuple[tuple[str, Callable[[Mapping[str, Fields]], float | None]], ...] = (
        ("an update or its report", as_field),
        (Geometry.KIND, from_geometry),
    )
    for payload, read in reads:
        sizes = {silo: size for silo, sent in last.items() if (size := read(sent.payloads)) is not None}
        right = [abs(size - members[silo].items) < 0.5 for silo, size in sizes.items() if silo in members]
        if right:
            found.append(Inference(payload, "the number of training items", float(np.mean(right)), None, len(right)))
    return found


def _labels(last: Mapping[str, _Sent], members: Mapping[str, Members], population: Population) -> list[Inference]:
    """For how many of the labels a silo's rows show whether it has items with them."""
    found = []
    for kind, name in ((ClassPrototypes.KIND, "counts"), (Memory.KIND, "support")):
        right = list[npt.NDArray[np.bool_]]()
        chance = list[float]()
        for silo, sent in last.items():
            labels = population.prepared.labels
            if kind not in sent.payloads or silo not in members or labels is None:
                continue
            held = np.asarray(labels[members[silo].rows]).any(axis=0)
            shown = np.asarray(sent.payloads[kind][name], np.int64) > 0
            if shown.shape == held.shape:
                right.append(shown == held)
                chance.append(max(float(held.mean()), 1 - float(held.mean())))
        if right:
            every = np.concatenate(right)
            what = "which labels a silo has"
            found.append(Inference(kind, what, float(every.mean()), float(np.mean(chance)), len(every)))
    return found


def show(measured: PayloadProbe, console: Console) -> None:
    """Print the results of the attacks."""
    table = Table(
        Column("payload, attack", overflow="fold"),
        title="can a curious coordinator recognise training items in what silos sent?",
    )
    for head in ("AUC", f"TPR at {FALSE_POSITIVES:.0%} FPR", "by the payload"):
        table.add_column(head, no_wrap=True)
    for attack in measured.attacks:
        result = attack.result
        table.add_row(f"{attack.payload}, {attack.name}", str(result.auc), f"{result.tpr:.3f}", str(result.added))
    # Secure sums, e.g., leave no payload of a silo to test.
    console.print(table if measured.attacks else "no captured payload of a silo has a membership test")
    for one in measured.inferences:
        chance = "" if one.chance is None else f"; by guessing {one.chance:.0%}"
        line = f"{one.payload} shows {one.what}: right for {one.found:.0%} of {one.count:,}{chance}"
        console.print(line, highlight=False, soft_wrap=True)
    last = "By the payload: the AUC minus that of the same attack without it. Each silo's last captured payloads count"
    console.print(
        f"{last}, of {counted(measured.captured, 'merge')}. Stronger attacks may reveal more.", soft_wrap=True
    )
