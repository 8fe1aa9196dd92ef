"""Golden values of the baselines and of the aggregation rules that all methods share."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from fedmq.config.sections import Staleness
from fedmq.federation.updates import damping
from fedmq.models.two_tower import through_shared
from protocols import creamfl, creamfl_public, fedcmr, fedmekt, fedproto, mfcpl, moon, plfedcmh
from protocols.objectives import shdch
from protocols.parts import aggregation, alternating, class_prototypes, losses
from tests import definitions
from tests.golden_checks import Check, Inputs, compare_all, t

STALENESS = (0, 3, 8)


def damped(x: Inputs, exponent: float) -> torch.Tensor:
    function = Staleness(kind="polynomial", exponent=exponent)
    factors = torch.tensor([damping(function, s) for s in STALENESS], dtype=torch.float64)
    return aggregation.damped(sample_weights(x), factors)


def sample_weights(x: Inputs) -> torch.Tensor:
    return aggregation.sample_weights([int(n) for n in x["n_k"]])


def class_codes(x: Inputs, *, swept: bool = False) -> tuple[shdch.Level, shdch.Level]:
    """The coarse and the fine level; with ``swept``, the coarse codes are those after one sweep."""
    coarse = shdch.Level(0.3, t(x["L1"]), t(x["Y1"]))
    fine = shdch.Level(0.7, functional.one_hot(torch.from_numpy(x["y"]), len(x["Y2"])).double(), t(x["Y2"]))
    if not swept:
        return coarse, fine
    eta = torch.full((len(coarse.codes), 1), 100.0, dtype=torch.float64)
    codes = shdch.swept_codes(coarse, [t(x["F"]), t(x["G"])], fine.codes, t(x["S12"]), eta, 1)
    return shdch.Level(coarse.weight, coarse.labels, codes), fine


def common_codes(x: Inputs) -> torch.Tensor:
    return alternating.common_codes({"image": t(x["F"]), "text": t(x["G"])})


def shdch_objective(x: Inputs, *, swept: bool = False) -> torch.Tensor:
    """The full objective; only tests need the value of its tie loss, which ``swept_codes`` decreases."""
    levels = class_codes(x, swept=swept)
    outputs = [shdch.output_loss(t(x[name]), common_codes(x), levels, 10.0) for name in "FG"]
    return outputs[0] + outputs[1] + definitions.tie_loss(levels[0].codes, levels[1].codes, t(x["S12"]), 100.0)


def plfedcmh_batch(x: Inputs) -> torch.Tensor:
    fine = class_codes(x)[1]
    level = shdch.Level(0.5, fine.labels, fine.codes)
    valid = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    own = shdch.output_loss(t(x["F"]), common_codes(x), [level], 10.0)
    added = plfedcmh.prototype_loss(t(x["F"]), t(x["pre"]), fine.labels, t(x["P"]), valid, plfedcmh.PlFedCmhOptions())
    return (own + added) / (len(x["F"]) * 40)


def plfedcmh_mix(x: Inputs) -> torch.Tensor:
    models = t(x["W"])
    weights = plfedcmh.mixing_weights(t(x["hyper_alpha"])[None], torch.ones(len(models), dtype=torch.bool))
    block = plfedcmh.mixed_blocks(weights, models.flatten(1), {"block": slice(0, models[0].numel())})["block"]
    return block.view(models.shape[1:])


def one_hot(x: Inputs, classes: int) -> torch.Tensor:
    return functional.one_hot(torch.from_numpy(x["y"]), classes).double()


def silos_prototypes(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """FedProto's local prototypes [K, C, d] and counts [K, C] of the three silos."""
    members = functional.one_hot(torch.from_numpy(x["yk"]), 4).double()
    found = [class_prototypes.class_means(f, m) for f, m in zip(t(x["f"]), members, strict=True)]
    means, counts = zip(*found, strict=True)
    return torch.stack(means), torch.stack(counts)


def fedproto_loss(x: Inputs) -> torch.Tensor:
    means, valid = class_prototypes.global_means(*silos_prototypes(x), weighted=False)
    members = functional.one_hot(torch.from_numpy(x["yk"][0]), 4)
    return fedproto.prototype_loss(t(x["f"][0]), members, means, valid)


def adapted(x: Inputs, scale: float) -> torch.Tensor:
    """pFedMMA's adapter with the golden layers."""
    layers = [partial(functional.linear, weight=t(x[f"W{name}"]), bias=t(x[f"b{name}"])) for name in "dsu"]
    return through_shared(t(x["z"]), *layers, scale)


def cmr_weights(x: Inputs) -> torch.Tensor:
    losses = t(x["loss_k"])
    return fedcmr.weights_of(t(x["n_k"]), t(x["c_k"]), losses, float(losses.mean()), 100.0)


def cmr_global(x: Inputs) -> torch.Tensor:
    layers = t(x["W"])
    return aggregation.weighted_sum(list(layers.flatten(1)), cmr_weights(x)).view(layers.shape[1:])


CHECKS: dict[str, Check] = {
    "fedcmr_weights": cmr_weights,
    "fedcmr_global": cmr_global,
    "fedcmr_local": lambda x: fedcmr.residual(cmr_global(x), t(x["W"][0]) - t(x["W"][1]), 0.5),
    "fedprox": lambda x: losses.proximal(t(x["theta"]) - t(x["ref"]), float(x["mu"]) / 2),
    "fedprox_grad": lambda x: losses.proximal_gradient(t(x["theta"]) - t(x["ref"]), float(x["mu"]) / 2),
    "moon_buffer1": lambda x: moon.model_contrast(t(x["z"]), t(x["zg"]), list(t(x["zprev"][:1])), 0.5),
    "moon_buffer2": lambda x: moon.model_contrast(t(x["z"]), t(x["zg"]), list(t(x["zprev"])), 0.5),
    "moon_first": lambda x: moon.model_contrast(t(x["z"]), t(x["zg"]), [t(x["zg"])], 0.5),
    "fedproto_local": lambda x: silos_prototypes(x)[0],
    "fedproto_counts": lambda x: silos_prototypes(x)[1],
    "fedproto_uniform": lambda x: class_prototypes.global_means(*silos_prototypes(x), weighted=False)[0],
    "fedproto_weighted": lambda x: class_prototypes.global_means(*silos_prototypes(x), weighted=True)[0],
    "fedproto_valid": lambda x: class_prototypes.global_means(*silos_prototypes(x), weighted=False)[1],
    "fedproto_loss": fedproto_loss,
    "kl_T3": lambda x: fedmekt.divergence(t(x["z"]), t(x["teacher"]), 3.0),
    "kl_T1": lambda x: fedmekt.divergence(t(x["z"]), t(x["teacher"]), 1.0),
    "pfedmma_0.5": lambda x: adapted(x, 0.5),
    "pfedmma_0.001": lambda x: adapted(x, 0.001),
    "proto_contrast": lambda x: mfcpl.prototype_contrast(t(x["z"]), one_hot(x, 4), t(x["protos"]), 0.5),
    "proto_l2": lambda x: mfcpl.prototype_distance(t(x["z"]), one_hot(x, 4), t(x["protos"])),
    "creamfl_inter": lambda x: creamfl.inter_modal(
        t(x["reps"][0][x["idx"]]), t(x["g_other"]), torch.from_numpy(x["idx"]), 0.5
    ),
    "creamfl_w": lambda x: creamfl_public.item_weights(t(x["reps"]), t(x["g_other"])),
    "creamfl_agg": lambda x: creamfl_public.ensemble(
        t(x["reps"]), creamfl_public.item_weights(t(x["reps"]), t(x["g_other"]))
    ),
    "creamfl_intra": lambda x: creamfl.intra_modal(*(t(x["reps"][k][x["idx"]]) for k in range(3)), 0.5),
    "shdch": shdch_objective,
    "shdch_Y1_new": lambda x: class_codes(x, swept=True)[0].codes,
    "shdch_after_Y1": lambda x: shdch_objective(x, swept=True),
    "plfedcmh_batch": plfedcmh_batch,
    "plfedcmh_mix": plfedcmh_mix,
    "fedavg": lambda x: aggregation.weighted_sum(list(t(x["W"])), sample_weights(x)),
    "damped_a0.5_s0_3_8": lambda x: damped(x, 0.5),
    "damped_a0": lambda x: damped(x, 0.0),
    "branch_average_101": lambda x: aggregation.weighted_sum(
        list(t(x["W"])),
        aggregation.branch_weights(sample_weights(x), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)),
    ),
}


def test_golden_baselines() -> None:
    compare_all("baselines", CHECKS)
