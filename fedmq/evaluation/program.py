"""The evaluator program: evaluates models on the held-out split in a separate process, in parallel with the rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

from fedmq.clock import WallClock
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.data.label_levels import fine_columns
from fedmq.data.silo_dataset import SiloDataset, load_silo_dataset
from fedmq.encoders.gpu import release_unused_memory
from fedmq.errors import RemoteWireError
from fedmq.evaluation.embedding import embed
from fedmq.evaluation.metrics import Measure, Measured, measure
from fedmq.evaluation.user_metrics import measures_of
from fedmq.federation.population import Population, build_population, device_of
from fedmq.federation.protocol import Encoders, encoders_of, take
from fedmq.models.hash_networks import Tower
from fedmq.models.query_bank import Bank
from fedmq.models.two_tower import TwoTower
from fedmq.storage.logs import Logger, LogOptions, open_log
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.channel import Channel
from fedmq.wire.keys import load_accepted, load_identity
from fedmq.wire.layout import agree, require_layout
from fedmq.wire.log_records import NoteKind
from fedmq.wire.message_log import MessageLog, StartFacts
from fedmq.wire.messages import EVALUATOR, Kind
from fedmq.wire.payloads import ClassPrototypes, Error, Memory, Metrics, Model, Payload


@dataclass(frozen=True)
class EvaluatorArguments:
    """How the evaluator is started.

    Args:
        run: the resolved run, the same as the coordinator's.
        connect: the coordinator's URI.
        keys: folder of the evaluator's key and the coordinator's public key.
        out: folder for its message log.
        device: ``auto``, ``cpu`` or ``cuda:N``; None takes the scenario's.
        data: folder of the prepared data; None looks it up.
        logs: of the log for operators; None for none.
    """

    run: ResolvedRun
    connect: str
    keys: Path
    out: Path
    device: str | None = None
    data: Path | None = None
    logs: LogOptions | None = None

    @property
    def scenario(self) -> Scenario:
        """The run's scenario, as resolved."""
        return self.run.scenario


def _with_fine_labels(population: Population, rows: np.ndarray) -> SiloDataset:
    """Rows in both modalities, with the labels that define relevance: the finer ones if there are two levels."""
    share = load_silo_dataset(population.prepared, rows, image=True, text=True)
    if share.labels is None:
        return share
    return replace(share, labels=share.labels[:, fine_columns(population.prepared.label_names)].contiguous())


@dataclass(frozen=True)
class HeldOut:
    """The items on which models are evaluated.

    Args:
        scenario: cut-offs, and the seed of the gallery's order.
        dataset: the evaluated split, in both modalities.
        items: indices into the split of each silo's items, by silo.
        gallery: the items that label metrics retrieve; None takes the split itself.
        own: indices into the gallery of each silo's items, by silo.
        measures: the measures to compute.
    """

    scenario: Scenario
    dataset: SiloDataset
    items: Mapping[str, np.ndarray]
    gallery: SiloDataset | None
    own: Mapping[str, np.ndarray]
    measures: tuple[Measure, ...]

    @classmethod
    def load(cls, scenario: Scenario, population: Population) -> HeldOut:
        """Load the evaluated split of a population.

        Raises:
            InputError: a user-defined metric cannot be loaded.
        """
        # Rows are sorted, so searchsorted finds their indices.
        items = {
            silo.name: np.searchsorted(population.evaluated, rows)
            for silo, rows in zip(population.silos, population.heldout, strict=True)
        }
        own = {
            silo.name: np.searchsorted(population.database, rows)
            for silo, rows in zip(population.silos, population.galleries, strict=True)
        }
        wanted = scenario.evaluation.gallery == "database" and bool(population.prepared.label_names)
        gallery = _with_fine_labels(population, population.database) if wanted else None
        measures = measures_of(scenario.evaluation)
        return cls(scenario, _with_fine_labels(population, population.evaluated), items, gallery, own, measures)

    def measured(self, encoders: Encoders, *, binary: bool, names: Collection[str]) -> Metrics:
        """Evaluate a model on the whole split, and on the parts of some silos.

        A silo's queries are its part of the split. They retrieve from the whole gallery, so that the figures of silos
        of different sizes have the same chance level; with ``evaluation.silo_gallery: own`` from the silo's part of it,
        which has the same proportions as its training items.
        """
        evaluation, seed = self.scenario.evaluation, self.scenario.seed
        embedded = embed(encoders, self.dataset, binary=binary)
        gallery = None if self.gallery is None else embed(encoders, self.gallery, binary=binary)
        whole = Measured(embedded, evaluation, gallery, seed)
        per_silo: dict[str, dict[str, float]] = {}
        for name in names:
            part = whole.silo(self.items[name])
            if evaluation.silo_gallery == "own":
                own = None if gallery is None else gallery.subset(self.own[name])
                part = Measured(part.queries, evaluation, own, seed)
            per_silo[name] = measure(part, self.measures)
        return Metrics(measure(whole, self.measures, whole_split=True), per_silo)


class Evaluator:
    """Evaluates shared models on the held-out split.

    Args:
        scenario: as resolved.
        population: the data and its partition.
        device: ``cpu`` or ``cuda:N``.
    """

    def __init__(self, scenario: Scenario, population: Population, device: str) -> None:
        self.model = population.build_model(scenario, device, ("image", "text"))
        self.heldout = HeldOut.load(scenario, population)

    def evaluate(self, payloads: Sequence[Payload]) -> Metrics:
        """Evaluate a model.

        Args:
            payloads: the model, and what else its inference needs.

        Raises:
            RemoteWireError: no model, or more than one.
        """
        load_inference(self.model, payloads)
        return self.heldout.measured(encoders_of(self.model), binary=self.model.binary, names=tuple(self.heldout.items))


def load_inference(model: TwoTower, payloads: Sequence[Payload]) -> None:
    """Load a released model: its parameters and, where it has one, its memory or its query bank.

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
    """The query bank in a payload: image rows, then the same number of text rows, without those that have no sample.

    Raises:
        RemoteWireError: the rows do not have the width of the model's embeddings, a modality has no row, or the model
            is a hash network.
    """
    rows = normalize(torch.tensor(payload.prototypes, device=model.flat.device), dim=1)
    counts = torch.tensor(payload.counts, device=model.flat.device)
    half, odd = divmod(len(counts), 2)
    present = counts > 0
    if model.binary or odd or rows.shape[1] != model.dim or not (present[:half].any() and present[half:].any()):
        what = f"a query bank of shape {list(rows.shape)}"
        raise RemoteWireError("layout", f"{what}; here image rows, then as many text rows, [2 J, {model.dim}]")
    image, text = (slice(0, half), slice(half, None))
    parts = (x[part][present[part]] for part in (image, text) for x in (rows, counts.float()))
    return Bank(*parts)


def run_evaluator(
    arguments: EvaluatorArguments,
    logger: Logger | None = None,
    *,
    measured: Callable[[], None] = lambda: None,
) -> None:
    """Run the evaluator until the coordinator sends a stop.

    Args:
        arguments: of the start.
        logger: the log for operators; None opens that of the arguments.
        measured: called after each evaluation.

    Raises:
        InputError: a key or the data cannot be read or is invalid.
    """
    torch.set_num_threads(1)
    scenario = arguments.scenario
    identity, accepted = load_identity(arguments.keys, EVALUATOR), load_accepted(arguments.keys)
    clock = WallClock()
    last_sent = {"at": 0.0}
    run = arguments.run.id
    logger = logger or open_log(arguments.logs, EVALUATOR)
    log = MessageLog(RunFolder(arguments.out).messages(EVALUATOR), EVALUATOR, clock, logger=logger)
    log.note(NoteKind.STARTED, run=run)
    link = Channel(
        arguments.connect, identity, accepted, run, log, clock, now=lambda: last_sent["at"], progress=logger.warning
    )
    try:
        here = scenario.model_copy(update={"device": arguments.device or scenario.device})
        population = build_population(here, folder=arguments.data)
        evaluator = Evaluator(scenario, population, device_of(here.device))
        log.start(identity, accepted, StartFacts.of(arguments.run, population.prepared.content))
        link.start()
        logger.info("connecting", uri=arguments.connect, items=len(evaluator.heldout.dataset))
        while True:
            message = link.receive()
            if message is None or message.header.kind is Kind.STOP:
                break
            if message.header.kind is Kind.LAYOUT:
                agree(message.layout, evaluator.model.layout)
            if message.header.kind is not Kind.EVALUATE:
                continue
            last_sent["at"] = message.header.sent_at
            header = message.header
            try:
                result: Metrics | Error = evaluator.evaluate(message.payloads)
            except Exception as error:  # report any failure of an evaluation to the coordinator
                result = Error.saying("evaluation_failed", f"{type(error).__name__}: {error}")
            release_unused_memory()
            kind = Kind.ERROR if isinstance(result, Error) else Kind.REPLY
            link.send(
                kind, (result,), sequence=header.sequence, reply_to=header.sequence, base_version=header.base_version
            )
            failed = {"error": result.text} if isinstance(result, Error) else {}
            (logger.error if failed else logger.info)("evaluated", version=header.base_version, **failed)
            measured()
    finally:
        link.close()
    logger.info("head of the message log", records=log.records, head=log.head)
