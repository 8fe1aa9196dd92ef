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
- Update, ``shadows``: RMIA against shadow silos, and inversion of small updates; see :mod:`fedmq.audit.shadow_silos`.
- Prototype, ``cosine``: an item's cosine with the prototype, against that with the other silos' mean prototype.

What else payloads show: the number of items, the modalities, the labels, and the training item nearest to a prototype
or a class's row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Column, Table

from fedmq.audit.membership_inference import (
    F32,
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
    unit_rows,
)
from fedmq.audit.shadow_silos import TEMPERATURE, Inverted, Sent, Shadows, likelihoods, relative, whole_change
from fedmq.config.scenario import Scenario
from fedmq.data.labels import fine_columns
from fedmq.encoders.base import MODALITIES
from fedmq.errors import InputError
from fedmq.federation.population import Population
from fedmq.federation.protocol import Local, SiloFacts
from fedmq.models.hash_networks import towers_with
from fedmq.models.two_tower import BRANCHES, TwoTower
from fedmq.retrieval.released_model import Release
from fedmq.runs.captured_payloads import Captured, Fields, read_captured
from fedmq.text import Progress, counted
from fedmq.wire.payloads import (
    IMAGE,
    TEXT,
    ClassPrototypes,
    Delta,
    Geometry,
    Memory,
    ModalityPrototypes,
    PartialDelta,
)

#: Step along the update of the derivative, as a fraction of it, in both directions.
_STEP = 0.05
_Measure = Callable[[F32, F32], F64]
#: Largest number of items behind a class's row, and the words for it.
_SIZES = ((1, "1 item"), (7, "2 to 7 items"), (math.inf, "8 items or more"))


@dataclass(frozen=True)
class Attack:
    """A membership attack on the payloads of a kind."""

    payload: str
    name: str
    paired: bool  # of silos with both modalities; otherwise of those with one
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
class Inversion:
    """How similar the rows of the update of one optimiser step are to the inputs that it was computed from."""

    modality: str
    batch: int  # number of items of the step
    cosine: float  # mean over items of the batches: that of an input with the row of the update nearest to it
    chance: float  # the same of held-out items
    count: int  # number of items


@dataclass(frozen=True)
class PayloadProbe:
    """What the captured payloads of a run reveal."""

    captured: int  # number of captured merges
    attacks: tuple[Attack, ...]
    inferences: tuple[Inference, ...]
    inversions: tuple[Inversion, ...]

    def to_plain(self) -> dict[str, object]:
        """As JSON-serialisable data."""
        return asdict(self)


def probe_payloads(release: Release, progress: Progress | None = None, *, shadows: int = 0) -> PayloadProbe:
    """Attack the captured payloads of a run.

    ``shadows`` is an even number of shadow silos to train for each silo; with 0 the attacks that need them are left
    out.

    Raises:
        InputError: the run has no captured payloads, they are damaged or do not fit the model, or its data are not on
            this machine.
    """
    last, merges, folder, scenario = dict[str, Sent](), 0, release.run, release.scenario
    population = data_of(release, progress)
    members, model = members_of(scenario, population), population.build_model(scenario, release.device, MODALITIES)
    attacks = _Attacks(scenario, population, model, shadows)
    for captured in read_captured(folder):
        merges += 1
        if captured.state.theta.shape != model.flat.shape:
            found = f"a model of {captured.state.theta.numel():,} parameters"
            raise InputError(str(folder.captured), found, f"the run's, of {model.flat.numel():,}")
        last |= {
            silo: _sent(captured, silo, last.get(silo) if attacks.personal else None)
            for silo, base in captured.base_versions.items()
            if base == captured.version
        }
    by_name = {each.silo.name: each for each in members}
    for done, (silo, sent) in enumerate(sorted(last.items())):
        if progress is not None:
            progress("payloads of silos attacked", done, len(last))
        if silo in by_name:
            others = [_prototypes(each.payloads) for name, each in last.items() if name != silo]
            attacks.attack(by_name[silo], sent, others)
    inferences = (
        *_sizes(last, by_name),
        *_modalities(last, by_name, model),
        *_labels(last, by_name, population),
        *attacks.nearest(by_name, last),
    )
    return PayloadProbe(merges, attacks.results(), inferences, attacks.inversions())


def _sent(captured: Captured, silo: str, before: Sent | None) -> Sent:
    payloads, layers = captured.silos.get(silo, {}), captured.layers.get(silo)
    return Sent(captured.state, captured.version, payloads, layers, before)


def _prototypes(payloads: Mapping[str, Fields]) -> dict[str, npt.NDArray[np.float32]]:
    """A silo's prototypes [d] by modality, without those that are marked as missing."""
    fields = payloads.get(ModalityPrototypes.KIND)
    if fields is None:
        return {}
    mask = int(fields["mask"])
    return {name: np.asarray(fields[name], np.float32) for bit, name in enumerate(MODALITIES) if mask >> bit & 1}


class _Attacks:
    """Scores of all attacks, silo by silo."""

    def __init__(self, scenario: Scenario, population: Population, model: TwoTower, count: int) -> None:
        self._population, self._model, self._count = population, model, count
        self._shadows = Shadows(scenario, population, model)
        #: Standardised scores by payload, attack and whether silos have both modalities: of members and of others,
        #: under the payload and without it.
        self._scores: dict[tuple[str, str, bool], list[tuple[F64, F64, F64, F64]]] = {}
        self._inverted: list[Inverted] = []

    @property
    def personal(self) -> bool:
        """Whether layers are personal, so that shadows train all tasks that a silo was sent."""
        return self._count > 0 and self._shadows.personal

    def _embedded(self, sent: Sent, theta: torch.Tensor, rows: Rows, local: Local | None = None) -> tuple[F32, F32]:
        """Embeddings [n, d] of items by other parameters, and the memory that the silo was sent with its task.

        With a shadow's state (``local``), by its personal model.
        """
        if local is not None:
            method = self._shadows.method
            encoders = method.encoders(local, method.task(replace(sent.state, theta=theta), local.silo))
            return embedded(self._model, self._population, rows, encoders=encoders)
        released = self._shadows.method.release(sent.state)
        memory = next((torch.tensor(each.centroids) for each in released if isinstance(each, Memory)), None)
        self._model.load(theta.numpy())
        with towers_with(self._model, memory=memory):
            return embedded(self._model, self._population, rows)

    def attack(self, silo: Members, sent: Sent, others: Sequence[Mapping[str, npt.NDArray[np.float32]]]) -> None:
        """Score the items of a silo under what it sent; ``others`` are the prototypes of the other silos."""
        rows = np.concatenate([silo.trained, silo.held_out])
        if min(len(silo.trained), len(silo.held_out)) < 2:
            return
        theta = sent.state.theta
        image, text = self._embedded(sent, theta, rows)
        score, likelihood = self._measures(silo.silo, sent)
        before = score(image, text)
        change = self._change(sent)
        if change is not None and bool(change.any()):
            kind = PartialDelta.KIND if PartialDelta.KIND in sent.payloads else Delta.KIND
            end = self._embedded(sent, theta + change, rows)
            after = score(*end)
            ahead = score(*self._embedded(sent, theta + _STEP * change, rows))
            behind = score(*self._embedded(sent, theta - _STEP * change, rows))
            still = np.zeros(len(rows))
            for name, value, reference in (
                ("cosine", after, before),
                ("difference", after - before, still),
                ("gradient", ahead - behind, still),
            ):
                self._add(silo, kind, name, value, reference)
            if self._count:
                by_shadows, by_silo, before_it = list[F64](), list[F64](), list[F64]()
                for shadow in self._shadows.halves(silo, sent, self._count):
                    local = shadow.local if self.personal else None
                    by_shadows.append(likelihood(*self._embedded(sent, theta + shadow.change, rows, local)))
                    if local is not None:
                        by_silo.append(likelihood(*self._embedded(sent, theta + change, rows, local)))
                        before_it.append(likelihood(*self._embedded(sent, theta, rows, local)))
                value = relative(by_silo or [likelihood(*end)], by_shadows)
                reference = relative(before_it or [likelihood(image, text)], by_shadows)
                self._add(silo, kind, "shadows", value, reference)
                self._inverted += self._shadows.inverted(silo, sent)
        for modality, prototype in _prototypes(sent.payloads).items():
            rest = [each[modality] for each in others if modality in each]
            items = image if modality == "image" else text
            reference = _cosine(items, np.mean(rest, axis=0)) if rest else np.zeros(len(rows))
            value = _cosine(items, prototype)
            self._add(silo, ModalityPrototypes.KIND, f"cosine, {modality}", value, reference)

    def _measures(self, silo: SiloFacts, sent: Sent) -> tuple[_Measure, _Measure]:
        """The score of an item, and its log-likelihood.

        A silo that lacks a modality trains its items towards the prototype of it that it was sent, if there is one.
        """
        task = self._shadows.method.task(sent.state, silo)
        sent_to = next((each for each in task if isinstance(each, ModalityPrototypes)), None)
        if silo.paired or sent_to is None or not sent_to.mask & (TEXT if silo.image else IMAGE):
            return scores, likelihoods
        anchor, place = (sent_to.text, 0) if silo.image else (sent_to.image, 1)

        def score(image: F32, text: F32) -> F64:
            return _cosine((image, text)[place], anchor)

        return score, lambda image, text: score(image, text) / TEMPERATURE

    def _change(self, sent: Sent) -> torch.Tensor | None:
        """A silo's update of the whole model [P]; None without one."""
        if (whole := sent.payloads.get(Delta.KIND)) is not None:
            return whole_change(self._model, whole["buffer"], None)
        if (part := sent.payloads.get(PartialDelta.KIND)) is None or sent.layers is None:
            return None
        return whole_change(self._model, part["buffer"], sent.layers)

    def _add(self, silo: Members, kind: str, name: str, value: F64, reference: F64) -> None:
        value, reference, members = _standardised(value), _standardised(reference), len(silo.trained)
        parts = (value[:members], value[members:], reference[:members], reference[members:])
        self._scores.setdefault((kind, name, silo.silo.paired), []).append(parts)

    def results(self) -> tuple[Attack, ...]:
        """The attacks over all silos with both modalities, and over those with one."""
        found = []
        for (kind, name, paired), parts in sorted(self._scores.items(), key=lambda each: not each[0][2]):
            inside, outside, before, without = (np.concatenate([part[i] for part in parts]) for i in range(4))
            result = compared((inside, outside), (before, without), MODALITIES if paired else (), trained=True)
            found.append(Attack(kind, name, paired, result))
        return tuple(found)

    def inversions(self) -> tuple[Inversion, ...]:
        """What updates of one step reveal of their inputs, over all silos."""
        groups = dict[tuple[str, int], list[Inverted]]()
        for each in self._inverted:
            groups.setdefault((each.modality, each.batch), []).append(each)
        found = []
        for (modality, batch), parts in sorted(groups.items()):
            items, others = (np.concatenate([getattr(part, name) for part in parts]) for name in ("items", "others"))
            found.append(Inversion(modality, batch, float(items.mean()), float(others.mean()), len(items)))
        return tuple(found)

    def nearest(self, members: Mapping[str, Members], last: Mapping[str, Sent]) -> list[Inference]:
        """How often the training item nearest to a prototype, of all silos, is one of the silo's own.

        For a row of a class, the items of that class are compared; rows with few items of the silo are told apart.
        """
        rows = np.concatenate([silo.trained for silo in members.values()])
        owner = np.concatenate([np.full(len(silo.trained), name) for name, silo in members.items()])
        labels = _fine_labels(self._population, rows)
        found = dict[tuple[str, str], list[tuple[bool, float]]]()
        for name, sent in sorted(last.items()):
            if name not in members or not (prototypes := [*_rows(sent, members[name].silo, labels.shape[1])]):
                continue
            change = self._change(sent)
            image, text = self._embedded(sent, sent.state.theta if change is None else sent.state.theta + change, rows)
            both = unit_rows(image) + unit_rows(text)
            codes: dict[str, npt.NDArray[np.floating]] = {"image": image, "text": text, "both": both}
            for kind, modality, label, prototype in prototypes:
                compared_ = np.full(len(rows), True) if label is None else labels[:, label]
                own = (owner == name)[compared_]
                if not own.any() or own.all():
                    continue
                size = "" if label is None else next(words for most, words in _SIZES if own.sum() <= most)
                right = bool(own[np.argmax(_cosine(codes[modality][compared_], prototype))])
                found.setdefault((kind, size), []).append((right, float(own.mean())))
        inferences = []
        for (kind, size), pairs in sorted(found.items()):
            what = f"a training item of the silo, the one nearest to {f'a row of {size}' if size else 'a prototype'}"
            found_share, chance = map(float, np.mean(pairs, axis=0))
            inferences.append(Inference(kind, what, found_share, chance, len(pairs)))
        return inferences


def _rows(sent: Sent, silo: SiloFacts, classes: int) -> Iterator[tuple[str, str, int | None, npt.NDArray[np.floating]]]:
    """The prototypes that a silo sent: kind, modality, class (None for all items) and values [d]."""
    for modality, prototype in _prototypes(sent.payloads).items():
        yield ModalityPrototypes.KIND, modality, None, prototype
    held = "both" if silo.paired else "image" if silo.image else "text"
    for kind, values, counts in ((ClassPrototypes.KIND, "prototypes", "counts"), (Memory.KIND, "centroids", "support")):
        if (fields := sent.payloads.get(kind)) is None or not classes or len(fields[counts]) % classes:
            continue
        halves = ("image", "text") if len(fields[counts]) == 2 * classes else (held,)
        for place in np.flatnonzero(fields[counts]):
            yield kind, halves[place // classes], int(place % classes), np.asarray(fields[values][place], np.float32)


def _fine_labels(population: Population, rows: Rows) -> npt.NDArray[np.bool_]:
    """Labels bool [n, C] of some items, those that define relevance; C is 0 without labels."""
    labels = population.prepared.labels
    if labels is None:
        return np.zeros((len(rows), 0), np.bool_)
    found: npt.NDArray[np.bool_] = np.asarray(labels[rows])[:, fine_columns(population.prepared.label_names)] > 0
    return found


def _cosine(items: npt.NDArray[np.floating], direction: npt.NDArray[np.floating]) -> F64:
    found: F64 = unit_rows(items) @ unit_rows(direction[None])[0]
    return found


def _standardised(values: F64) -> F64:
    spread = float(values.std())
    result: F64 = (values - values.mean()) / (spread or 1.0)
    return result


def _sizes(last: Mapping[str, Sent], members: Mapping[str, Members]) -> list[Inference]:
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


def _modalities(last: Mapping[str, Sent], members: Mapping[str, Members], model: TwoTower) -> list[Inference]:
    """For how many silos it is known which modalities they have: by the branches of an update, or by prototypes."""

    def by_update(sent: Sent) -> set[str]:
        """Branches that the update changes; one that a silo lacks was filled with zeros when it arrived."""
        if (whole := sent.payloads.get(Delta.KIND)) is not None:
            parts = torch.split(torch.from_numpy(np.asarray(whole["buffer"])), [each.size for each in entries])
            changed = [each.name for each, part in zip(entries, parts, strict=True) if bool(part.any())]
        else:  # of a sum only the names of the branches are reported
            changed = [*(sent.layers or ())]
        return {each for each in MODALITIES if any(name.startswith((each, BRANCHES[each])) for name in changed)}

    def by_prototypes(sent: Sent) -> set[str]:
        return {*_prototypes(sent.payloads)}

    entries, found = model.layout.entries, list[Inference]()
    for payload, read in (("an update or its report", by_update), (ModalityPrototypes.KIND, by_prototypes)):
        held = {name: {each for each in MODALITIES if getattr(silo.silo, each)} for name, silo in members.items()}
        read_ = {name: modalities for name, sent in last.items() if name in held and (modalities := read(sent))}
        if read_:
            right = [modalities == held[name] for name, modalities in read_.items()]
            chance = max(Counter(frozenset(held[name]) for name in read_).values()) / len(read_)
            found.append(Inference(payload, "which modalities a silo has", float(np.mean(right)), chance, len(read_)))
    return found


def _labels(last: Mapping[str, Sent], members: Mapping[str, Members], population: Population) -> list[Inference]:
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
        alone = "" if attack.paired else ", silos with one modality"
        table.add_row(f"{attack.payload}, {attack.name}{alone}", str(result.auc), str(result.tpr), str(result.added))
    # Secure sums, e.g., leave no payload of a silo to test.
    console.print(table if measured.attacks else "no captured payload of a silo has a membership test")
    for one in measured.inferences:
        chance = "" if one.chance is None else f"; by guessing {one.chance:.0%}"
        line = f"{one.payload} shows {one.what}: right for {one.found:.0%} of {one.count:,}{chance}"
        console.print(line, highlight=False, soft_wrap=True)
    for each in measured.inversions:
        line = f"the update of one step on {counted(each.batch, 'item')} shows its {each.modality} inputs: cosine "
        line += f"{each.cosine:.3f} of one with the nearest row of a weight, {each.chance:.3f} of a held-out item"
        console.print(line, highlight=False, soft_wrap=True)
    last = "By the payload: the AUC minus that of the same attack without it. Each silo's last captured payloads count"
    console.print(
        f"{last}, of {counted(measured.captured, 'merge')}. Stronger attacks may reveal more.", soft_wrap=True
    )
