"""Options of RCSR, with the paper's values as defaults and our own where the paper leaves them open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedmq.config.options import OptionError
from fedmq.config.sections import Count, Fraction, NonNegative, Positive
from protocols.parts import aggregation, personal_adapter
from protocols.parts.losses import TauOptions

#: Where both the paper and the released code differ from the defaults. The values of the paper's table 3 are defaults.
_PUBLISHED: Mapping[str, object] = {
    "masked_ema": False,
    "router_over": "reporters",
    "branch_renorm": False,
    "backbone.head": "mlp",
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
        "router=true": ("beta?", "router_*", "masked_?c", "eq9_half"),
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
    anchor_centroids: Count = 16
    anchor_support: Count = 4
    filler: Literal["ema", "zero", "learned"] = "ema"
    lambda_anc: NonNegative = 1.0
    lambda_a: NonNegative = 0.1
    lambda_s: NonNegative = 0.01
    warmup: Annotated[int, Field(ge=0)] = 20
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
