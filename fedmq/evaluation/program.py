"""The evaluator program: measures models on the held-out split, in a process of its own, beside the rounds."""

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
from fedmq.evaluation.embedded import embed
from fedmq.evaluation.metrics import Measure, measure
from fedmq.evaluation.user_metrics import measures_of
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
        dataset: the evaluated split, in both modalities.
        items: of each silo, places in the split that belong to it.
        gallery: what label metrics retrieve from; None is the split itself.
        own: of each silo, places in the gallery that belong to it.
        measures: what is computed.
    """

    scenario: Scenario
    dataset: SiloDataset
    items: Mapping[str, np.ndarray]
    gallery: SiloDataset | None
    own: Mapping[str, np.ndarray]
    measures: tuple[Measure, ...]

    @classmethod
    def load(cls, scenario: Scenario, population: Population) -> HeldOut:
        """Load the evaluated split of a world.

        Raises:
            InputError: one of the user's own metrics cannot be loaded.
        """
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
        measures = measures_of(scenario.evaluation)
        return cls(scenario, _judged(population, population.evaluated), items, gallery, own, measures)

    def measured(self, encoders: Encoders, *, binary: bool, names: Collection[str]) -> Metrics:
        """Measure a model over the whole split, and for some silos on their own share of it.

        A silo's own queries retrieve from its own share of the gallery, which the same proportions cut as its training
        items; where the gallery is the split itself, from its own share of that.
        """
        evaluation, seed = self.scenario.evaluation, self.scenario.seed
        embedded = embed(encoders, self.dataset, binary=binary)
        gallery = None if self.gallery is None else embed(encoders, self.gallery, binary=binary)
        per_silo = {
            name: measure(
                embedded.subset(self.items[name]),
                evaluation,
                None if gallery is None else gallery.subset(self.own[name]),
                seed,
                self.measures,
            )
            for name in names
        }
        return Metrics(measure(embedded, evaluation, gallery, seed, self.measures, whole_split=True), per_silo)


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
        progress(f"{EVALUATOR}: {len(evaluator.heldout.dataset)} held-out items, connecting to {arguments.connect}")
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
            release_unused_memory()
            kind = Kind.ERROR if isinstance(result, Error) else Kind.REPLY
            link.send(
                kind, (result,), sequence=header.sequence, reply_to=header.sequence, base_version=header.base_version
            )
            progress(f"{EVALUATOR}: version {header.base_version} measured")
            measured()
    finally:
        link.close()
