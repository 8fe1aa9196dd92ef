"""Shadow silos: what a silo would have sent if it had trained on other items of its distribution.

A curious coordinator has the model that it sent and the method, so it can train the silo's task on items of its choice,
and see how an update depends on them. The shadow's update is clipped and noised as the silo's, with other noise.
Where layers are personal, a shadow trains all tasks that the silo was sent, and so has personal layers of its own.

- Membership, ``shadows``: RMIA, which needs few reference models (Zarifzadeh et al., "Low-Cost High-Power Membership
  Inference Attacks", ICML 2024). An item's score is log Pr(x | θ) / Pr(x): its likelihood under the model plus the
  silo's update, relative to the mean over shadows, half of which were trained on it. The paper compares this ratio
  with that of other items, which keeps the order of a silo's items.
- Inversion: the rows of the update of a linear layer are sums of its inputs, weighted by the gradient of its outputs
  (Phong et al., "Privacy-Preserving Deep Learning via Additively Homomorphic Encryption", TIFS 2018). The row of a unit
  that one item of the batch activates is that item (Boenisch et al., "When the Curious Abandon Honesty", EuroS&P 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.special import logsumexp

import protocols
from fedmq.audit.membership_inference import F32, F64, Members, Rows, unit_rows
from fedmq.config.scenario import Scenario
from fedmq.config.sections import Modality
from fedmq.encoders.base import MODALITIES
from fedmq.federation.noise import protected
from fedmq.federation.population import Population
from fedmq.federation.protocol import FederatedProtocol, Local, SiloFacts, State, Task
from fedmq.models.two_tower import BRANCHES, TwoTower
from fedmq.runs.captured_payloads import Array, Fields
from fedmq.seeds import numpy_generator
from fedmq.wire.payloads import Delta, PartialDelta, Payload
from protocols.parts.aggregation import inserted, shortened, updating

#: Numbers of items in the batches whose updates are inverted.
BATCHES = (1, 2, 4, 8)
#: Number of the first shadow's task, which no task of a run reaches.
_FIRST = 1 << 40
#: Temperature of likelihoods, that of CLIP at the start of its training (Radford et al., ICML 2021).
TEMPERATURE = 0.07


@dataclass(frozen=True)
class Sent:
    """What a silo sent last."""

    state: State  # the coordinator's state then, from which its task was made
    version: int  # of that state
    payloads: Mapping[str, Fields]  # by kind
    layers: Sequence[str] | None  # of its update, if that is a part of the model
    before: Sent | None = None  # what it sent before, if personal layers follow from all of its tasks


@dataclass(frozen=True)
class Shadow:
    """A shadow silo after its last task."""

    change: torch.Tensor  # its update, float32 [P]
    local: Local  # its items and personal state


@dataclass(frozen=True)
class Inverted:
    """Inputs read from the update of one step."""

    modality: Modality
    batch: int  # number of items
    items: F64  # cosine of each of them with the nearest row of the update
    others: F64  # the same of held-out items, which were not in the batch


class Shadows:
    """Shadow silos of a run, in this process.

    Args:
        scenario: the run's.
        population: its data.
        model: its model, whose parameters are overwritten.
    """

    def __init__(self, scenario: Scenario, population: Population, model: TwoTower) -> None:
        self._scenario, self._population, self._model = scenario, population, model
        context = population.context(scenario, model)
        step = context.training.model_copy(update={"local_epochs": 1, "batch_size": max(BATCHES)})
        contexts = context, replace(context, training=step)
        self.method, self._step = (protocols.create(scenario.protocol, each, check=False) for each in contexts)

    @property
    def personal(self) -> bool:
        """Whether layers are personal, so that an update alone makes no model."""
        traits = self.method.traits()
        return traits.personalised and traits.shared_layers is not None

    def halves(self, silo: Members, sent: Sent, count: int) -> Iterator[Shadow]:
        """Shadows that have random halves of a silo's training pairs and held-out pairs.

        Two shadows share the pairs, so that each pair is one that half of the shadows were trained on.
        """
        rows = np.concatenate([silo.trained, silo.held_out])
        for number in range(count // 2):
            order = numpy_generator(self._scenario.seed, "shadows", silo.silo.name, number).permutation(rows)
            for half, part in enumerate(np.array_split(order, 2)):
                yield self.update(silo.silo, part, sent, _FIRST + 2 * number + half)

    def inverted(self, silo: Members, sent: Sent) -> Iterator[Inverted]:
        """Inputs read from the updates of one step on a few of a silo's items; none if such a step changes nothing."""
        name = silo.silo.name
        for number, batch in enumerate(each for each in BATCHES if each <= len(silo.rows)):
            drawn = numpy_generator(self._scenario.seed, "inversion", name, batch).permutation(silo.rows)[:batch]
            step = replace(sent, before=None)
            change = self.update(silo.silo, drawn, step, 2 * _FIRST + number, self._step).change
            for modality in MODALITIES:
                if not getattr(silo.silo, modality):
                    continue
                inputs = [self._inputs(modality, rows) for rows in (np.sort(drawn), silo.held_out)]
                rows = _rows_of(self._model, modality, change, inputs[0][0].shape[1:])
                if len(rows):
                    yield Inverted(modality, batch, *(_best(rows, *each) for each in inputs))

    def update(
        self, silo: SiloFacts, rows: Rows, sent: Sent, sequence: int, method: FederatedProtocol | None = None
    ) -> Shadow:
        """The silo that the run would have had with other training items, and its update.

        Args:
            silo: whose modalities it has.
            rows: its items.
            sent: what the silo sent, for the states that its tasks were made from.
            sequence: number of its last task, which decides its batches, captions and noise.
            method: the run's, with other options of the training; None for the run's.
        """
        scenario, method = self._scenario, method or self.method
        items = self._population.trained_items(scenario, np.sort(rows), image=silo.image, text=silo.text)
        local, tasks = Local(silo, items, self._model, {}), [sent]
        while (earlier := tasks[-1].before) is not None:
            tasks.append(earlier)
        for back, each in reversed([*enumerate(tasks)]):
            rate = scenario.training.rate_at(each.version, scenario.schedule_rounds)
            task = Task(sequence - back, each.version, each.version, rate, method.task(each.state, silo))
            trained = method.train(local, task)
            local = replace(local, state=trained.state)
        update: Payload = next(each for each in trained.payloads if isinstance(each, Delta | PartialDelta))
        update = shortened(update, self._model.layout, updating(silo, method.traits()))
        path = (silo.name, sent.version, sequence)
        update = protected(update, scenario.privacy, scenario.seed, path, idle=trained.idle)
        assert isinstance(update, Delta | PartialDelta)  # noqa: S101 - it keeps its kind
        names = update.names if isinstance(update, PartialDelta) else None
        return Shadow(whole_change(self._model, update.buffer, names), local)

    def _inputs(self, modality: Modality, rows: Rows) -> tuple[F32, Rows]:
        """A tower's inputs for items, of all captions [N, ...], and the first one of each item [n]."""
        items = self._population.load(rows, image=modality == "image", text=modality == "text")
        if items.text is not None:
            return items.text.values.numpy(), items.text.first.numpy()
        assert items.image is not None  # noqa: S101 - it was loaded
        return items.image.numpy(), np.arange(len(items))


def whole_change(model: TwoTower, values: Array, layers: Sequence[str] | None) -> torch.Tensor:
    """An update as a change of the whole model float32 [P]; ``layers`` are those it consists of, None for all."""
    change = torch.from_numpy(np.asarray(values, np.float32))
    return change if layers is None else inserted(torch.zeros(model.flat.shape), model.layout, layers, change)


def likelihoods(image: F32, text: F32) -> F64:
    """Log-likelihood [n] that the image and the caption of n pairs, float32 [n, d] each, find each other, as a mean."""
    logits = unit_rows(image) @ unit_rows(text).T / TEMPERATURE
    found: F64 = logits.diagonal() - (logsumexp(logits, axis=0) + logsumexp(logits, axis=1)) / 2
    return found


def relative(own: Sequence[F64], shadows: Sequence[F64]) -> F64:
    """RMIA's ratio log Pr(x | θ) / Pr(x) of n items, from log-likelihoods [n].

    Args:
        own: by the silo's update; several if its personal layers are unknown, each with those of a shadow.
        shadows: by the shadows' updates.
    """
    by_silo, by_shadows = (logsumexp(np.stack(each), axis=0) - np.log(len(each)) for each in (own, shadows))
    ratio: F64 = by_silo - by_shadows
    return ratio


def _rows_of(model: TwoTower, modality: Modality, change: torch.Tensor, shape: tuple[int, ...]) -> F64:
    """Rows [m, d] of the update of the layers on a tower's inputs, each with the sign of the update of its bias."""
    if len(shape) != 1:  # images that a network of its own encodes
        return np.zeros((0, 0))
    entries = model.layout.entries
    by_name = dict(zip(model.layout.by_name, torch.split(change, [entry.size for entry in entries]), strict=True))
    found = [np.zeros((0, *shape))]
    for entry in entries:
        bias = by_name.get(f"{entry.name.removesuffix('weight')}bias")
        if entry.name.startswith(BRANCHES[modality]) and entry.shape[1:] == shape and bias is not None:
            found.append((by_name[entry.name].view(entry.shape) * bias.sign()[:, None]).double().numpy())
    rows = np.concatenate(found)
    return rows[rows.any(axis=1)]


def _best(rows: F64, inputs: F32, first: Rows) -> F64:
    """Cosine [n] of each item with the row nearest to it, over its inputs."""
    best = (unit_rows(inputs) @ unit_rows(rows).T).max(axis=1)
    found: F64 = np.maximum.reduceat(best, first)
    return found
