"""Golden values of FedSCMR and its base DSCMR."""

from __future__ import annotations

from typing import Any

import torch

from fedmq.models.two_tower import Out
from protocols import fedscmr
from protocols.objectives import dscmr
from protocols.parts import aggregation
from tests.golden_checks import Check, Inputs, compare_all, t

NORMS: tuple[fedscmr.Norm, ...] = ("frob", "row")


def similar(x: Inputs, labels: str = "L", *, binary: bool = True) -> torch.Tensor:
    counts = t(x[labels]) @ t(x[labels]).T
    return (counts > 0).double() if binary else counts


def outs(x: Inputs) -> tuple[Out, Out]:
    return (Out(t(x["SV"]), t(x["SV"]), t(x["SpV"]), t(x["pv"])), Out(t(x["ST"]), t(x["ST"]), t(x["SpT"]), t(x["pt"])))


def eq8(x: Inputs, norm: fedscmr.Norm, **switches: bool) -> torch.Tensor:
    options = fedscmr.FedScmrOptions(norm=norm, alpha=float(x["alpha"]), beta=float(x["beta"]), **switches)
    return fedscmr.local_loss(*outs(x), t(x["L"]), options)


def features(x: Inputs) -> tuple[torch.Tensor, ...]:
    return t(x["SV"]), t(x["ST"]), t(x["SpV"]), t(x["SpT"])


def scalars(x: Inputs, rows: Any = slice(None)) -> tuple[torch.Tensor, ...]:
    return t(x["n_k"][rows]), t(x["c_k"][rows]), t(x["loss_k"][rows]), t(x["map_k"][rows])


def eq9(x: Inputs) -> torch.Tensor:
    weights = fedscmr.contribution(*scalars(x), 30.0)
    layers = t(x["W_k"])
    return aggregation.weighted_sum(list(layers.flatten(1)), weights).view(layers.shape[1:])


CHECKS: dict[str, Check] = {
    "eq2_four": lambda x: fedscmr.discrimination(t(x["SV"]), t(x["ST"]), similar(x), 4),
    "eq2_three": lambda x: fedscmr.discrimination(t(x["SV"]), t(x["ST"]), similar(x), 3),
    "eq2_four_multilabel": lambda x: fedscmr.discrimination(t(x["SV"]), t(x["ST"]), similar(x, "L_multi"), 4),
    "eq2_three_multilabel_counts": lambda x: fedscmr.discrimination(
        t(x["SV"]), t(x["ST"]), similar(x, "L_multi", binary=False), 3
    ),
    "eq5_frob_inactive": lambda x: fedscmr.hinge(t(x["SpV"]), t(x["SV"]), t(x["ST"]), "frob"),
    "dscmr_base": lambda x: dscmr.loss(*outs(x), t(x["L"]), dscmr.Options()),
    "eq10_omega": lambda x: fedscmr.proportion(*scalars(x)[:2]),
    "eq11_psi": lambda x: fedscmr.progress(t(x["loss_k"])),
    "eq12_phi": lambda x: fedscmr.quality(t(x["map_k"])),
    "eq13_lambda": lambda x: torch.stack([fedscmr.contribution(*scalars(x), float(g)) for g in x["gammas"]]),
    "eq13_without_phi": lambda x: fedscmr.contribution(*scalars(x), 0.0),
    "eq13_partial_02_gamma30": lambda x: fedscmr.contribution(*scalars(x, [0, 2]), 30.0),
    "eq9_W_gamma30": eq9,
}
for _norm in NORMS:
    CHECKS |= {
        f"eq1_{_norm}": lambda x, n=_norm: (
            fedscmr.label_loss(t(x["pv"]), t(x["L"]), n) + fedscmr.label_loss(t(x["pt"]), t(x["L"]), n)
        ),
        f"eq3_{_norm}": lambda x, n=_norm: fedscmr.consistency(*features(x), n),
        f"eq4_{_norm}": lambda x, n=_norm: (
            fedscmr.discrimination(t(x["SV"]), t(x["ST"]), similar(x), 4) + fedscmr.consistency(*features(x), n)
        ),
        f"eq5_{_norm}": lambda x, n=_norm: fedscmr.hinge(t(x["SpV"]), t(x["ST"]), t(x["SV"]), n),
        f"eq6_{_norm}": lambda x, n=_norm: fedscmr.hinge(t(x["SpT"]), t(x["SV"]), t(x["ST"]), n),
        f"eq7_{_norm}": lambda x, n=_norm: fedscmr.cross_space(*features(x), n),
        f"eq8_{_norm}": lambda x, n=_norm: eq8(x, n),
        f"eq8_{_norm}_wo_Lcs": lambda x, n=_norm: eq8(x, n, loss_cs=False),
        f"eq8_{_norm}_wo_Lccs": lambda x, n=_norm: eq8(x, n, loss_ccs=False),
    }


def test_golden_fedscmr() -> None:
    compare_all("fedscmr", CHECKS)
