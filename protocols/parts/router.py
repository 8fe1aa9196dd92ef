"""RCSR's options and its router: a small attention network over the silos' statistics (eq 6), with losses (eqs 7 to 9).

The options have the paper's values as defaults, and our own where the paper leaves them open.

The router's parameters are one flat float32 buffer, so that the coordinator's state and checkpoints hold them and
Adam's moments as three tensors. Dropout draws from a generator argument; without one the network is in evaluation mode.
Each silo is a token, [M, 2d + 8]; there is no padding, so no attention mask is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedmq.config.plug_ins import OptionError
from fedmq.config.sections import Count, Fraction, NonNegative, Positive, Whole, Width
from fedmq.wire.layout import Layout
from protocols.parts import aggregation, personal_adapter
from protocols.parts.losses import EPSILON, TauOptions, cosine, unit

#: Where both the paper and the released code differ from the defaults. The values of the paper's table 3 are defaults.
_PUBLISHED: Mapping[str, object] = {
    "masked_ema": False,
    "router_over": "reporters",
    "branch_renorm": False,
    "backbone.head": "mlp",
}
#: Options ``router_*`` that have an effect only with a router.
_OF_ROUTER = ("softplus", "rate", "warmup_rate", "losses", "mask", "over")
#: Options with ``router_at: silos``: others need single silos' values at the coordinator, or add known fillers to sums.
_AT_SILOS: Mapping[str, tuple[object, ...]] = {
    "router": (True,),
    "anchor": (True, False),
    "filler": ("ema", "zero"),
    "masked_ema": (True,),
    "masked_pc": (True,),
    "router_softplus": (False,),
    "router_mask": ("input",),
    "router_over": (None, "reporters"),
    "fair_update": ("entropic", "paper"),
    "branch_renorm": (True,),
    "personal": ("none", "fixed"),
}


@dataclass(frozen=True)
class RcsrOptions(personal_adapter.AdapterOptions, TauOptions):
    """Options of RCSR; defaults are the paper's values, and ours where the paper leaves them open.

    Args:
        router: weight replies by the router (``true``), by samples (``false``), or equally (``uniform``).
        minimax: multiply the weights by the fairness weights q (eq 10).
        client_align: add the regulariser towards the global prototypes (lambda_a of eq 4).
        anchor: anchor single-modality silos to the global prototype of the modality they lack (eq 3). Without it their
            personal adapters are not trained, and they idle if ``client_align`` is off too. ``multi``, which is not in
            the paper, anchors each sample to its nearest centroid of the missing modality, among those of all silos,
            because a single prototype collapses all embeddings onto one point. Silos cluster their items once, after
            the warm-up; until centroids are available, the single prototype is used.
        anchor_centroids: with ``multi``, maximum number of centroids per silo and modality.
        anchor_support: with ``multi``, minimum number of samples per reported centroid. In a silo with at most 128
            items this does not hide an item if it alone belongs to no centroid: the prototype of eq 6, the mean of all
            items of the silo, reveals it.
        filler: replacement at the coordinator for the prototype of a missing modality: the global prototype
            (``ema``), a ``zero`` vector, or a vector ``learned`` with the router (our reading: the paper does not say
            where it is trained).
        lambda_anc: weight of the anchoring loss; only with ``anchor``.
        lambda_a: weight of the prototype regulariser (lambda_align in the paper's table); only with ``client_align``.
        lambda_s: weight of the proximal term, a squared norm as printed in eq 4.
        warmup: number of merges weighted by samples before the router is used and trained (algorithm 1). Only with
            ``router: true``, like beta1, beta2, beta4, beta5 and ``router_*``; ``multi`` also clusters at its end.
        ema: decay of the global prototypes: fraction of the old prototype that a merge of a full round keeps.
        proto_unit: normalise global prototypes to length 1.
        masked_ema: leave fillers out of the moving average; if false, include them as printed.
        beta1: weight of the image prototype in eq 8.
        beta2: weight of the text prototype in eq 8.
        beta4: weight of the router's entropy in eq 8.
        beta5: weight of the alignment loss (eq 9).
        masked_pc: leave fillers out of eq 8; if false, include them as printed.
        masked_ac: compute eq 9 over the paired silos alone; if false, over all silos, as printed.
        eq9_half: halve eq 9, as the released code does.
        router_softplus: apply softplus to the router's loss, as the released code does.
        router_rate: learning rate of the router's Adam optimiser.
        router_warmup_rate: learning rate of the router during the warm-up; 0 leaves it untrained, as printed.
        router_losses: losses that the router sees: ``raw``, as printed, which tell it whether a silo is paired, or
            ``normalised`` as in eq 10; without ``minimax``, by the mean of the silo's group in the router's pool.
        router_mask: ``input`` hides fillers from the router, ``none`` shows them; its input (``tokens`` in
            ``protocols/parts/router.py``) is both prototypes, their cosine, geometry, mask and loss.
        router_over: silos over which the router's softmax runs: the ``reporters`` of a merge, as printed, or all silos
            in the ``table`` of last statistics, with the reporters' weights renormalised; the table gives useful
            weights when a merge has few replies. A single reply has weight 1 either way, with or without ``minimax``:
            in ``async`` mode ``minimax`` affects no model, and this option only personal models (eq 13). Default:
            ``table`` if merges have fewer replies than a round, else ``reporters``.
        router_at: where the router runs: at the ``coordinator``, which sees each silo's statistics, or at the
            ``silos``, each of which finds its own weight by the sums of the last merge, so that all that it sends can
            be added up by ``privacy.secure_aggregation`` (``protocols/parts/silo_router.py``; not in the paper).
        router_ratio: with ``router_at: silos``, largest ratio of two silos' weights; each silo keeps to it.
        fair_eta: step size of q; like all ``fair_*`` options, only with ``minimax``.
        fair_tau: weight of q's entropy; not used by ``fair_update: paper``. With ``entropic`` the entropy pulls only
            the reporters' q, and pulls frequent reporters beyond equal weights: with 30 silos of equal losses, 5 silos
            that report in each of 200 merges reach 20 times the q of silos that report in a fifth of them. Set it to 0
            if silos report at different rates. At most 1 / fair_eta; above that q would oscillate.
        fair_ema: fraction of a group's old mean loss that a merge of a full round keeps.
        fair_update: ``entropic``, an exact step with q's entropy and bounded losses; ``paper``, as printed, without
            both; ``code``, raw losses and q to the power 1 / (1 + fair_tau).
        fair_center: step q by the normalised loss minus 1; if false, by the normalised loss, as printed. Not used by
            ``code``, which takes raw losses.
        branch_renorm: average each branch over the silos that trained it; if false, use the paper's plain sum. With
            ``conflict_free``, the single-modality silos' mean update loses its component against the paired silos' mean
            update, is shortened to at most its length, and is added to it by weight
            (``protocols.parts.aggregation.conflict_free``).
        personal: RCSR-p's personal adapters: ``none``, with ``fixed`` strength lambda_p, or with a strength from the
            ``router`` weights (eq 13).
        s_norm: router weights enter eq 13 ``plain``, as printed, or ``relative`` to the uniform weight, w_k |S|: with
            15 reporters all plain weights are near 1/15 and eq 13 is nearly constant. Only with ``personal: router``.
        preset: what is not given: as ``printed`` in the paper, as in the ``released`` code, or ``ours``.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "anchor": ("lambda_anc",),
        "anchor=multi": ("anchor_*",),
        "client_align": ("lambda_a",),
        "router=true|anchor=multi": ("warmup",),
        "router=true|masked_ema=false": ("filler",),
        "router_at=silos": ("router_ratio",),
        # Not router_at and router_ratio: without the router, ``router_at: silos`` is refused.
        "router=true": ("beta?", *(f"router_{name}" for name in _OF_ROUTER), "masked_?c", "eq9_half"),
        "minimax": ("fair_*",),
        "fair_update=entropic|fair_update=code": ("fair_tau",),
        "fair_update=entropic|fair_update=paper": ("fair_ema", "fair_center"),
        "personal": ("lambda_p", "personal_*"),
        "personal=router": ("s_norm",),
    }
    PRESETS: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "printed": {**_PUBLISHED, "proto_unit": False, "fair_update": "paper", "fair_center": False},
        "released": {
            **_PUBLISHED,
            "lambda_s": 0.0,
            "warmup": 0,
            "ema": 0.95,
            "beta4": 0.1,
            "masked_pc": False,
            "eq9_half": True,
            "router_softplus": True,
            "router_mask": "none",
            "fair_update": "code",
            "backbone.adapter_std": 0.001,
        },
        "ours": {
            "masked_ac": True,
            "router_warmup_rate": 1e-3,
            "router_losses": "normalised",
            "aggregation.single_weight": 0.2,
        },
    }
    BEGINS: ClassVar[Mapping[str, str]] = {
        "warmup": "the router and the clusters of prototypes",
        **personal_adapter.AdapterOptions.BEGINS,
    }

    router: bool | Literal["uniform"] = True
    minimax: bool = True
    client_align: bool = True
    anchor: bool | Literal["multi"] = True
    anchor_centroids: Width = 16
    anchor_support: Count = 4
    filler: Literal["ema", "zero", "learned"] = "ema"
    lambda_anc: NonNegative = 1.0
    lambda_a: NonNegative = 0.1
    lambda_s: NonNegative = 0.01
    warmup: Annotated[Whole, Field(ge=0)] = 20
    ema: Fraction = 0.9
    proto_unit: bool = True
    masked_ema: bool = True
    beta1: NonNegative = 1.0
    beta2: NonNegative = 1.0
    beta4: NonNegative = 0.2
    beta5: NonNegative = 0.3
    masked_pc: bool = True
    masked_ac: bool = False
    eq9_half: bool = False
    router_softplus: bool = False
    router_rate: Positive = 1e-3
    router_warmup_rate: NonNegative = 0.0
    router_losses: Literal["raw", "normalised"] = "raw"
    router_mask: Literal["input", "none"] = "input"
    router_over: Literal["reporters", "table"] | None = None
    router_at: Literal["coordinator", "silos"] = "coordinator"
    router_ratio: Annotated[float, Field(ge=1, le=1e6)] = 4.0
    fair_eta: NonNegative = 0.1
    fair_tau: NonNegative = 0.1
    fair_ema: Fraction = 0.9
    fair_update: Literal["entropic", "paper", "code"] = "entropic"
    fair_center: bool = True
    branch_renorm: aggregation.BranchRenorm = True
    personal: Literal["none", "fixed", "router"] = "none"
    s_norm: Literal["plain", "relative"] = "plain"
    preset: Literal["printed", "released", "ours"] | None = None

    def __post_init__(self) -> None:
        if self.fair_update == "entropic" and self.fair_eta * self.fair_tau > 1:
            raise OptionError("fair_eta times fair_tau", self.fair_eta * self.fair_tau, "at least 0 and at most 1")
        for name, allowed in _AT_SILOS.items() if self.router_at == "silos" else ():
            if (found := getattr(self, name)) not in allowed:
                raise OptionError(name, found, f"{' or '.join(map(str, allowed))} with router_at silos")


WIDTH = 128
HEADS = 4
BLOCKS = 2
EXPANSION = 4
DROPOUT = 0.1
#: Norms and losses in tokens are clipped at this value: larger ones are faulty and would overflow LayerNorm in float32.
LARGEST = 1e4


# --------------------------------------------------------------------------- the network
def layout(dim: int, learned_filler: bool) -> Layout:
    """Names and shapes of the router's parameters for prototypes of dimension ``dim``."""
    wide = EXPANSION * WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "input.0.weight": (WIDTH, 2 * dim + 8),
        "input.0.bias": (WIDTH,),
        "input.1.weight": (WIDTH, WIDTH),
        "input.1.bias": (WIDTH,),
        "input.norm.gain": (WIDTH,),
        "input.norm.bias": (WIDTH,),
        "score.weight": (1, WIDTH),
        "score.bias": (1,),
    }
    for block in range(BLOCKS):
        shapes |= {
            f"block.{block}.qkv.weight": (3 * WIDTH, WIDTH),
            f"block.{block}.qkv.bias": (3 * WIDTH,),
            f"block.{block}.out.weight": (WIDTH, WIDTH),
            f"block.{block}.out.bias": (WIDTH,),
            f"block.{block}.up.weight": (wide, WIDTH),
            f"block.{block}.up.bias": (wide,),
            f"block.{block}.down.weight": (WIDTH, wide),
            f"block.{block}.down.bias": (WIDTH,),
            f"block.{block}.norm1.gain": (WIDTH,),
            f"block.{block}.norm1.bias": (WIDTH,),
            f"block.{block}.norm2.gain": (WIDTH,),
            f"block.{block}.norm2.bias": (WIDTH,),
        }
    if learned_filler:
        shapes["filler"] = (2, dim)
    return Layout.of((name, shape, "float32") for name, shape in shapes.items())


def initial(shape: Layout, generator: torch.Generator) -> Tensor:
    """Initial parameters [R]: weights uniform in +-1/sqrt(fan in), gains 1, biases 0, fillers normal."""
    flat = torch.zeros(shape.size)
    for name, view in views(flat, shape).items():
        if name.endswith("gain"):
            view.fill_(1.0)
        elif name == "filler":
            view.normal_(generator=generator)
        elif name.endswith("weight"):
            bound = 1 / math.sqrt(view.shape[1])
            view.uniform_(-bound, bound, generator=generator)
    return flat


def views(flat: Tensor, shape: Layout) -> dict[str, Tensor]:
    """The named parameters as views of the flat buffer."""
    parts = torch.split(flat, [entry.size for entry in shape.entries])
    return {entry.name: part.view(entry.shape) for entry, part in zip(shape.entries, parts, strict=True)}


def _dropout(x: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return x
    return x * (torch.rand(x.shape, generator=generator) >= DROPOUT) / (1 - DROPOUT)


def _linear(x: Tensor, p: Mapping[str, Tensor], name: str) -> Tensor:
    return functional.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def _norm(x: Tensor, p: Mapping[str, Tensor], name: str) -> Tensor:
    return functional.layer_norm(x, (WIDTH,), p[f"{name}.gain"], p[f"{name}.bias"])


def attention(x: Tensor, p: Mapping[str, Tensor], block: str, generator: torch.Generator | None) -> Tensor:
    """Multi-head self-attention over the silos, [M, 128] -> [M, 128]."""
    count = len(x)
    q, k, v = _linear(x, p, f"{block}.qkv").view(count, 3, HEADS, -1).permute(1, 2, 0, 3)  # each [heads, M, 32]
    weights = _dropout((q @ k.transpose(1, 2) / math.sqrt(WIDTH // HEADS)).softmax(-1), generator)
    return _linear((weights @ v).transpose(0, 1).reshape(count, WIDTH), p, f"{block}.out")


def logits(p: Mapping[str, Tensor], tokens: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Scores [M] of silos from their tokens [M, 2d + 8]; equivariant under permutations of the silos."""
    x = functional.gelu(_norm(_linear(tokens, p, "input.0"), p, "input.norm"))
    x = _linear(x, p, "input.1")
    for index in range(BLOCKS):
        block = f"block.{index}"
        x = _norm(x + _dropout(attention(x, p, block, generator), generator), p, f"{block}.norm1")
        hidden = _dropout(functional.gelu(_linear(x, p, f"{block}.up")), generator)
        x = _norm(x + _dropout(_linear(hidden, p, f"{block}.down"), generator), p, f"{block}.norm2")
    return _linear(x, p, "score").squeeze(-1)


# --------------------------------------------------------------------------- inputs
def geometry(delta: Tensor, previous: Tensor | None, visual: slice, text: slice, samples: int) -> Tensor:
    """Four statistics of an update [P] (RCSR, released code), with the silo's previous one, None the first time.

    Returns:
        [4]: ||Δ||, ||Δ_visual|| / (||Δ_text|| + 1e-8), cos(Δ, Δ_previous) or 0, ||Δ|| / sqrt(n_k).
    """
    length = delta.norm()
    ratio = delta[visual].norm() / (delta[text].norm() + 1e-8)
    turn = torch.zeros_like(length)
    if previous is not None:  # same as `cosine`, without its temporaries of the model's size
        turn = torch.dot(delta, previous) / (length.clamp_min(EPSILON) * previous.norm().clamp_min(EPSILON))
    return torch.stack([length, ratio, turn, length / (math.sqrt(samples) + 1e-8)])


def filled(prototypes: Tensor, mask: Tensor, filler: Tensor) -> Tensor:
    """Prototypes [M, 2, d] with the filler [2, d] where the mask [M, 2] is not set."""
    return torch.where(mask[..., None], prototypes, filler)


def tokens(prototypes: Tensor, mask: Tensor, numbers: Tensor, losses: Tensor, hide_filled: bool) -> Tensor:
    """The router's input [M, 2d + 8]: both prototypes, their cosine, geometry, mask, loss.

    The norm ratio of a single-modality silo is about 1e8, so it is clipped to [0, 10] and put on a log scale.

    Args:
        prototypes: [M, 2, d], filled.
        mask: bool [M, 2].
        numbers: [M, 4] geometry as reported.
        losses: [M].
        hide_filled: zero the filled prototypes, so that only the mask tells the router about them.
    """
    shown = prototypes * mask[..., None] if hide_filled else prototypes
    bounded = numbers.clamp(-LARGEST, LARGEST)
    ratio = numbers[:, 1].clamp(0, 10).log1p()
    columns = [
        shown.flatten(1),
        cosine(shown[:, 0], shown[:, 1])[:, None],
        torch.stack([bounded[:, 0], ratio, bounded[:, 2], bounded[:, 3]], dim=1),
        mask.to(prototypes.dtype),
        losses.to(prototypes.dtype).clamp(-LARGEST, LARGEST)[:, None],
    ]
    return torch.cat(columns, dim=1)


# --------------------------------------------------------------------------- losses
def weights(scores: Tensor) -> Tensor:
    """Softmax over silos of the router's scores: w, float64 [M] (RCSR eq 7)."""
    return scores.double().softmax(0)


def entropy(weights: Tensor) -> Tensor:
    """H(w) = -sum_k w_k log w_k of weights [M]; a weight of 0 contributes 0 and has a finite gradient."""
    return -(weights * weights.clamp_min(1e-30).log()).sum()


def prototype_consistency(
    weights: Tensor,
    prototypes: Tensor,
    target: Tensor,
    mask: Tensor | None,
    *,
    beta: tuple[float, float] = (1.0, 1.0),
    beta4: float = 0.2,
) -> Tensor:
    """L_pc (RCSR eq 8): sum_v beta_v (1 - cos(sum_k w_k p_v^k, p̄_v)) - beta4 H(w).

    Args:
        weights: [M].
        prototypes: [M, 2, d], filled.
        target: [2, d] global prototypes, constants.
        mask: 0/1 [M, 2], excludes filled slots from the sum. None includes them, as printed; since they may equal the
            target, this rewards the router for weighting silos that lack a modality.
        beta: weights of image and text.
        beta4: weight of the entropy.
    """
    kept = weights[:, None] if mask is None else weights[:, None] * mask
    mixed = (kept[..., None] * prototypes).sum(0)
    distance = 1 - cosine(mixed, target.detach())
    return beta[0] * distance[0] + beta[1] * distance[1] - beta4 * entropy(weights)


def alignment_consistency(
    weights: Tensor, prototypes: Tensor, target: Tensor, half: bool = False, mask: Tensor | None = None
) -> Tensor:
    """L_ac (RCSR eq 9): 1 - cos(d̂, d̄) + sum_k w_k (1 - cos(d_k, d̂)), d_k = unit(p_I^k - p_T^k), d̂ = unit(sum w_k d_k).

    Args:
        weights: [M].
        prototypes: [M, 2, d], filled.
        target: [2, d] global prototypes, constants.
        half: halve both parts, as the released code does.
        mask: 0/1 [M, 2], keeps silos with both prototypes, with renormalised weights, because otherwise weight on the
            others would lower the loss; a constant if there are none. None keeps all silos, as printed.
    """
    if mask is not None:
        weights = weights * mask.prod(1)
        weights = weights / weights.sum().clamp_min(EPSILON)
    directions = unit(prototypes[:, 0] - prototypes[:, 1])
    mixed = unit(weights @ directions)
    aim = unit(target[0] - target[1]).detach()
    loss = 1 - cosine(mixed, aim) + (weights * (1 - cosine(directions, mixed))).sum()
    return 0.5 * loss if half else loss


def loss(weights: Tensor, filled: Tensor, mask: Tensor, target: Tensor, options: RcsrOptions) -> Tensor:
    """L_R = L_pc + beta5 L_ac (RCSR eqs 8 and 9), computed in the precision of the weights.

    Args:
        weights: router weights [M].
        filled: prototypes [M, 2, d], missing ones filled.
        mask: [M, 2], True for prototypes that are not fillers.
        target: global prototypes [2, d].
        options: weights and switches.
    """
    filled, target = filled.to(weights.dtype), target.to(weights.dtype)
    kept = mask.to(weights.dtype) if options.masked_pc else None
    beta = (options.beta1, options.beta2)
    consistency = prototype_consistency(weights, filled, target, kept, beta=beta, beta4=options.beta4)
    paired = mask.to(weights.dtype) if options.masked_ac else None
    alignment = alignment_consistency(weights, filled, target, options.eq9_half, paired)
    total = consistency + options.beta5 * alignment
    return functional.softplus(total) if options.router_softplus else total


# --------------------------------------------------------------------------- one step of Adam
@dataclass(frozen=True)
class Adam:
    """Adam's state over a flat buffer."""

    values: Tensor  # [R] parameters
    first: Tensor  # [R] mean of gradients
    second: Tensor  # [R] mean of squared gradients
    steps: int  # number of steps so far


def adam_step(state: Adam, gradient: Tensor, rate: float) -> Adam:
    """One step (Kingma and Ba 2015, betas 0.9 and 0.999, eps 1e-8); a gradient that is not finite is skipped."""
    if not bool(torch.isfinite(gradient).all()):
        return state
    steps = state.steps + 1
    first = state.first.lerp(gradient, 1 - 0.9)
    second = 0.999 * state.second + (1 - 0.999) * gradient.square()
    scale = (second.sqrt() / math.sqrt(1 - 0.999**steps)).add_(1e-8)
    values = state.values - rate / (1 - 0.9**steps) * first / scale
    return Adam(values, first, second, steps)


# ------------------------------------------------------------------------------------------------------- statistics
@dataclass(frozen=True)
class Statistics:
    """Statistics of M silos, in silo order."""

    prototypes: Tensor  # float32 [M, 2, d], zero for modalities the silo lacks
    mask: Tensor  # bool [M, 2], which prototypes are real
    geometry: Tensor  # float32 [M, 4], see :func:`geometry`
    losses: Tensor  # float64 [M]


@dataclass(frozen=True)
class Routed:
    """The weights of a merge, and what the coordinator's state becomes with them."""

    weights: Tensor  # float64 [M], sum 1
    statistics: Statistics  # of the M replies
    kept: Mapping[str, Tensor]  # tables, fairness tensors and personal weights
    adam: Adam
    log: Mapping[str, float]
