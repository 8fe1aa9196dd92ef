"""The evaluator program: measures models on the held-out split, in a process of its own, beside the rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.functional import normalize

from fedmq import seeds
from fedmq.clock import WallClock
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Evaluation, Scenario
from fedmq.data.label_levels import fine_columns
from fedmq.data.silo_dataset import SiloDataset, load_silo_dataset
from fedmq.encoders.gpu import give_back
from fedmq.errors import RemoteWireError
from fedmq.evaluation import hamming, label_metrics, recall
from fedmq.federation.population import Population, build_population, device_of
from fedmq.federation.protocol import Encoders, encoders_of, take
from fedmq.models.hash_networks import Tower
from fedmq.models.query_bank import Bank
from fedmq.models.two_tower import TwoTower
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.channel import Channel
from fedmq.wire.keys import load_accepted, load_identity
from fedmq.wire.layout import agree, require_layout
from fedmq.wire.log_records import NoteKind
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import EVALUATOR, ClassPrototypes, Error, Kind, Memory, Metrics, Model, Payload

_BATCH = 256
#: By how much float32 vectors of unit length may miss it.
_LENGTH = 1e-4


@dataclass(frozen=True)
class EvaluatorArguments:
    """How the evaluator is started.

    Args:
        run: as the coordinator has it.
        connect: the coordinator's URI.
        keys: folder of its own key and of the coordinator's public key.
        out: folder for its message log.
        device: ``auto``, ``cpu`` or ``cuda:N``; None takes the scenario's.
        data: folder of the prepared data where the starter knows it; None finds it.
    """

    run: ResolvedRun
    connect: str
    keys: Path
    out: Path
    device: str | None = None
    data: Path | None = None

    @property
    def scenario(self) -> Scenario:
        """The run's scenario, as resolved."""
        return self.run.scenario


Way = Literal["i2t", "t2i", "i2i", "t2t"]


@dataclass(frozen=True)
class Embedded:
    """Items in the joint space.

    Args:
        image: float32 [n, d].
        text: float32 [m, d], one row per caption.
        owner: int64 [m], the image of each caption, 0 to n - 1.
        labels: uint8 [n, L] multi-hot; None where the data set has none.
        binary: the vectors are codes, of which the signs rank.
    """

    image: np.ndarray
    text: np.ndarray
    owner: np.ndarray
    labels: np.ndarray | None = None
    binary: bool = False

    def subset(self, items: np.ndarray) -> Embedded:
        """Some of the images [k] with their captions."""
        place = np.full(len(self.image), -1, np.int64)
        place[items] = np.arange(len(items))
        kept = place[self.owner] >= 0
        labels = None if self.labels is None else self.labels[items]
        return replace(
            self, image=self.image[items], text=self.text[kept], owner=place[self.owner[kept]], labels=labels
        )

    @property
    def first_captions(self) -> np.ndarray:
        """The first caption of each item, float32 [n, d]: label metrics take one text per item."""
        return self.text[np.searchsorted(self.owner, np.arange(len(self.image)))]


def embed(encoders: Encoders, share: SiloDataset, *, binary: bool) -> Embedded:
    """Embed every image and every caption of a share that has both."""
    if share.image is None or share.text is None:
        raise ValueError("evaluation needs both modalities")
    owner = torch.repeat_interleave(torch.arange(len(share)), share.captions)
    number = torch.cat([torch.arange(int(count)) for count in share.captions])
    with torch.no_grad():
        image = torch.cat([encoders.image(part) for part in torch.split(share.image, _BATCH)])
        pairs = zip(torch.split(owner, _BATCH), torch.split(number, _BATCH), strict=True)
        text = torch.cat([encoders.caption(share.text[item, caption]) for item, caption in pairs])
    labels = None if share.labels is None else share.labels.numpy()
    return Embedded(image.cpu().numpy(), text.cpu().numpy(), owner.numpy(), labels, binary)


def measure(
    queries: Embedded, evaluation: Evaluation, gallery: Embedded | None = None, seed: int = 0
) -> dict[str, float]:
    """Recall@{1,5,10} both ways among the queries, and where there are labels mAP both ways, as fractions.

    Args:
        queries: the evaluated items.
        evaluation: cut-offs of the label metrics.
        gallery: what the label metrics retrieve from; None is the queries' own other modality.
        seed: of the order of items and captions, which settles ties.

    Returns:
        ``i2t_r1``, ``t2i_r1``, ``mean_r1``, ...; ``i2t_medr`` and ``t2i_medr``; ``spread_image`` and ``spread_text``;
        with labels ``map_i2t``, ``map_t2i``, ``map``, the means over tied orders ``map_expected_i2t``, ... of codes,
        and ``map_at50``, ``ndcg_at50``, ... for each cut-off (means of both ways); with ``evaluation.within`` and a
        gallery of its own also ``map_i2i``, ``map_t2t``, their cut-offs and of codes their means over tied orders.
    """
    image, text, owner = _comparable(queries, seed)
    found = recall.recalls(image, text, owner)
    found |= {"spread_image": recall.spread(image), "spread_text": recall.spread(text)}
    if queries.labels is None:
        return found
    found |= _label_metrics(queries, evaluation, gallery or queries, seed)
    return found if gallery is None or not evaluation.within else found | _within(queries, evaluation, gallery, seed)


def fold_recalls(items: Embedded, size: int, seed: int = 0) -> dict[str, float]:
    """Recall within consecutive folds of ``size`` items, the mean over the folds that are full.

    COCO's 5,000 test images so make five galleries of 1,000, beside the one of 5,000.

    Args:
        items: the evaluated items, at least ``size``.
        size: items of a fold.
        seed: of the order within a fold, which settles ties.

    Returns:
        ``fold_i2t_r1``, ``fold_t2i_r1``, ``fold_mean_r1``, ...
    """
    starts = range(0, len(items.image) - size + 1, size)
    found = []
    for start in starts:
        found.append(recall.recalls(*_comparable(items.subset(np.arange(start, start + size)), seed)))
    return {f"fold_{name}": float(np.mean([each[name] for each in found])) for name in found[0]}


def _comparable(items: Embedded, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, captions and the captions' owners, whose inner products rank: codes as signs, others of unit length.

    Codes tie massively, and a stable order would let captions that lie image by image come all together or not at
    all: they are shuffled. Embeddings, DSCMR's apart, are of unit length as they are, and do not tie.
    """
    if not items.binary:
        return _unit(items.image), _unit(items.text), items.owner
    generator = seeds.numpy_generator(seed, "recalls")
    rows, captions = generator.permutation(len(items.image)), generator.permutation(len(items.text))
    places = np.argsort(rows)
    return _signs(items.image[rows]), _signs(items.text[captions]), places[items.owner[captions]]


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors [n, d] scaled to unit length, zero ones left; as they are, to the bit, where all have it already."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    lengths[lengths == 0] = 1
    return vectors if np.abs(lengths - 1).max(initial=0) <= _LENGTH else vectors / lengths


def _signs(outputs: np.ndarray) -> np.ndarray:
    """Outputs as signs, whose products are whole numbers and order as Hamming distances do."""
    return hamming.sign(outputs).astype(np.float32)


def _label_metrics(queries: Embedded, evaluation: Evaluation, gallery: Embedded, seed: int) -> dict[str, float]:
    i2t, t2i = rank(queries, gallery, evaluation, seed, ("i2t", "t2i")).values()
    found = {"map_i2t": i2t.map, "map_t2i": t2i.map, "map": (i2t.map + t2i.map) / 2}
    if queries.binary:
        found |= {"map_expected_i2t": i2t.map_expected, "map_expected_t2i": t2i.map_expected}
        found["map_expected"] = (i2t.map_expected + t2i.map_expected) / 2
    for n in evaluation.map_at:
        found |= {f"map_at{n}_i2t": i2t.map_at[n], f"map_at{n}_t2i": t2i.map_at[n]}
        found[f"map_at{n}"] = (i2t.map_at[n] + t2i.map_at[n]) / 2
    for n in evaluation.ndcg_at:
        ndcg = [(each.ndcg if evaluation.ndcg_ideal == "database" else each.ndcg_retrieved)[n] for each in (i2t, t2i)]
        found |= {f"ndcg_at{n}_i2t": ndcg[0], f"ndcg_at{n}_t2i": ndcg[1], f"ndcg_at{n}": sum(ndcg) / 2}
    return found


def _within(queries: Embedded, evaluation: Evaluation, gallery: Embedded, seed: int) -> dict[str, float]:
    """What retrieval within a modality finds, as image hashing measures it: mAP and its cut-offs."""
    found: dict[str, float] = {}
    for way, each in rank(queries, gallery, evaluation, seed, ("i2i", "t2t")).items():
        found |= {f"map_{way}": each.map, **{f"map_at{n}_{way}": each.map_at[n] for n in evaluation.map_at}}
        if queries.binary:
            found[f"map_expected_{way}"] = each.map_expected
    return found


def rank(
    queries: Embedded,
    gallery: Embedded,
    evaluation: Evaluation,
    seed: int,
    ways: Sequence[Way],
    *,
    top_n: Sequence[int] = (),
    curves: bool = False,
) -> dict[Way, label_metrics.RankingMetrics]:
    """Label metrics of some ways of retrieval, one text per item: from images to texts, within images, ...

    Args:
        queries: the evaluated items.
        gallery: what is retrieved from.
        evaluation: cut-offs of mAP and NDCG.
        seed: of the gallery's order.
        ways: which.
        top_n: cut-offs of precision and recall among the first N.
        curves: precision and recall at every place and radius, too.
    """
    if queries.labels is None or gallery.labels is None:
        raise ValueError("label metrics need labels")
    metrics_of = label_metrics.hamming_metrics if queries.binary else label_metrics.cosine_metrics
    order = seeds.derive(seed, "gallery")
    query = {"i": queries.image, "t": queries.first_captions}
    database = {"i": gallery.image, "t": gallery.first_captions}
    return {
        way: metrics_of(
            query[way[0]],
            database[way[-1]],
            queries.labels,
            gallery.labels,
            at=evaluation.map_at,
            denominator=evaluation.map_denominator,
            empty=evaluation.map_empty,
            ndcg_at=evaluation.ndcg_at,
            top_n=top_n,
            curves=curves,
            order_seed=order,
        )
        for way in ways
    }


def _judged(population: Population, rows: np.ndarray) -> SiloDataset:
    """Some rows in both modalities, with the labels that relevance goes by: the lower ones of two levels."""
    share = load_silo_dataset(population.prepared, rows, image=True, text=True)
    if share.labels is None:
        return share
    return replace(share, labels=share.labels[:, fine_columns(population.prepared.label_names)].contiguous())


@dataclass(frozen=True)
class HeldOut:
    """What models are measured on.

    Args:
        scenario: cut-offs, and the seed of the gallery's order.
        share: the evaluated split, in both modalities.
        items: of each silo, places in the split that belong to it.
        gallery: what label metrics retrieve from; None is the split itself.
        own: of each silo, places in the gallery that belong to it.
    """

    scenario: Scenario
    share: SiloDataset
    items: Mapping[str, np.ndarray]
    gallery: SiloDataset | None
    own: Mapping[str, np.ndarray]

    @classmethod
    def load(cls, scenario: Scenario, population: Population) -> HeldOut:
        """Load the evaluated split of a world."""
        # Rows are sorted everywhere: where a row stands among others is its place.
        items = {
            silo.name: np.searchsorted(population.evaluated, rows)
            for silo, rows in zip(population.silos, population.heldout, strict=True)
        }
        own = {
            silo.name: np.searchsorted(population.database, rows)
            for silo, rows in zip(population.silos, population.galleries, strict=True)
        }
        wanted = scenario.evaluation.gallery == "database" and bool(population.prepared.label_names)
        gallery = _judged(population, population.database) if wanted else None
        return cls(scenario, _judged(population, population.evaluated), items, gallery, own)

    def measured(self, encoders: Encoders, *, binary: bool, names: Collection[str]) -> Metrics:
        """Measure a model over the whole split, and for some silos on their own share of it.

        A silo's own queries retrieve from its own share of the gallery, which the same proportions cut as its training
        items; where the gallery is the split itself, from its own share of that.
        """
        evaluation, seed = self.scenario.evaluation, self.scenario.seed
        embedded = embed(encoders, self.share, binary=binary)
        gallery = None if self.gallery is None else embed(encoders, self.gallery, binary=binary)
        per_silo = {
            name: measure(
                embedded.subset(self.items[name]),
                evaluation,
                None if gallery is None else gallery.subset(self.own[name]),
                seed,
            )
            for name in names
        }
        folds = fold_recalls(embedded, evaluation.fold_size, seed) if evaluation.fold_size else {}
        return Metrics(measure(embedded, evaluation, gallery, seed) | folds, per_silo)


class Evaluator:
    """The held-out split loaded, ready to measure global models.

    Args:
        scenario: as resolved.
        population: the data and who holds what of it.
        device: ``cpu`` or ``cuda:N``.
    """

    def __init__(self, scenario: Scenario, population: Population, device: str) -> None:
        self.model = population.build_model(scenario, device, ("image", "text"))
        self.heldout = HeldOut.load(scenario, population)

    def evaluate(self, payloads: Sequence[Payload]) -> Metrics:
        """Measure a model.

        Args:
            payloads: the model, and whatever else its inference needs.

        Raises:
            RemoteWireError: no model, or more than one.
        """
        load_inference(self.model, payloads)
        return self.heldout.measured(encoders_of(self.model), binary=self.model.binary, names=tuple(self.heldout.items))


def load_inference(model: TwoTower, payloads: Sequence[Payload]) -> None:
    """Load a released model: its parameters and, where it has one, the memory that enhances its codes or a query bank.

    Raises:
        RemoteWireError: no model, more than one, one of another layout, or a bank that does not fit it.
    """
    received = take(payloads, Model)
    require_layout({model.layout.digest: model.layout}, received.layout_digest, np.asarray(received.buffer))
    model.load(np.asarray(received.buffer))
    for memory in (payload for payload in payloads if isinstance(payload, Memory)):
        centroids = torch.tensor(memory.centroids, device=model.flat.device)
        for tower in (model.visual, model.text):
            if isinstance(tower, Tower):
                tower.memory = centroids
    banks = [payload for payload in payloads if isinstance(payload, ClassPrototypes)]
    model.bank = bank_of(banks[0], model) if banks else None


def bank_of(payload: ClassPrototypes, model: TwoTower) -> Bank:
    """The query bank in a payload: rows of images, then as many of texts, those without a sample left out.

    Raises:
        RemoteWireError: rows of another length than the model's embeddings, no row of a modality, or a hash network.
    """
    rows = normalize(torch.tensor(payload.prototypes, device=model.flat.device), dim=1)
    counts = torch.tensor(payload.counts, device=model.flat.device)
    half, odd = divmod(len(counts), 2)
    there = counts > 0
    if model.binary or odd or rows.shape[1] != model.dim or not (there[:half].any() and there[half:].any()):
        what = f"a query bank of shape {list(rows.shape)}"
        raise RemoteWireError("layout", f"{what}; here image rows, then as many text rows, [2 J, {model.dim}]")
    image, text = (slice(0, half), slice(half, None))
    parts = (x[part][there[part]] for part in (image, text) for x in (rows, counts.float()))
    return Bank(*parts)


def run_evaluator(
    arguments: EvaluatorArguments,
    progress: Callable[[str], None] = lambda _: None,
    *,
    measured: Callable[[], None] = lambda: None,
) -> None:
    """Run the evaluator until the coordinator says stop.

    Args:
        arguments: how it was started.
        progress: told one line whenever something worth telling happens.
        measured: called when a version has been measured.

    Raises:
        InputError: a key or the data is not as it must be.
    """
    torch.set_num_threads(1)
    scenario = arguments.scenario
    identity, accepted = load_identity(arguments.keys, EVALUATOR), load_accepted(arguments.keys)
    clock = WallClock()
    told = {"at": 0.0}
    run = arguments.run.id
    log = MessageLog(RunFolder(arguments.out).messages(EVALUATOR), EVALUATOR, clock)
    log.note(NoteKind.STARTED, run=run)
    link = Channel(arguments.connect, identity, accepted, run, log, clock, now=lambda: told["at"], progress=progress)
    try:
        here = scenario.model_copy(update={"device": arguments.device or scenario.device})
        population = build_population(here, folder=arguments.data)
        evaluator = Evaluator(scenario, population, device_of(here.device))
        link.start()
        progress(f"{EVALUATOR}: {len(evaluator.heldout.share)} held-out items, connecting to {arguments.connect}")
        while True:
            message = link.receive()
            if message is None or message.header.kind is Kind.STOP:
                break
            if message.header.kind is Kind.LAYOUT:
                agree(message.layout, evaluator.model.layout)
            if message.header.kind is not Kind.EVALUATE:
                continue
            told["at"] = message.header.sent_at
            header = message.header
            try:
                result: Metrics | Error = evaluator.evaluate(message.payloads)
            except Exception as error:  # whatever a model does to its evaluation, the run is told why
                result = Error.saying("evaluation_failed", f"{type(error).__name__}: {error}")
            give_back()
            kind = Kind.ERROR if isinstance(result, Error) else Kind.REPLY
            link.send(
                kind, (result,), sequence=header.sequence, reply_to=header.sequence, base_version=header.base_version
            )
            progress(f"{EVALUATOR}: version {header.base_version} measured")
            measured()
    finally:
        link.close()
