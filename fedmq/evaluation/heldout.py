"""The items on which models are evaluated, their embeddings, and the models as they are released for inference."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import normalize

from fedmq.config.scenario import Scenario
from fedmq.data.labels import fine_columns
from fedmq.data.silo_dataset import SiloDataset
from fedmq.errors import RemoteWireError
from fedmq.evaluation.custom_metrics import measures_of
from fedmq.evaluation.gallery_ranking import Embedded
from fedmq.evaluation.metrics import Measure, Measured, measure
from fedmq.federation.population import Population
from fedmq.federation.protocol import Encoders, take
from fedmq.models.hash_networks import towers_of
from fedmq.models.query_bank import Bank
from fedmq.models.two_tower import TwoTower
from fedmq.wire.layout import require_layout
from fedmq.wire.payloads import ClassPrototypes, Memory, Metrics, Model, Payload, SiloMetrics

_BATCH = 256


def embed(encoders: Encoders, items: SiloDataset, *, binary: bool) -> Embedded:
    """Embed every image and every caption of items with both modalities; a ``binary`` model computes hash codes.

    Raises:
        ValueError: a modality is missing.
    """
    if items.image is None or items.text is None:
        raise ValueError("evaluation needs both modalities")
    owner = torch.repeat_interleave(torch.arange(len(items)), items.captions)
    number = torch.arange(len(owner)) - (torch.cumsum(items.captions, 0) - items.captions)[owner]
    with torch.no_grad():
        image = torch.cat([encoders.image(part) for part in torch.split(items.image, _BATCH)])
        pairs = zip(torch.split(owner, _BATCH), torch.split(number, _BATCH), strict=True)
        text = torch.cat([encoders.caption(items.text[item, caption]) for item, caption in pairs])
    labels = None if items.labels is None else items.labels.numpy()
    return Embedded(image.cpu().numpy(), text.cpu().numpy(), owner.numpy(), labels, binary)


def _with_fine_labels(population: Population, rows: np.ndarray) -> SiloDataset:
    """Rows in both modalities, with the labels that define relevance: the finer ones if there are two levels."""
    dataset = population.load(rows, image=True, text=True)
    if dataset.labels is None:
        return dataset
    return replace(dataset, labels=dataset.labels[:, fine_columns(population.run_data.label_names)].contiguous())


@dataclass(frozen=True)
class HeldOut:
    """The items on which models are evaluated."""

    scenario: Scenario  # cut-offs, and the seed of the gallery's order
    dataset: SiloDataset  # the evaluated split, in both modalities
    items: Mapping[str, np.ndarray]  # indices into the split of each silo's items, by silo
    gallery: SiloDataset | None  # the items that label metrics retrieve; None takes the split itself
    own: Mapping[str, np.ndarray]  # indices into the gallery of each silo's items, by silo
    measures: tuple[Measure, ...]  # the measures to compute

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
        wanted = scenario.evaluation.gallery == "database" and bool(population.run_data.label_names)
        gallery = _with_fine_labels(population, population.database) if wanted else None
        measures = measures_of(scenario.evaluation)
        return cls(scenario, _with_fine_labels(population, population.evaluated), items, gallery, own, measures)

    def measured(
        self, encoders: Encoders, *, binary: bool, names: Collection[str], threads: int | None = None
    ) -> Metrics:
        """Evaluate a model on the whole split, and on the parts of some silos.

        A silo's queries are its part of the split. They retrieve from the whole gallery, so that the metrics of silos
        of different sizes have the same chance level; with ``evaluation.silo_gallery: own`` from the silo's part of it,
        which has the same proportions as its training items. ``threads``: see :class:`Measured`.
        """
        evaluation, seed = self.scenario.evaluation, self.scenario.seed
        embedded = embed(encoders, self.dataset, binary=binary)
        gallery = None if self.gallery is None else embed(encoders, self.gallery, binary=binary)
        whole = Measured(embedded, evaluation, gallery, seed, threads=threads)
        per_silo: dict[str, dict[str, float]] = {}
        for name in names:
            part = whole.silo(self.items[name])
            if evaluation.silo_gallery == "own":
                own = None if gallery is None else gallery.subset(self.own[name])
                part = Measured(part.queries, evaluation, own, seed)
            per_silo[name] = measure(part, self.measures)
        return Metrics(measure(whole, self.measures, whole_split=True), per_silo)

    def silo_metrics(self, encoders: Encoders, *, binary: bool, name: str) -> SiloMetrics:
        """Evaluate a model on a silo's own held-out items; this process does not have those of other silos.

        Folds larger than the number of items are left out.
        """
        evaluation, seed, n = self.scenario.evaluation, self.scenario.seed, len(self.items[name])
        if evaluation.fold_size is not None and evaluation.fold_size > n:
            evaluation = evaluation.model_copy(update={"fold_size": None})
        embedded = embed(encoders, self.dataset, binary=binary)
        gallery = None if self.gallery is None else embed(encoders, self.gallery, binary=binary)
        whole = Measured(embedded, evaluation, gallery, seed)
        return SiloMetrics(n, measure(whole, self.measures, whole_split=True))


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
        for tower in towers_of(model):
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


def forget_inference(model: TwoTower) -> None:
    """Remove what :func:`load_inference` loaded in addition to the parameters."""
    model.bank = None
    for tower in towers_of(model):
        tower.memory = None
