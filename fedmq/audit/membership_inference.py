"""Membership inference: how much a released model reveals about its training data, tested on the run's own items.

An attacker who has the model and an item guesses whether the model was trained on the item, by a score and a threshold
(Yeom et al., "Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting", CSF 2018). The score is the
cosine similarity of the item's image and caption, as in Ko et al., "Practical Membership Inference Attacks Against
Large-Scale Multi-Modal Models", ICCV 2023, minus the item's mean similarity to the other items, which depends on the
item and not on the pair. It needs no loss, so it applies to models of every base loss.

Training items (members) are compared with held-out items of the same source, partitioned in the same proportions. If
the two differ in more than membership, a test detects that difference, too (Gomez, "Rethinking Membership Inference
Attacks for CLIP", AAAI 2026). Therefore the initial model takes the same test, and the difference of the two AUCs is
the effect of training. The test is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Column, Table

from fedmq.config.scenario import Scenario
from fedmq.data.silo_dataset import load_silo_dataset, validation_split
from fedmq.encoders.base import MODALITIES
from fedmq.errors import InputError
from fedmq.evaluation.heldout import embed
from fedmq.federation.population import Population, build_population
from fedmq.federation.protocol import Encoders, SiloFacts, encoders_of
from fedmq.models.two_tower import TwoTower
from fedmq.retrieval.released_model import Release
from fedmq.runs.results import read_summary
from fedmq.seeds import numpy_generator
from fedmq.text import Progress

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]
#: False-positive rate at which the true-positive rate is reported (Carlini et al., "Membership Inference Attacks From
#: First Principles", S&P 2022: the harm lies in the few items that are identified with confidence, not in the average).
FALSE_POSITIVES = 0.01
_Z = 1.959963984540054  # of a two-sided 95 % interval of the normal distribution
_CHUNK = 1024  # items embedded at a time


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % confidence interval."""

    value: float
    # Lower bound; None if there is no interval: fewer than two members or non-members, or no variance.
    low: float | None
    high: float | None  # upper bound; likewise

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ± {max(self.value - self.low, self.high - self.value):.3f}"


@dataclass(frozen=True)
class ProbeResult:
    """How well the score separates training items (members) from held-out items."""

    modalities: tuple[str, ...]  # modalities of the silo; for the test over all silos, of any silo
    # Whether replies of the silo were merged. If not, its items are not members, and the test is a control.
    trained: bool
    members: int  # number of training items
    others: int  # number of held-out items
    auc: Estimate  # area under the ROC curve: the probability that a random member scores above a random held-out item
    tpr: Estimate  # true-positive rate at a false-positive rate of FALSE_POSITIVES
    untrained: float  # AUC of the initial model
    added: Estimate  # ``auc`` minus ``untrained``: the effect of training


@dataclass(frozen=True)
class Probe:
    """Result of the membership-inference test of one run."""

    digest: str  # SHA-256 (hex) of the released model
    personal: bool  # the silos also have personal parameters, which are not released and not tested
    split: str  # the evaluated split, which provides the held-out items
    overall: ProbeResult  # training items of all silos whose replies were merged, against the whole split
    # Training items of each silo against its part of the split, which was partitioned in the same proportions; silos
    # without either are left out.
    per_silo: Mapping[str, ProbeResult]

    def to_plain(self) -> dict[str, object]:
        """As JSON-serialisable data."""
        return asdict(self)


def scores(image: npt.NDArray[np.float32], text: npt.NDArray[np.float32]) -> F64:
    """The membership score of each item among others.

    Args:
        image: float32 [n, d], n at least 2; embeddings, or real-valued codes.
        text: float32 [n, d], of each image's first caption.

    Returns:
        float64 [n]: the cosine of image and caption, minus the mean cosine of the item's image with the other items'
        captions and of its caption with the other items' images.
    """
    x, y = unit_rows(image), unit_rows(text)
    pair = (x * y).sum(axis=1)
    # The sum over the other items is the sum over all items minus the pair itself.
    with_others = x @ y.sum(axis=0) + y @ x.sum(axis=0) - 2 * pair
    result: F64 = pair - with_others / (2 * (len(pair) - 1))
    return result


def unit_rows(rows: npt.NDArray[np.floating]) -> F64:
    """Rows [n, d] scaled to length 1."""
    wide = rows.astype(np.float64)
    unit: F64 = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)
    return unit


def area(members: F64, others: F64) -> float:
    """Area under the ROC curve of scores [m] of members and [n] of others, at least one each; higher means member."""
    from sklearn.metrics import roc_auc_score  # noqa: PLC0415 - a second to import

    truth = np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    return float(roc_auc_score(truth, np.concatenate([members, others])))


def true_positives(members: F64, others: F64, axis: int = -1) -> npt.NDArray[np.float64]:
    """True-positive rate at a false-positive rate of FALSE_POSITIVES; with fewer than 100 others, at none.

    Args:
        members: scores; of several samples, along ``axis``.
        others: likewise, at least 1 along the axis.
        axis: the last one.
    """
    count = others.shape[axis]
    threshold = np.sort(others, axis=axis)[..., [count - 1 - int(FALSE_POSITIVES * count)]]
    found: F64 = (members > threshold).mean(axis=axis)
    return found


def rate_of(members: F64, others: F64) -> Estimate:
    """:func:`true_positives` with the 95 % percentile interval of a bootstrap of both samples."""
    from scipy.stats import bootstrap  # noqa: PLC0415 - a second to import

    value = float(true_positives(members, others))
    if min(len(members), len(others)) < 2:
        return Estimate(value, None, None)
    interval = bootstrap(
        (members, others), true_positives, n_resamples=999, method="percentile", rng=numpy_generator(0, "bootstrap")
    ).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high))


def components(members: F64, others: F64) -> tuple[F64, F64]:
    """Contribution of each item to the area under the ROC curve (DeLong et al., Biometrics 1988).

    Computed from midranks (Sun and Xu, "Fast Implementation of DeLong's Algorithm", IEEE SPL 2014).

    Returns:
        [m]: for each member, the fraction of the others below it; [n]: for each other, the fraction of the members
        above it. Ties count half. The mean of either is the area.
    """
    from scipy.stats import rankdata  # noqa: PLC0415 - a second to import

    ranks, m = rankdata(np.concatenate([members, others])), len(members)
    return (ranks[:m] - rankdata(members)) / len(others), 1 - (ranks[m:] - rankdata(others)) / m


def estimate(value: float, parts: tuple[F64, F64], least: float) -> Estimate:
    """95 % confidence interval of an area, or of the difference of two areas over the same items (DeLong et al., 1988).

    Args:
        value: the area or the difference.
        parts: its :func:`components`, or the differences of theirs.
        least: its smallest possible value; the largest is 1.
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
    """Test how well the scores separate members from others.

    Args:
        released: scores of the members [m] and of the others [n] under the released model, neither empty.
        untrained: scores of the same items under the initial model.
        modalities: modalities of the silo.
        trained: whether replies of the silo were merged.
    """
    auc, before = area(*released), area(*untrained)
    parts, parts_before = components(*released), components(*untrained)
    return ProbeResult(
        modalities,
        trained,
        len(released[0]),
        len(released[1]),
        estimate(auc, parts, 0.0),
        rate_of(*released),
        before,
        estimate(auc - before, (parts[0] - parts_before[0], parts[1] - parts_before[1]), -1.0),
    )


def probe(release: Release, *, pooled: bool = False, progress: Progress | None = None) -> Probe:
    """Test a released model with the items it was trained on and those it was evaluated on.

    ``pooled`` says that the method trains on the data of all silos in one place.

    Raises:
        OtherModelError: the parameters are not the released ones.
        InputError: the run's data are not on this machine, the release is damaged, or no silo's reply was merged.
    """
    scenario, summary = release.scenario, read_summary(release.run)
    population = data_of(release, progress, pooled=pooled)
    took_part = {name for name, silo in summary.per_silo.items() if silo.participations}
    train = [silo.trained for silo in members_of(scenario, population)]
    trained = [rows for silo, rows in zip(population.silos, train, strict=True) if silo.name in took_part]
    if not sum(map(len, trained)):
        problem = "a model into which no silo's reply was merged"
        raise InputError(f"--probe {release.run.root}", problem, "a model that was trained")
    all_rows = np.sort(np.concatenate([*train, population.evaluated]))
    models = release.model(population.prepared), population.build_model(scenario, release.device, MODALITIES)
    by_model = [
        _scored(model, population, all_rows, _step(progress, number, len(all_rows)))
        for number, model in enumerate(models)
    ]

    def of(members: Rows, others: Rows, modalities: tuple[str, ...], part: bool) -> ProbeResult:
        inside, outside = np.searchsorted(all_rows, members), np.searchsorted(all_rows, others)
        released, untrained = ((values[inside], values[outside]) for values in by_model)
        return compared(released, untrained, modalities, trained=part)

    per_silo = {}
    for silo, rows, heldout in zip(population.silos, train, population.heldout, strict=True):
        # Pooled data are not partitioned among silos, so no silo's held-out items are comparable.
        if len(rows) and len(heldout) and not pooled:
            modalities = tuple(name for name, present in (("image", silo.image), ("text", silo.text)) if present)
            per_silo[silo.name] = of(rows, heldout, modalities, silo.name in took_part)
    overall = of(np.concatenate(trained), population.evaluated, MODALITIES, True)
    return Probe(release.files.used, bool(summary.personal), scenario.evaluation.split, overall, per_silo)


def data_of(release: Release, progress: Progress | None, *, pooled: bool = False) -> Population:
    """The data of a run and their partition among its silos.

    Raises:
        InputError: they are not on this machine.
    """
    try:
        population = build_population(release.scenario, progress, release.cache, pooled=pooled)
    except InputError as error:
        place = f"--probe {release.run.root}: {error.place}"
        raise InputError(place, error.found, f"the run's data on this machine ({error.allowed})") from None
    release.check_data(population.prepared)
    return population


@dataclass(frozen=True)
class Members:
    """The items of a silo, as rows of the data set."""

    silo: SiloFacts
    rows: Rows  # on which it trains
    trained: Rows  # those of them that are pairs; scores are those of pairs
    held_out: Rows  # its part of the evaluated split

    @property
    def items(self) -> int:
        """Number of items that it trains on."""
        return len(self.rows)


def members_of(scenario: Scenario, population: Population) -> list[Members]:
    """The items of each silo: its training items, without those held out by ``training.validation``."""
    paired, share = np.all(population.prepared.present, axis=1), scenario.training.validation
    found = []
    for silo, held_out in zip(population.silos, population.heldout, strict=True):
        rows, _ = validation_split(population.rows_of(silo).dataset, share * silo.paired, scenario.seed, silo.name)
        found.append(Members(silo, rows, rows[paired[rows]], held_out))
    return found


def _step(progress: Progress | None, number: int, items: int) -> Callable[[int], None]:
    def report(done: int) -> None:
        if progress is not None:
            progress("items scored by two models", number * items + done, 2 * items)

    return report


def _scored(model: TwoTower, population: Population, rows: Rows, report: Callable[[int], None]) -> F64:
    """Scores [n] of rows of the data set."""
    return scores(*embedded(model, population, rows, report))


def embedded(
    model: TwoTower,
    population: Population,
    rows: Rows,
    report: Callable[[int], None] = lambda _: None,
    encoders: Encoders | None = None,
) -> tuple[F32, F32]:
    """Embeddings of the images and of the first captions of n rows of the data set, float32 [n, d] each.

    By the model's towers, or by ``encoders`` of a personal model.
    """
    images, texts = [], []
    for start in range(0, len(rows), _CHUNK):
        report(start)
        items = load_silo_dataset(population.prepared, rows[start : start + _CHUNK], image=True, text=True)
        first_captions = replace(items, captions=torch.ones_like(items.captions))
        found = embed(encoders or encoders_of(model), first_captions, binary=model.binary)
        images.append(found.image)
        texts.append(found.text)
    report(len(rows))
    return np.concatenate(images), np.concatenate(texts)


def _above(estimate_: Estimate, bound: float) -> bool:
    """Whether an estimate is significantly above a bound; without an interval, its value decides."""
    return (estimate_.value if estimate_.low is None else estimate_.low) > bound


def _verdict(overall: ProbeResult) -> str:
    if min(overall.members, overall.others) < 2:
        return "too few items to say"
    if not _above(overall.auc, 0.5):
        return "this test does not distinguish training items from held-out ones"
    if _above(overall.added, 0.0):
        return "this test distinguishes training items from held-out ones, because of the training"
    return "this test distinguishes them, but equally well without training: they differ in more than membership"


def show(measured: Probe, console: Console) -> None:
    """Print the result of the test, and what it means."""
    table = Table(
        Column("", overflow="fold"),
        "trained on / held out",
        title="can training items be distinguished from held-out ones?",
    )
    for head in ("AUC", f"TPR at {FALSE_POSITIVES:.0%} FPR", "by training"):
        table.add_column(head, no_wrap=True)
    for name, result in {"all": measured.overall, **measured.per_silo}.items():
        modality = f", {result.modalities[0]}" if len(result.modalities) == 1 else ""
        label = name + modality + ("" if result.trained else ", took no part")
        counts = f"{result.members:,} / {result.others:,}"
        table.add_row(label, counts, str(result.auc), str(result.tpr), str(result.added))
    console.print(table)
    lines = (
        f"{_verdict(measured.overall)}. AUC: the probability that a training item scores above a held-out one; 0.5 is"
        " guessing. By training: the AUC minus that of the initial model. ± is half the width of a 95 % interval.",
        "A stronger attack may reveal more. The test covers the shared model of the release, "
        f"{measured.digest[:16]}{'; the personal parameters of the silos are not tested' * measured.personal}.",
    )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
