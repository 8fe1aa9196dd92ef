"""Golden values of RCSR, each computed by the project's own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from protocols import rcsr
from protocols.parts import aggregation, fairness, losses, personal_adapter, prototypes, router
from tests.golden_checks import Check, Inputs, compare_all, t

SILOS = range(4)


def weights(x: Inputs) -> torch.Tensor:
    return router.weights(t(x["logits"]))


def reported(x: Inputs) -> torch.Tensor:
    return torch.stack([t(x["PI"]), t(x["PT"])], dim=1)


def shared(x: Inputs) -> torch.Tensor:
    return torch.stack([t(x["gI"]), t(x["gT"])])


def options(x: Inputs, **changes: Any) -> rcsr.RcsrOptions:
    given = {
        name: float(x[key]) for name, key in (("lambda_a", "lam_a"), ("lambda_s", "lam_s"), ("lambda_anc", "lam_anc"))
    }
    return rcsr.RcsrOptions(**{**given, **changes})


def eq4(x: Inputs, *modalities: str) -> torch.Tensor:
    pairs = [(losses.local_prototype(t(x[f"z{m}"])), t(x[f"g{m}"])) for m in modalities]
    proximal = losses.proximal(t(x["theta_k"]) - t(x["theta"]), float(x["lam_s"]))
    return losses.prototype_regulariser(pairs, float(x["lam_a"])) + proximal


def eq5(x: Inputs, image: bool, text: bool) -> torch.Tensor:
    loss = losses.rcsr_loss(
        t(x["zI"]) if image else None,
        t(x["zT"]) if text else None,
        shared=(t(x["gI"]), t(x["gT"])),
        tau=options(x).tau,
        lambda_anc=float(x["lam_anc"]),
        lambda_a=float(x["lam_a"]),
        anchored=True,
        aligned=True,
    )
    return loss + losses.proximal(t(x["theta_k"]) - t(x["theta"]), float(x["lam_s"]))


def eq8(x: Inputs, masked: bool) -> torch.Tensor:
    return router.prototype_consistency(weights(x), reported(x), shared(x), t(x["mask"]) if masked else None)


def eq9(x: Inputs, half: bool = False) -> torch.Tensor:
    return router.alignment_consistency(weights(x), reported(x), shared(x), half)


def router_loss(x: Inputs, logits: torch.Tensor | None = None, **changes: Any) -> torch.Tensor:
    w = weights(x) if logits is None else router.weights(logits)
    return router.loss(w, reported(x), t(x["mask"]).bool(), shared(x), options(x, **changes))


def router_gradient(x: Inputs) -> torch.Tensor:
    logits = t(x["logits"]).requires_grad_()
    return torch.autograd.grad(router_loss(x, logits, masked_pc=False), logits)[0]


def normalised(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    running = t(x["running"])
    losses, after, _ = fairness.normalised_losses(
        t(x["losses"]), torch.from_numpy(x["group"]), running.nan_to_num(), ~running.isnan()
    )
    return losses, after


def log_q(x: Inputs, rule: fairness.Rule, center: bool = False) -> torch.Tensor:
    losses = t(x["losses"]) if rule == "code" else normalised(x)[0]
    return fairness.updated_log_q(
        t(x["q"]).log(),
        losses - 1 if center else losses,
        torch.from_numpy(x["sel"]),
        torch.full((len(losses),), 0.1, dtype=torch.float64),
        tau=0.1,
        rule=rule,
    )


def fused(x: Inputs, router: torch.Tensor | None = None) -> torch.Tensor:
    chosen = torch.from_numpy(x["sel"])
    return fairness.fused_weights(weights(x) if router is None else router, log_q(x, "paper")[chosen])


def theta_new(x: Inputs) -> torch.Tensor:
    deltas = list(t(x["deltas"]))
    return t(x["theta"]) + aggregation.weighted_sum(deltas, fused(x))


def ema(
    x: Inputs, modality: int, rate: float = 0.9, masked: bool = False, old: torch.Tensor | None = None
) -> torch.Tensor:
    return prototypes.moving_average(
        shared(x)[modality] if old is None else old,
        reported(x)[:, modality],
        fused(x),
        rate,
        t(x["mask"])[:, modality] if masked else None,
    )


def ema_twice(x: Inputs) -> torch.Tensor:
    once = losses.unit(ema(x, 0, rate=0.95))
    return losses.unit(ema(x, 0, rate=0.95, old=once))


def geometry(x: Inputs, first: bool) -> torch.Tensor:
    flat = {name: torch.cat([t(x[f"{name}_text"]).ravel(), t(x[f"{name}_visual"]).ravel()]) for name in ("u", "p")}
    border = x["u_text"].size
    text, visual = slice(0, border), slice(border, len(flat["u"]))
    return router.geometry(flat["u"], None if first else flat["p"], visual, text, int(x["n_local"]))


CHECKS: dict[str, Check] = {
    "eq2": lambda x: losses.info_nce(t(x["zI"]), t(x["zT"]), 0.07),
    "eq2_tau1": lambda x: losses.info_nce(t(x["zI"]), t(x["zT"]), 1.0),
    "eq3_image_only": lambda x: losses.anchor(t(x["zI"]), t(x["gT"])),
    "eq3_text_only": lambda x: losses.anchor(t(x["zT"]), t(x["gI"])),
    "eq4_paired": lambda x: eq4(x, "I", "T"),
    "eq4_image_only": lambda x: eq4(x, "I"),
    "eq5_paired": lambda x: eq5(x, True, True),
    "eq5_image_only": lambda x: eq5(x, True, False),
    "eq6_proto_I": lambda x: losses.local_prototype(t(x["zI"])),
    "eq6_proto_T": lambda x: losses.local_prototype(t(x["zT"])),
    "eq7_w": weights,
    "entropy_w": lambda x: router.entropy(weights(x)),
    "eq8": lambda x: eq8(x, masked=False),
    "eq8_masked": lambda x: eq8(x, masked=True),
    "eq9": eq9,
    "eq9_code": lambda x: eq9(x, half=True),
    "router_loss": lambda x: router_loss(x, masked_pc=False),
    "router_loss_masked": router_loss,
    "router_loss_code": lambda x: router_loss(x, masked_pc=False, beta4=0.1, eq9_half=True, router_softplus=True),
    "router_grad_logits": router_gradient,
    "eq10_norm_loss": lambda x: normalised(x)[0],
    "eq10_running": lambda x: normalised(x)[1],
    "eq10_q": lambda x: log_q(x, "paper").exp(),
    "eq10_q_entropic": lambda x: log_q(x, "entropic").exp(),
    "eq10_q_centered": lambda x: log_q(x, "entropic", center=True).exp(),
    "eq10_q_code": lambda x: log_q(x, "code").exp(),
    "eq10_value": lambda x: fairness.objective(log_q(x, "paper"), normalised(x)[0], torch.from_numpy(x["sel"]), 0.1),
    "eq11_w": fused,
    "eq11_w_no_minimax": lambda x: aggregation.damped(weights(x), torch.ones(4, dtype=torch.float64)),
    "eq11_w_warmup": lambda x: fused(x, aggregation.sample_weights([5, 3, 2, 10])),
    "theta_new": theta_new,
    "ema_I": lambda x: ema(x, 0),
    "ema_T": lambda x: ema(x, 1),
    "ema_I_masked": lambda x: ema(x, 0, masked=True),
    "ema_T_masked": lambda x: ema(x, 1, masked=True),
    "ema_I_unit": lambda x: losses.unit(ema(x, 0)),
    "ema_I_code_twice": ema_twice,
    "geometry": lambda x: geometry(x, first=False),
    "geometry_first": lambda x: geometry(x, first=True),
}


def strengths(x: Inputs, lambda_p: float) -> np.ndarray:
    return np.array([personal_adapter.strength(lambda_p, float(weight)) for weight in x["wR_grid"]])


def personal(x: Inputs, z: str) -> torch.Tensor:
    strength = personal_adapter.strength(float(x["lam_p"]), float(x["wR_grid"][2]))
    return personal_adapter.corrected(t(x[z]), t(x["W1"]), t(x["W2"]), strength)


CHECKS |= {
    "eq12_A": lambda x: personal_adapter.correction(t(x["zI"]), t(x["W1"]), t(x["W2"])),
    "eq12_z": lambda x: personal(x, "zI"),
    "eq12_loss_paired": lambda x: losses.info_nce(
        losses.unit(personal(x, "zI")), losses.unit(personal(x, "zT")), rcsr.RcsrOptions().tau
    ),
    "eq13_s_grid": lambda x: strengths(x, float(x["lam_p"])),
    "eq13_s_cap": lambda x: strengths(x, 0.45),
}

LOOSE = ("router_grad_logits",)


def test_golden_rcsr() -> None:
    compare_all("rcsr", CHECKS, loose=LOOSE)
