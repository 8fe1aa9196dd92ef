"""Methods with personal models: FedAvg of the shared layers only, and outputs of other models to compare with.

Personal layers stay at their silos and are never sent, not even as zeros.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from typing_extensions import override

from fedmq.config.sections import Modality
from fedmq.data.silo_dataset import CaptionRows
from fedmq.federation import protocol
from fedmq.federation.protocol import (
    Context,
    Encoders,
    FederatedProtocol,
    Local,
    MergeResult,
    SiloFacts,
    State,
    Task,
    Trained,
    Traits,
    Update,
    WeightedSum,
    take,
)
from fedmq.federation.sums import SumLayout
from fedmq.models.hash_networks import Tower
from fedmq.models.two_tower import BRANCHES, SHARED, Out, TwoTower
from fedmq.wire.payloads import Delta, Loss, Model, PartialDelta, Payload
from protocols import fedavg
from protocols.parts import aggregation, training

#: Name of a silo's personal parameters [P], or its personal layers, in the silo's state.
OWN = "own_model"

#: Maximum number of inputs (items times captions) whose outputs a reference caches: 64 MB at 4,096 numbers each.
KEPT = 4096
#: Number of inputs per block.
_BLOCK = 256


def own_parameters(local: Local) -> Tensor:
    """The silo's personal model float32 [P] after its last task; the initial parameters before the first."""
    personal = local.state.get(OWN)
    return local.model.initial() if personal is None else personal


def kept(local: Local) -> dict[str, Tensor]:
    """Copy the silo's current model for its state."""
    return {OWN: local.model.flat.detach().cpu().clone()}


def kept_or_before(local: Local, *, newest: bool) -> dict[str, Tensor]:
    """:func:`kept` if the silo trained (``newest``); otherwise its model is the download, so the old one is kept."""
    return kept(local) if newest else {name: tensor for name, tensor in local.state.items() if name == OWN}


def encoders_of(local: Local, theta: Tensor | npt.NDArray[Any]) -> Encoders:
    """Encoders of the silo's model with parameters [P], for evaluation."""
    local.model.load(theta)
    return protocol.encoders_of(local.model)


def last_encoders(local: Local, payloads: Sequence[Payload]) -> Encoders:
    """Encoders of the silo's model after its last training; of the global model before the first."""
    personal = local.state.get(OWN)
    return encoders_of(local, take(payloads, Model).buffer if personal is None else personal)


def unsharpened(local: Local, image: Out | None, text: Out | None) -> training.Outs:
    """A step's outputs with codes of sharpness 1, for comparison with codes outside training; None if not run.

    DJSRH and JDSH increase the sharpness of codes during training, while banks and prototypes hold codes of sharpness
    1. Comparing the two would pull the inputs of tanh towards 0 even if they agree. Other bases' outputs are unchanged.
    """
    return _plain(image, local.model.visual), _plain(text, local.model.text)


def _plain(out: Out | None, tower: nn.Module) -> Out | None:
    if out is None or not isinstance(tower, Tower) or tower.sharpness == 1.0 or not tower.plan.tanh:
        return out
    return replace(out, code=torch.tanh(out.raw))


def in_blocks(model: TwoTower, modality: Modality, items: Tensor) -> Iterator[Out]:
    """Outputs of a tower for many items [n, ...], block by block, without gradient."""
    for block in torch.split(items, _BLOCK):
        with torch.no_grad():
            out = model.outputs(modality, block.to(model.flat.device))
        yield out


@dataclass(frozen=True)
class Reference:
    """Outputs of other parameters on a silo's batches, without gradient and dropout.

    Neither the parameters nor the silo's items change within a task. So a modality's outputs are computed once and
    cached if that is less work than computing them per batch (more epochs than captions per item; for images, more than
    one epoch) and they fit in :data:`KEPT` inputs.
    """

    local: Local
    theta: Tensor  # float32 [P], the other parameters
    epochs: int  # passes over the silo's items in a task

    def __call__(self, step: training.Step) -> training.Outs:
        """Image and text outputs of a step's batch; None for a tower that the step does not run or the silo lacks."""
        dataset, model = self.local.dataset, self.local.model
        cached: list[Modality] = [name for name in step.runs if self._cached(name)]
        computed = [name for name in step.runs if name not in cached]
        image: Out | None = None
        text: Out | None = None
        if computed:
            with training.parameters(self.local, self.theta), torch.no_grad():
                image, text = training.outputs(self.local, step.rows, step.caption, computed)
        rows = torch.from_numpy(step.rows)
        if "image" in cached and dataset.image is not None:
            image = _picked(self._images, rows, model.visual)
        if "text" in cached and dataset.text is not None and step.caption is not None:
            text = _picked(self._texts, dataset.text.rows(rows, torch.from_numpy(step.caption[step.rows])), model.text)
        return image, text

    def _cached(self, modality: Modality) -> bool:
        """Whether the outputs of a modality are computed once and cached."""
        dataset = self.local.dataset
        if modality == "image" or dataset.text is None:
            return self.epochs > 1 and len(dataset) <= KEPT
        return self.epochs > int(dataset.captions.max()) and len(dataset.text.values) <= KEPT

    @cached_property
    def _images(self) -> Out:
        return self._all_outputs("image", self.local.dataset.image)

    @cached_property
    def _texts(self) -> Out:
        text = self.local.dataset.text
        return self._all_outputs("text", None if text is None else text.values)

    def _all_outputs(self, modality: Modality, items: Tensor | None) -> Out:
        if items is None:
            raise ValueError(f"the silo has no {modality} items")
        with training.parameters(self.local, self.theta):
            parts = list(in_blocks(self.local.model, modality, items))
        logits = [part.logits for part in parts if part.logits is not None]
        hidden, raw, code = (torch.cat([getattr(part, name) for part in parts]) for name in ("hidden", "raw", "code"))
        return Out(hidden, raw, code, torch.cat(logits) if logits else None)


def _picked(out: Out, rows: Tensor, tower: nn.Module) -> Out:
    rows = rows.to(out.code.device)
    hidden, raw, code = out.hidden[rows], out.raw[rows], out.code[rows]
    if isinstance(tower, Tower) and tower.sharpness != 1.0:
        # The sharpness grows with every epoch (DJSRH, JDSH), and the cached codes are from the task's first epoch.
        code = tower.squashed(raw)
    return Out(hidden, raw, code, None if out.logits is None else out.logits[rows])


@dataclass(frozen=True)
class References:
    """A model's codes for all items of a silo, computed once per task, before training."""

    image: Tensor | None  # [n, r]; None without images
    text: CaptionRows | None  # codes of all captions; None without texts

    @classmethod
    def by(cls, local: Local) -> References:
        """The codes by the silo's current model."""
        dataset = local.dataset

        def codes(modality: Modality, items: Tensor) -> Tensor:
            return torch.cat([out.code for out in in_blocks(local.model, modality, items)])

        image = None if dataset.image is None else codes("image", dataset.image)
        if dataset.text is None:
            return cls(image, None)
        return cls(image, replace(dataset.text, values=codes("text", dataset.text.values)))

    def of(self, rows: training.I64, caption: training.I64 | None) -> list[Tensor]:
        """Codes [B, r] of some rows for each modality, with the captions chosen by index int64 [n]."""
        index = torch.from_numpy(rows)
        codes = [] if self.image is None else [self.image[index]]
        if self.text is not None and caption is not None:
            codes.append(self.text[index, torch.from_numpy(caption[rows])])
        return codes


class PartialFedAvg(FederatedProtocol):
    """FedAvg of the shared layers, the base of methods with personal layers.

    The coordinator's theta covers the whole model, with initial values in the personal layers. A silo starts from its
    personal layers after its last task, or from the initial ones.

    Args:
        options: the method's; FedAvg's defaults apply if they are no superset of FedAvg's.
        context: context of the run.
        modules: average each module like a branch, over the silos that train it.
    """

    def __init__(self, options: Any, context: Context, *, modules: bool = False) -> None:
        self.options = options
        self.context = context
        anchored = options if isinstance(options, fedavg.AnchoredOptions) else fedavg.AnchoredOptions()
        self.fedavg = fedavg.AnchoredFedAvg(anchored, context)
        self.shared = tuple(self.layers_of(options, context))
        self.personal = tuple(entry.name for entry in context.layout.entries if entry.name not in set(self.shared))
        slices = aggregation.module_slices if modules else aggregation.branch_slices
        self.branches = slices(context.layout.part(self.shared))

    @staticmethod
    @abstractmethod
    def layers_of(options: Any, context: Context) -> Sequence[str]:
        """Names of the shared layers, at least one, in the layout's order.

        Raises:
            InputError: the model has none, or the options do not fit it.
        """

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """Only personal models are trained completely; the coordinator trains the shared layers alone."""
        return Traits(personal_only=True, personalised=True)

    def traits(self) -> Traits:
        """As the options say, with the names of the shared layers."""
        return replace(self.traits_of(self.options), shared_layers=self.shared)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """FedAvg's, with a PartialDelta instead of a Delta."""
        return self.fedavg.uploads(silo) - {Delta} | {PartialDelta}

    @override
    def initial(self, theta: Tensor) -> State:
        return self.fedavg.initial(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The shared layers, and the global prototypes if anchoring is on."""
        layout = self.context.layout
        shared = aggregation.extract(state.theta, layout, self.shared)
        model = Model(layout.part(self.shared).digest, shared.numpy())
        anchors = (
            self.fedavg.anchoring.download(state.tensors) if isinstance(self.options, fedavg.AnchoredOptions) else ()
        )
        return (model, *anchors)

    def parameters(self, local: Local, payloads: Sequence[Payload]) -> Tensor:
        """The silo's whole model float32 [P]: downloaded shared layers and its personal layers."""
        layout, theta = self.context.layout, local.model.initial()
        personal = local.state.get(OWN)
        if personal is not None and self.personal:
            theta = aggregation.inserted(theta, layout, self.personal, personal)
        received = aggregation.as_tensor(take(payloads, Model).buffer)
        return aggregation.inserted(theta, layout, self.shared, received)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on the base loss over all layers; uploads the shared layers' change, keeps the personal ones."""
        local.model.load(self.parameters(local, task.payloads))
        base = local.model.flat.detach().clone()
        work = self.fedavg.work(local, task)
        outcome = self.epochs(local, task, base, work)
        prototypes = self.fedavg.anchoring.report(local, task, filled=False)
        up = (self.update(outcome.delta, len(local.dataset)), Loss(outcome.loss), *prototypes)
        kept = {**({} if work is None else work.kept()), **self.kept(local)}
        return Trained(up, kept, outcome.loss, work is None)

    def epochs(self, local: Local, task: Task, base: Tensor, work: training.Work | None) -> training.TrainingResult:
        """Local epochs from ``base`` [P], which the model holds; a method may train its layers in another order."""
        return training.train_epochs(local, self.context, task, base, work, trains=self.trained_ranges)

    def trained_ranges(self, local: Local) -> Mapping[str, Sequence[slice]]:
        """Ranges of the flat buffer that a silo trains, by branch; the rest stays frozen at its initial values."""
        return training.branches_of(local)

    def ranges_of(self, local: Local, names: Sequence[str]) -> Mapping[str, Sequence[slice]]:
        """Ranges of some layers, by branch; only of branches that the silo trains and that have such layers."""
        found, layout = dict[str, Sequence[slice]](), self.context.layout
        for branch in training.branches_of(local):
            prefix = next((each for modality, each in BRANCHES.items() if modality == branch), SHARED)
            if parts := layout.ranges(name for name in names if name.startswith(prefix)):
                found[branch] = parts
        return found

    def update(self, delta: Tensor, samples: int) -> PartialDelta:
        """Upload payload of the shared layers of a model's change [P]."""
        layout = self.context.layout
        change = aggregation.extract(delta, layout, self.shared)
        return PartialDelta(layout.digest, self.shared, change.numpy(), samples)

    def kept(self, local: Local) -> dict[str, Tensor]:
        """The personal layers of the silo's current model, for its state."""
        if not self.personal:
            return {}
        return {OWN: aggregation.extract(local.model.flat.detach().cpu(), self.context.layout, self.personal)}

    @override
    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        weights = self.fedavg.weights(replies)
        merged = self.averaged(state, replies, weights)
        return MergeResult(replace(merged, tensors=self.fedavg.anchoring.averaged(state.tensors, replies, weights)))

    def averaged(self, state: State, replies: Sequence[Update], weights: Tensor) -> State:
        """The state with the average of the shared layers' updates, by weights float64 [M] of sum 1, added."""
        before = aggregation.extract(state.theta, self.context.layout, self.shared)
        after = aggregation.merge_updates(before, replies, weights, self.branches, self.fedavg.options.branch_renorm)
        return self._inserted(state, after)

    def _inserted(self, state: State, shared: Tensor) -> State:
        return replace(state, theta=aggregation.inserted(state.theta, self.context.layout, self.shared, shared))

    @override
    def weigh(self, state: State, replies: Sequence[Update], round_: int) -> WeightedSum:
        def merged(after: State, arrived: Sequence[Update], weights: Tensor) -> MergeResult:
            return MergeResult(replace(after, tensors=self.fedavg.anchoring.averaged(state.tensors, arrived, weights)))

        weighted = self.summed(state, replies, self.fedavg.weights(replies), merged)
        return self.fedavg.anchoring.weighed(weighted, state.tensors, replies, self.sum_layout())

    def summed(
        self,
        state: State,
        replies: Sequence[Update],
        weights: Tensor,
        merged: Callable[[State, Sequence[Update], Tensor], MergeResult],
    ) -> WeightedSum:
        """:meth:`averaged` as a secure sum, of replies with reports.

        ``merged`` gives the merge's result from the averaged state, the replies in the sum and their weights.
        """
        before = aggregation.extract(state.theta, self.context.layout, self.shared)

        def finish(shared: Tensor, arrived: Sequence[Update], weights: Tensor) -> MergeResult:
            return merged(self._inserted(state, shared), arrived, weights)

        return aggregation.sum_of(before, replies, weights, self.branches, self.fedavg.options.branch_renorm, finish)

    @override
    def sum_layout(self) -> SumLayout:
        return self.fedavg.anchoring.sum_layout(SumLayout(self.context.layout, self.shared, self.branches))

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """Encoders of the silo's personal model: downloaded shared layers and its personal layers."""
        return encoders_of(local, self.parameters(local, payloads))
