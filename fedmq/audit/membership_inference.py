"""What a released model gives away of its training data: a membership-inference test on the run's own items.

Someone who holds the model and an item guesses whether the item was trained on, by a score and a threshold (Yeom et
al., "Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting", CSF 2018). The score is the cosine of
the item's image and caption, as in Ko et al., "Practical Membership Inference Attacks Against Large-Scale Multi-Modal
Models", ICCV 2023, less the item's mean similarity to the other items: that part is about the item and not about the
pair. It needs no loss, so models of every base loss are measured alike.

Items that were trained on are compared with items of the same source, dealt out alike, that were not: where the two
differ in more than membership, a test finds that difference (Gomez, "Rethinking Membership Inference Attacks for CLIP",
AAAI 2026). So the model as it was drawn takes the same test, and the difference of the two areas is what training
added. Nothing here is drawn by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from fedmq.data.silo_dataset import load_silo_dataset
from fedmq.encoders.base import MODALITIES
from fedmq.errors import InputError
from fedmq.evaluation.embedded import embed
from fedmq.federation.population import Population, build_population
from fedmq.federation.protocol import encoders_of
from fedmq.models.two_tower import TwoTower
from fedmq.progress import Progress
from fedmq.retrieval.released_model import Release
from fedmq.runs.results import read_summary

F64 = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
#: False-positive rate at which the true-positive rate is told (Carlini et al., "Membership Inference Attacks From First
#: Principles", S&P 2022: a few items that are told apart for sure are the harm, not the average).
FALSE_POSITIVES = 0.01
_Z = 1.959963984540054  # of a two-sided 95 % interval of the normal distribution
_CHUNK = 1024  # items in memory at once


@dataclass(frozen=True)
class Estimate:
    """A number and the 95 % interval of it.

    Args:
        value: the number.
        low: lower end; None where it cannot be estimated: fewer than two items on a side, or no spread at all.
        high: upper end; likewise.
    """

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ± {max(self.value - self.low, self.high - self.value):.3f}"


@dataclass(frozen=True)
class ProbeResult:
    """How well a score tells items that were trained on from items that were not.

    Args:
        modalities: that the silo has; of all items, those of any silo.
        trained: whether the silo's replies are in the model. Items of one whose are not show what the test makes of
            items that nobody trained on.
        members: number of items that were trained on.
        others: number of items that were not.
        auc: area under the ROC curve: the chance that a random member scores above a random other.
        tpr: share of the members that score above all others but the share FALSE_POSITIVES.
        untrained: the area with the model as it was drawn, before the first round.
        added: by training: ``auc`` less ``untrained``.
    """

    modalities: tuple[str, ...]
    trained: bool
    members: int
    others: int
    auc: Estimate
    tpr: float
    untrained: float
    added: Estimate


@dataclass(frozen=True)
class Probe:
    """What the probe of one run measured.

    Args:
        digest: SHA-256 (hex) of the released model.
        personal: the silos also have parts of their own, which are not released and not probed.
        split: the evaluated split, whose items are the others.
        overall: the training items of all silos whose replies are in the model, against the whole split.
        per_silo: each silo's training items against its own held-out share, which was dealt out in the same
            proportions; silos with nothing to compare are left out.
    """

    digest: str
    personal: bool
    split: str
    overall: ProbeResult
    per_silo: Mapping[str, ProbeResult]

    def to_plain(self) -> dict[str, object]:
        """As JSON-serialisable data."""
        return asdict(self)


def scores(image: npt.NDArray[np.float32], text: npt.NDArray[np.float32]) -> F64:
    """The membership score of each item among others.

    Args:
        image: [n, d], n at least 2; embeddings, or real-valued codes, whose cosine is their normalised agreement.
        text: [n, d], of each image's first caption.

    Returns:
        [n]: the cosine of image and caption, less the mean cosine of the item's image with the other items' captions
        and of its caption with the other items' images.
    """
    x, y = _unit(image), _unit(text)
    own = (x * y).sum(axis=1)
    # Sums over all others at once: the sum over everybody, less the pair itself.
    with_others = x @ y.sum(axis=0) + y @ x.sum(axis=0) - 2 * own
    found: F64 = own - with_others / (2 * (len(own) - 1))
    return found


def _unit(rows: npt.NDArray[np.float32]) -> F64:
    wide = rows.astype(np.float64)
    found: F64 = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)
    return found


def area(members: F64, others: F64) -> float:
    """Area under the ROC curve of scores of which the higher mean member.

    Args:
        members: [m] scores, m at least 1.
        others: [n] scores, n at least 1.
    """
    from sklearn.metrics import roc_auc_score  # noqa: PLC0415 - a second to import

    truth = np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    return float(roc_auc_score(truth, np.concatenate([members, others])))


def true_positives(members: F64, others: F64) -> float:
    """Share of the members above all others but the share FALSE_POSITIVES; below 100 others, above all of them."""
    allowed = int(FALSE_POSITIVES * len(others))
    return float((members > np.sort(others)[len(others) - 1 - allowed]).mean())


def components(members: F64, others: F64) -> tuple[F64, F64]:
    """What each item contributes to the area under the ROC curve (DeLong et al., Biometrics 1988).

    By midranks, as Sun and Xu, "Fast Implementation of DeLong's Algorithm", IEEE SPL 2014, compute it.

    Args:
        members: [m] scores.
        others: [n] scores.

    Returns:
        [m]: of each member the share of the others below it; [n]: of each other the share of the members above it. Ties
        count half. The mean of either is the area.
    """
    from scipy.stats import rankdata  # noqa: PLC0415 - a second to import

    ranks, m = rankdata(np.concatenate([members, others])), len(members)
    return (ranks[:m] - rankdata(members)) / len(others), 1 - (ranks[m:] - rankdata(others)) / m


def estimate(value: float, parts: tuple[F64, F64], least: float) -> Estimate:
    """The 95 % interval of an area, or of the difference of two over the same items (DeLong et al., 1988).

    Args:
        value: the area or the difference.
        parts: its :func:`components`, or the differences of theirs.
        least: the smallest it can be; the largest is 1.
    """
    if min(map(len, parts)) < 2:
        return Estimate(value, None, None)
    variance = sum(float(part.var(ddof=1)) / len(part) for part in parts)
    if variance == 0:
        return Estimate(value, None, None)
    half = _Z * variance**0.5
    return Estimate(value, max(least, value - half), min(1.0, value + half))


def compared(
    released: tuple[F64, F64], untrained: tuple[F64, F64], modalities: tuple[str, ...], *, trained: bool
) -> ProbeResult:
    """Compare members with others.

    Args:
        released: scores by the released model, of the members [m] and of the others [n], neither empty.
        untrained: scores of the same items by the model as it was drawn.
        modalities: of the silo.
        trained: whether the silo's replies are in the model.
    """
    auc, before = area(*released), area(*untrained)
    parts, parts_before = components(*released), components(*untrained)
    return ProbeResult(
        modalities,
        trained,
        len(released[0]),
        len(released[1]),
        estimate(auc, parts, 0.0),
        true_positives(*released),
        before,
        estimate(auc - before, (parts[0] - parts_before[0], parts[1] - parts_before[1]), -1.0),
    )


def probe(release: Release, *, pooled: bool = False, progress: Progress | None = None) -> Probe:
    """Probe a released model with the items it was trained on and those it was evaluated on.

    Args:
        release: the run.
        pooled: its method trains on everybody's data in one place.
        progress: told (what, done, total).

    Raises:
        OtherModelError: the parameters are not the released ones.
        InputError: the run's data are not on this machine, or the release is damaged, or nobody trained.
    """
    scenario, summary = release.scenario, read_summary(release.run)
    try:
        population = build_population(scenario, progress, release.cache, pooled=pooled)
    except InputError as error:
        place = f"--probe {release.run.root}: {error.place}"
        raise InputError(place, error.found, f"the run's data on this machine ({error.allowed})") from None
    release.check_data(population.prepared)
    took_part = {name for name, own in summary.per_silo.items() if own.participations}
    trained = [rows for silo, rows in zip(population.silos, population.train, strict=True) if silo.name in took_part]
    if not sum(map(len, trained)):
        found = "a model that no silo's reply is in"
        raise InputError(f"--probe {release.run.root}", found, "a model that was trained")
    every = np.sort(np.concatenate([*population.train, population.evaluated]))
    models = release.model(population.prepared), population.build_model(scenario, release.device, MODALITIES)
    by_model = [
        _scored(model, population, every, _step(progress, number, len(every))) for number, model in enumerate(models)
    ]

    def of(members: Rows, others: Rows, modalities: tuple[str, ...], part: bool) -> ProbeResult:
        # Rows are in ascending order: where one stands among all is its place.
        inside, outside = np.searchsorted(every, members), np.searchsorted(every, others)
        released, untrained = ((values[inside], values[outside]) for values in by_model)
        return compared(released, untrained, modalities, trained=part)

    per_silo = {}
    for silo, rows, heldout in zip(population.silos, population.train, population.heldout, strict=True):
        # Pooled data were not dealt out: no held-out share is like them.
        if len(rows) and len(heldout) and not pooled:
            modalities = tuple(name for name, has in (("image", silo.image), ("text", silo.text)) if has)
            per_silo[silo.name] = of(rows, heldout, modalities, silo.name in took_part)
    overall = of(np.concatenate(trained), population.evaluated, MODALITIES, True)
    return Probe(release.digest, bool(summary.personal), scenario.evaluation.split, overall, per_silo)


def _step(progress: Progress | None, number: int, items: int) -> Callable[[int], None]:
    def tell(done: int) -> None:
        if progress is not None:
            progress("items scored by two models", number * items + done, 2 * items)

    return tell


def _scored(model: TwoTower, population: Population, rows: Rows, tell: Callable[[int], None]) -> F64:
    """Scores [n] of some rows of the data set among each other."""
    images, texts = [], []
    for start in range(0, len(rows), _CHUNK):
        tell(start)
        share = load_silo_dataset(population.prepared, rows[start : start + _CHUNK], image=True, text=True)
        first = replace(share, captions=torch.ones_like(share.captions))
        embedded = embed(encoders_of(model), first, binary=model.binary)
        images.append(embedded.image)
        texts.append(embedded.text)
    tell(len(rows))
    return scores(np.concatenate(images), np.concatenate(texts))


def _above(estimate_: Estimate, bound: float) -> bool:
    """Whether a number is shown to be above a bound; without an interval its value decides."""
    return (estimate_.value if estimate_.low is None else estimate_.low) > bound


def _verdict(overall: ProbeResult) -> str:
    if min(overall.members, overall.others) < 2:
        return "too few items to say"
    if not _above(overall.auc, 0.5):
        return "this test does not tell training items from held-out ones"
    if _above(overall.added, 0.0):
        return "this test tells training items from held-out ones, and the training is why"
    return "this test tells them apart, but as well without training: they differ in more than that"


def show(measured: Probe, console: Console) -> None:
    """Print what the probe measured, and what it means."""
    table = Table("", "trained on / held out", title="can training items be told from held-out ones?")
    for head in ("AUC", f"TPR at {FALSE_POSITIVES:.0%} FPR", "by training"):
        table.add_column(head, no_wrap=True)
    for name, found in {"all": measured.overall, **measured.per_silo}.items():
        lacks = f", {found.modalities[0]}" if len(found.modalities) == 1 else ""
        whose = name + lacks + ("" if found.trained else ", took no part")
        counts = f"{found.members:,} / {found.others:,}"
        table.add_row(whose, counts, str(found.auc), f"{found.tpr:.3f}", str(found.added))
    console.print(table)
    lines = (
        f"{_verdict(measured.overall)}. AUC: the chance that a training item scores above a held-out one; 0.5 is a coin"
        " toss, 1 is always. By training: what was added to the AUC of the untrained model. ± is half a 95 % interval.",
        "A stronger attack may find more. Probed was the shared model of the release, "
        f"{measured.digest[:16]}{'; the silos have parts of their own, which are not in it' * measured.personal}.",
    )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
