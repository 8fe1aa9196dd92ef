"""Options of RCSR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from protocols import _personal
from protocols._options import check


@dataclass(frozen=True)
class RcsrOptions:
    """Options of RCSR; defaults are the paper's values, or our choice where the paper gives none.

    Args:
        router: weight replies by the router; ``false`` weights by samples, ``uniform`` weights all replies equally.
        minimax: multiply the weights by the fairness weights q.
        client_align: regularise towards global prototypes (lambda_a of eq 4).
        anchor: anchor single-modality silos (eq 3). Without it their personal adapters do not train, and without
            client_align as well they idle. ``multi`` (not in the paper) anchors each sample to the nearest of all
            silos' centroids of the missing modality, whereas a single prototype pulls all samples to one point. Silos
            cluster each item once, after the warm-up; until there are centroids the single prototype is used.
        anchor_centroids: maximum centroids per silo and modality; ``multi`` only.
        anchor_support: minimum samples per centroid; ``multi`` only. It does not hide a single item outside all
            centroids from a coordinator that also has the prototype of eq 6, the mean of all items of a silo with at
            most 128 items.
        filler: the coordinator's substitute for the prototype of a missing modality: the global ``ema``, ``zero``, or a
            vector ``learned`` together with the router (our reading: the paper does not say where it is trained).
        tau: temperature of InfoNCE.
        lambda_anc: weight of the anchoring loss; ``anchor`` only.
        lambda_a: weight of the prototype regulariser, lambda_align in the paper's table; ``client_align`` only.
        lambda_s: weight of the proximal term, a squared norm as in eq 4.
        warmup: number of merges that use n_k weights and do not train the router (algorithm 1). Applies to
            ``router: true`` only, like beta1, beta2, beta4, beta5 and router_*; ``anchor: multi`` starts clustering
            after it.
        ema: fraction of the old global prototype kept over a full round.
        proto_unit: normalise global prototypes to unit length.
        masked_ema: exclude fillers from the moving average; false includes them, as printed.
        beta1: weight of the image prototype in eq 8.
        beta2: weight of the text prototype in eq 8.
        beta4: weight of the router's entropy in eq 8.
        beta5: weight of the alignment loss (eq 9).
        masked_pc: exclude fillers from eq 8; false includes them, as printed.
        eq9_half: halve eq 9, as in the released code.
        router_softplus: apply softplus to the router's loss, as in the released code.
        router_rate: Adam's learning rate for the router.
        router_mask: ``input`` hides fillers from the router, ``none`` does not.
        router_over: apply the router to the round's replies (``reporters``), as printed, or to the ``table`` of all
            silos' last statistics, restricted to the replying silos and renormalised; the table remains useful when a
            merge has few replies. A single reply has weight 1 either way and whatever ``minimax`` is: in ``async`` mode
            ``minimax`` affects no model, and the router affects personal models only (eq 13). Default: the table if
            merges have fewer replies than a round.
        fair_eta: step size of q; fair_* options apply to ``minimax`` only.
        fair_tau: weight of q's entropy; not used by ``fair_update: paper``. With ``entropic`` it acts on replying silos
            only: it pulls them towards equal weights, and silos that reply more often than others beyond that. Of 30
            silos with equal losses, 5 that reply in each of 200 merges have 20 times the q of silos that reply in a
            fifth of them. Set it to 0 if silos reply at unequal rates. At most 1 / fair_eta, above which q oscillates.
        fair_ema: fraction of the old group mean loss kept over a full round.
        fair_update: ``entropic``, an exact step with q's entropy; ``paper``, as printed, without entropy or bounds;
            ``code``, raw losses and q to the power 1 / (1 + fair_tau). ``entropic`` caps a loss at 10 times its group's
            running mean, clamps that mean to between 0.1 and 1000 times the median of the group's last losses, and
            counts a loss of at most 1e-6 as average, so that one outlier can neither dominate a merge nor distort its
            group's mean for the rest of the run.
        fair_center: use the normalised loss minus 1 as the gradient of q, so that average losses leave q unchanged
            however often they are reported; false uses the normalised loss, as printed. Not used by ``code``, which
            uses raw losses.
        branch_renorm: average each branch over the silos that trained it; false takes the paper's plain sum.
        personal: RCSR-p's adapters: ``none``, of ``fixed`` strength lambda_p, or weighted by the ``router`` (eq 13).
        lambda_p: strength of personalisation. This and personal_* apply if ``personal`` is not ``none``.
        personal_onset: round T_p from which adapters are fine-tuned.
        personal_hidden: width of an adapter.
        personal_epochs: epochs of fine-tuning after each local training.
        personal_rate: learning rate of fine-tuning, as a fraction of the round's.
        s_norm: use router weights in eq 13 ``plain``, as printed, or ``relative`` to a uniform weight, w_k |S|: with 15
            replies every plain weight is near 1/15 and eq 13 is nearly constant. ``personal: router`` only.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "anchor": ("lambda_anc",),
        "anchor=multi": ("anchor_*",),
        "client_align": ("lambda_a",),
        "router=true|anchor=multi": ("warmup",),
        "router=true|masked_ema=false": ("filler",),
        "router=true": ("beta?", "router_*", "masked_pc", "eq9_half"),
        "minimax": ("fair_*",),
        "fair_update=entropic|fair_update=code": ("fair_tau",),
        "fair_update=entropic|fair_update=paper": ("fair_ema", "fair_center"),
        "personal": ("lambda_p", "personal_*"),
        "personal=router": ("s_norm",),
    }

    router: bool | Literal["uniform"] = True
    minimax: bool = True
    client_align: bool = True
    anchor: bool | Literal["multi"] = True
    anchor_centroids: int = 16
    anchor_support: int = 4
    filler: Literal["ema", "zero", "learned"] = "ema"
    tau: float = 0.07
    lambda_anc: float = 1.0
    lambda_a: float = 0.1
    lambda_s: float = 0.01
    warmup: int = 20
    ema: float = 0.9
    proto_unit: bool = True
    masked_ema: bool = True
    beta1: float = 1.0
    beta2: float = 1.0
    beta4: float = 0.2
    beta5: float = 0.3
    masked_pc: bool = True
    eq9_half: bool = False
    router_softplus: bool = False
    router_rate: float = 1e-3
    router_mask: Literal["input", "none"] = "input"
    router_over: Literal["reporters", "table"] | None = None
    fair_eta: float = 0.1
    fair_tau: float = 0.1
    fair_ema: float = 0.9
    fair_update: Literal["entropic", "paper", "code"] = "entropic"
    fair_center: bool = True
    branch_renorm: bool = True
    personal: Literal["none", "fixed", "router"] = "none"
    lambda_p: float = 0.2
    personal_onset: int = 50
    personal_hidden: int = 64
    personal_epochs: int = 1
    personal_rate: float = 0.1
    s_norm: Literal["plain", "relative"] = "plain"

    def __post_init__(self) -> None:
        for name in ("tau", "router_rate", "personal_rate"):
            check(name, getattr(self, name), 0.0, open_low=True)
        for name in ("anchor_centroids", "anchor_support", "personal_hidden", "personal_epochs"):
            check(name, getattr(self, name), 1)
        for name in ("lambda_anc", "lambda_a", "lambda_s", "fair_eta", "fair_tau", "warmup", "personal_onset"):
            check(name, getattr(self, name), 0.0)
        if self.fair_update == "entropic":
            check("fair_eta times fair_tau", self.fair_eta * self.fair_tau, 0.0, 1.0)
        for order in (1, 2, 4, 5):
            check(f"beta{order}", getattr(self, f"beta{order}"), 0.0)
        for name, most in (("ema", 1.0), ("fair_ema", 1.0), ("lambda_p", _personal.STRONGEST)):
            check(name, getattr(self, name), 0.0, most)
