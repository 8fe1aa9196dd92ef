"""Networks of the hashing and supervised base losses: small towers over frozen features, in one flat buffer.

Optionally the image encoder is trained as part of the image tower. Each base loss registers the plan of its network
with ``fedmq.models.objective_registry``; a scenario may change the widths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmq.config.scenario import Backbone, Objective
from fedmq.encoders import matconvnet
from fedmq.encoders.base import InputSpec
from fedmq.errors import InputError
from fedmq.models.objective_registry import OBJECTIVES, CommonSpacePlan, TowerPlan, network_of
from fedmq.models.two_tower import Linear, Out, TwoTower
from fedmq.seeds import torch_generator
from fedmq.wire.layout import Layout

#: Dropout rate before the last layer of the unsupervised networks; 1/2, so that it takes one random bit per unit.
DROPOUT = 0.5
#: Name prefix of the parameters of a trained encoder.
_ENCODER = "visual.encoder."


def plans_of(objective: Objective) -> tuple[TowerPlan, TowerPlan] | None:
    """Plans of the image and the text tower of an objective; None for objectives with another network."""
    plan = network_of(objective)
    if not isinstance(plan, TowerPlan):
        return None
    return (replace(plan, tanh=False) if plan.squashed == "text" else plan), plan


class Tower(nn.Module):
    """Hidden ReLU layers, dropout during training, a linear layer, and optionally tanh and a classifier."""

    def __init__(
        self,
        width: int,  # width of the features
        hidden: tuple[int, ...],  # widths of the hidden layers
        bits: int,  # code length
        classes: int,  # classes of the classifier; 0 for none
        plan: TowerPlan,  # use of tanh and dropout
        *,
        encoder: nn.Module | None = None,  # image encoder that is trained with the tower; None for frozen features
    ) -> None:
        super().__init__()
        self.encoder = encoder
        widths = (width, *hidden)
        layers = enumerate(pairwise(widths))
        self.hidden = nn.ModuleDict({str(i): Linear(a, b) for i, (a, b) in layers})
        self.last = Linear(widths[-1], bits)
        self.classifier = Linear(bits, classes) if classes else None
        self.plan = plan
        self.noise: torch.Generator | None = None  # generator of dropout masks; None outside training
        # Float32 [C, r], FedCAFE's global memory, which enhances the code (eqs 3 and 4); None without.
        self.memory: Tensor | None = None
        self.sharpness = 1.0  # factor before tanh (DJSRH's alpha)

    def forward(self, x: Tensor) -> Out:
        """Map float32 features [B, d], or images [B, ...] for an encoder, to an Out."""
        if self.encoder is not None:
            x = self.encoder(x)
        for layer in self.hidden.values():
            x = torch.relu_(layer(x))
        hidden = x if self.hidden or self.encoder is not None else None
        if self.plan.dropout and self.noise is not None:
            x = x * dropout_mask(x.shape, self.noise).to(x.device)
        raw = self.last(x)
        code, before = self.squashed(raw), None
        logits = None if self.classifier is None else self.classifier(code)
        if self.memory is not None and logits is not None:
            code, before = enhanced(code, logits, self.memory), code
        # Without a hidden layer, the raw code is the first output of a tower over frozen features.
        return Out(raw if hidden is None else hidden, raw, code, logits, before)

    def squashed(self, raw: Tensor) -> Tensor:
        """The code [B, r] from outputs of the last layer [B, r], with the current sharpness."""
        return torch.tanh(self.sharpness * raw) if self.plan.tanh else raw


def towers_of(model: TwoTower) -> list[Tower]:
    """The towers of a hash network; none of other models."""
    return [tower for tower in (model.visual, model.text) if isinstance(tower, Tower)]


@contextmanager
def towers_with(model: TwoTower, **values: Any) -> Iterator[None]:
    """Context in which a hash network's towers have other values of ``noise``, ``memory`` or ``sharpness``."""
    before = [(tower, {name: getattr(tower, name) for name in values}) for tower in towers_of(model)]
    try:
        for tower, _ in before:
            vars(tower).update(values)
        yield
    finally:
        for tower, old in before:
            vars(tower).update(old)


@cache
def _mask_of_byte() -> Tensor:
    # Created at first use: at import, the torch operation would run in the forkserver.
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return bits / (1 - DROPOUT)


def dropout_mask(shape: Sequence[int], noise: torch.Generator) -> Tensor:
    """Dropout factors of a shape, 0 or 2 with equal probability (rate :data:`DROPOUT`), float32.

    The generator draws 64-bit words for 64 factors each, as one draw per factor takes as long as the layer.
    """
    count = math.prod(shape)
    words = torch.empty(-(-count // 64), dtype=torch.int64).random_(-(2**63), None, generator=noise)
    return _mask_of_byte().index_select(0, words.view(torch.uint8).int()).view(-1)[:count].view(*shape)


def enhanced(raw: Tensor, logits: Tensor, memory: Tensor) -> Tensor:
    """V_E = O + tanh(O) * V_P with V_P = softmax(logits) P_g (FedCAFE eqs 3 and 4).

    Args:
        raw: [B, r] outputs O.
        logits: [B, C] logits of the tower's classifier.
        memory: [C, r] global memory P_g; zero before the first merge, which gives V_E = O.
    """
    return raw + torch.tanh(raw) * memory_feature(logits, memory)


def memory_feature(logits: Tensor, memory: Tensor) -> Tensor:
    """V_P = softmax(logits) P_g, float32 [B, r], from logits [B, C] and memory P_g [C, r] (FedCAFE eq 3)."""
    return logits.softmax(1) @ memory


def signs(x: Tensor) -> Tensor:
    """Binary codes in {-1, 1} of the same shape, with sign(0) = +1."""
    return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)


def straight_through(x: Tensor) -> Tensor:
    """Binary codes with the straight-through estimator: the gradient passes unchanged to ``x``."""
    return signs(x.detach()) + (x - x.detach())


class SharedHead(nn.Module):
    """One vector of r numbers per label, shared by both modalities to align their codes.

    Args:
        bits: code length.
        classes: number of labels.
        kind: label predictions are products with the ``signs`` of the code (GreedyHash's linear classifier of binary
            codes, without bias), or ``cosines`` of code and vector (DSPH's proxies).
    """

    def __init__(self, bits: int, classes: int, kind: Literal["signs", "cosines"]) -> None:
        super().__init__()
        self.head = Linear(bits, classes, bias=False)
        self.kind = kind

    def forward(self, out: Out, tower: Tower) -> Out:
        """Add label predictions [B, C] to a tower's Out."""
        if self.kind == "signs":
            return replace(out, logits=self.head(straight_through(out.code)))
        return replace(out, logits=F.linear(F.normalize(out.code), F.normalize(self.head.weight)))


class FirstLayer(nn.Module):
    """DSCMR's modality-specific layer, optionally with FedSCMR's enhancing layer.

    Args:
        width: width of the features.
        hidden: output width.
        dim: width of the common space.
        enhance: include the enhancing layer.
    """

    def __init__(self, width: int, hidden: int, dim: int, enhance: bool) -> None:
        super().__init__()
        self.first = Linear(width, hidden)
        self.enhance = Linear(dim, dim) if enhance else None

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 features [B, d] to [B, hidden]."""
        return F.relu(self.first(x))


class CommonSpace(nn.Module):
    """DSCMR's shared layers, common subspace and label head, optionally with FedSCMR's second common layer.

    Args:
        hidden: input width.
        dim: width of the common space.
        classes: classes of the label head.
        enhance: include FedSCMR's EnhanceNet, S' = common(relu(specific(S))).
        leaky: leaky ReLU after the common layer, as in FedCMR.
    """

    def __init__(self, hidden: int, dim: int, classes: int, *, enhance: bool, leaky: bool) -> None:
        super().__init__()
        self.base = Linear(hidden, dim)
        self.enhance = Linear(dim, dim) if enhance else None
        self.label = Linear(dim, classes)
        self.leaky = leaky

    def forward(self, out: Out, tower: FirstLayer) -> Out:
        """Out.hidden and Out.raw are S, Out.code is S' with an EnhanceNet and S otherwise, Out.logits belong to S."""
        common = self.base(out.hidden)
        common = F.leaky_relu(common) if self.leaky else common
        code = common
        if self.enhance is not None and tower.enhance is not None:
            code = self.enhance(F.relu(tower.enhance(common)))
        return Out(common, common, code, self.label(common))


def initial_parameters(layout: Layout, plan: TowerPlan, seed: int, trained: Backbone | None = None) -> Tensor:
    """Initial parameters float32 [P], with a separate generator for each parameter tensor.

    An encoder that is trained with the image tower is initialised from its file.
    """
    by_name = layout.by_name
    known = {} if trained is None else {f"{_ENCODER}{name}": value for name, value in _encoder_parameters(trained)}
    parts = []
    for entry in layout.entries:
        if entry.name in known:
            parts.append(known[entry.name].detach().reshape(-1))
            continue
        generator = torch_generator(seed, "model", entry.name)
        owner, _, leaf = entry.name.rpartition(".")
        if plan.last_std is not None and owner.endswith(".last"):
            drawn = torch.randn(entry.size, generator=generator) * plan.last_std
            parts.append(torch.zeros(entry.size) if leaf == "bias" else drawn)
        elif plan.std is not None:
            parts.append(torch.randn(entry.size, generator=generator) * plan.std)
        else:
            bound = 1 / math.sqrt(by_name[f"{owner}.weight"].shape[1])
            parts.append((torch.rand(entry.size, generator=generator) * 2 - 1) * bound)
    return torch.cat(parts)


def _encoder_parameters(trained: Backbone) -> Iterator[tuple[str, nn.Parameter]]:
    return matconvnet.load(trained, "cpu").named_parameters()


def _trained_encoder(trained: Backbone, shape: tuple[int, ...], device: torch.device) -> matconvnet.Network:
    edge = matconvnet.EDGE
    if shape != (3, edge, edge):
        raise InputError("data: image", f"items of shape {list(shape)}", f"{[3, edge, edge]} with backbone.end_to_end")
    return matconvnet.load(trained, device)


def build(
    objective: Objective,
    inputs: InputSpec,
    classes: int,
    seed: int,
    device: torch.device,
    *,
    trained: Backbone | None = None,
) -> TwoTower:
    """The network of a base loss; its parameters are zeros, and ``initial`` computes the initial ones.

    FedSCMR's and FedCMR's variants of DSCMR are selected by its options ``enhance`` and ``leaky``. ``classes`` is 0 for
    a data set without labels; ``trained`` is an encoder that is trained with the image tower.

    Raises:
        InputError: the inputs are not features (with a trained encoder: not images of its size), or the base loss
            needs labels that the data set lacks.
    """
    encoder = None if trained is None else _trained_encoder(trained, inputs.image_shape, device)
    features = {"text": inputs.text_shape} if encoder else {"image": inputs.image_shape, "text": inputs.text_shape}
    for what, shape in features.items():
        if len(shape) != 1:
            shapes = f"items of shape {list(shape)}"
            raise InputError(f"data: {what}", shapes, f"features [d] with objective.base {objective.base}")
    widths = inputs.image_shape[0] if encoder is None else encoder.width, inputs.text_shape[0]
    if OBJECTIVES.find(objective.base).needs_labels and classes == 0:
        free = [name for name in OBJECTIVES.built_in() if not OBJECTIVES.find(name).needs_labels]
        allowed = f"{', '.join(free[:-1])} or {free[-1]}, as the data set has no labels"
        raise InputError("objective.base", objective.base, allowed)
    network, plans = network_of(objective), plans_of(objective)
    if isinstance(network, CommonSpacePlan):
        return _common_space(objective, network, widths, classes, seed, device)
    if plans is None:
        raise InputError("objective.base", objective.base, "an objective with a hash network, not adapters and heads")
    plan = plans[0]
    bits = objective.bits or plan.bits
    towers = [
        Tower(
            width,
            tuple(objective.hidden or width for width in hidden),
            bits,
            classes if tower_plan.classifier else 0,
            tower_plan,
            encoder=tower_encoder,
        )
        for width, hidden, tower_plan, tower_encoder in zip(
            widths, (plan.image, plan.text), plans, (encoder, None), strict=True
        )
    ]
    shared = SharedHead(bits, classes, plan.shared_head) if plan.shared_head else None
    model = TwoTower(towers[0], towers[1], bits, device, shared=shared, binary=True)
    model.initial = partial(initial_parameters, model.layout, plan, seed, trained)
    return model


def _common_space(
    objective: Objective, plan: CommonSpacePlan, widths: tuple[int, int], classes: int, seed: int, device: torch.device
) -> TwoTower:
    hidden, dim = objective.hidden or plan.hidden, objective.bits or plan.bits
    towers = [FirstLayer(width, hidden, dim, plan.enhance) for width in widths]
    shared = CommonSpace(hidden, dim, classes, enhance=plan.enhance, leaky=plan.leaky)
    model = TwoTower(towers[0], towers[1], dim, device, shared=shared)
    model.initial = partial(initial_parameters, model.layout, TowerPlan(), seed)
    return model
