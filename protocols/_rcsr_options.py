"""Options of RCSR: the paper's numbers and, where it leaves a choice open, ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from protocols import _personal
from protocols._options import check


@dataclass(frozen=True)
class RcsrOptions:
    """Options of RCSR; defaults are the paper's numbers and, where it leaves a choice open, ours.

    Args:
        router: weigh by the router; without it by samples, or, ``uniform``, all reporters alike.
        minimax: multiply by the fairness weights q.
        client_align: the regulariser towards global prototypes (lambda_a of eq 4).
        anchor: anchoring of single-modality silos (eq 3), without which their personal adapters stay as they are, and
            they idle if there is no client_align either. ``multi`` anchors each sample to the nearest of all silos'
            centroids of the missing modality, which one prototype draws onto one point; not the paper's. Silos cluster
            each item once, when the warm-up is over; until there are centroids the one prototype stands.
        anchor_centroids: of ``multi``, a silo's centroids of a modality, at most.
        anchor_support: of ``multi``, least samples behind a centroid. Beside the prototype of eq 6, the mean of all
            items of a silo of 128 or fewer, it hides no item that alone is in no centroid.
        filler: what stands for a missing modality's prototype at the coordinator: the global ``ema``, ``zero``, or a
            vector ``learned`` together with the router (our reading: the paper does not say where it is trained).
        tau: temperature of InfoNCE.
        lambda_anc: weight of the anchoring loss, of ``anchor`` alone.
        lambda_a: weight of the prototype regulariser, of ``client_align`` alone (the paper's table: lambda_align).
        lambda_s: weight of the proximal term, squared norm as eq 4 prints it.
        warmup: merges during which n_k weights stand in for the router's, which is not trained meanwhile (algorithm 1).
            Of ``router: true`` alone, as are beta1, beta2, beta4, beta5 and router_*; but ``multi`` clusters when it is
            over.
        ema: share of the old global prototype kept at a full round.
        proto_unit: global prototypes are kept at length 1.
        masked_ema: fillers stay out of the moving average; included, as printed, if false.
        beta1: weight of the image prototype in eq 8.
        beta2: weight of the text prototype in eq 8.
        beta4: weight of the router's entropy in eq 8.
        beta5: weight of the alignment loss (eq 9).
        masked_pc: fillers stay out of eq 8; included, as printed, if false.
        eq9_half: halve eq 9, as the released code does.
        router_softplus: put softplus around the router's loss, as the released code does.
        router_rate: Adam's learning rate for the router.
        router_mask: ``input`` hides filled prototypes from the router, ``none`` shows it the fillers.
        router_over: ``reporters`` of the round, as printed, or the ``table`` of all silos' last statistics, restricted
            to the reporters and renormalised; the latter keeps a meaning when few replies are merged at a time. A lone
            reply's weight is 1 by either, and whatever ``minimax`` says: in ``async`` mode ``minimax`` acts on no model
            and this, by eq 13, on the silos' own alone. Not given, it is the table where merges are of fewer replies
            than a round has.
        fair_eta: step size of q; like all that begins with fair, of ``minimax`` alone.
        fair_tau: weight of q's entropy; not used by ``fair_update: paper``. With ``entropic`` it pulls reporters alone,
            towards equal weights and, silos that report more often than others, beyond them: of 30 silos with equal
            losses 5 that are in each of 200 merges have 20 times the q of those in a fifth of them. 0 where silos
            report unequally often. At most 1 / fair_eta, beyond which q would swing.
        fair_ema: share of the old group mean loss kept at a full round.
        fair_update: ``entropic``, an exact step with q's entropy; ``paper``, as printed, without it; ``code``, raw
            losses and q to the power 1 / (1 + fair_tau). The printed formula has no bounds and ``paper`` none; with
            ``entropic`` a loss counts at most 10 times its group's running mean, which is held between a tenth and
            1000 times the median of the group's last losses, and one of 1e-6 or less as average: else one absurd
            reply would take the merge, or be what its group is measured by for the rest of the run.
        fair_center: pull by the normalised loss minus 1, so that an average loss pulls nowhere however often it is
            reported; the normalised loss itself, as printed, if false. Not used by ``code``, which takes raw losses.
        branch_renorm: each branch is averaged over the silos that trained it; the paper's plain sum if false.
        personal: RCSR-p's adapters: ``none``, of ``fixed`` strength lambda_p, or weighed by the ``router`` (eq 13).
        lambda_p: strength of personalisation; like all that begins with personal, of ``personal`` other than ``none``.
        personal_onset: round T_p from which adapters are fine-tuned.
        personal_hidden: width of an adapter.
        personal_epochs: epochs of fine-tuning after each local training.
        personal_rate: learning rate of fine-tuning, as a share of the round's.
        s_norm: router weights enter eq 13 ``plain``, as printed, or ``relative`` to a uniform weight, w_k |S|: with 15
            reporters every plain weight is near 1/15 and eq 13 nearly constant. Of ``personal: router`` alone.
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
