"""Golden values of FedSCMR and its base DSCMR."""

from __future__ import annotations

from typing import Any

import torch

from fedmq.models.two_tower import Out
from protocols import fedscmr
from protocols.objectives import dscmr
from protocols.parts import aggregation
from protocols.parts import fedscmr_equations as equations
from tests.golden_checks import Check, Inputs, compare, every, t

NORMS: tuple[equations.Norm, ...] = ("frob", "row")


def similar(x: Inputs, labels: str = "L", *, binary: bool = True) -> torch.Tensor:
    counts = t(x[labels]) @ t(x[labels]).T
    return (counts > 0).double() if binary else counts


def outs(x: Inputs) -> tuple[Out, Out]:
    return (
        Out(t(x["SV"]), t(x["SV"]), t(x["SpV"]), t(x["pv"])),
        Out(t(x["ST"]), t(x["ST"]), t(x["SpT"]), t(x["pt"])),
    )


def eq8(x: Inputs, norm: equations.Norm, **switches: bool) -> torch.Tensor:
    options = fedscmr.FedScmrOptions(norm=norm, alpha=float(x["alpha"]), beta=float(x["beta"]), **switches)
    return fedscmr.local_loss(*outs(x), t(x["L"]), options)


def features(x: Inputs) -> tuple[torch.Tensor, ...]:
    return t(x["SV"]), t(x["ST"]), t(x["SpV"]), t(x["SpT"])


def scalars(x: Inputs, rows: Any = slice(None)) -> tuple[torch.Tensor, ...]:
    return t(x["n_k"][rows]), t(x["c_k"][rows]), t(x["loss_k"][rows]), t(x["map_k"][rows])


def eq9(x: Inputs) -> torch.Tensor:
    weights = equations.contribution(*scalars(x), 30.0)
    layers = t(x["W_k"])
    return aggregation.weighted_sum(list(layers.flatten(1)), weights).view(layers.shape[1:])


CHECKS: dict[str, Check] = {
    "eq2_four": lambda x: equations.discrimination(t(x["SV"]), t(x["ST"]), similar(x), 4),
    "eq2_three": lambda x: equations.discrimination(t(x["SV"]), t(x["ST"]), similar(x), 3),
    "eq2_four_multilabel": lambda x: equations.discrimination(t(x["SV"]), t(x["ST"]), similar(x, "L_multi"), 4),
    "eq2_three_multilabel_counts": lambda x: equations.discrimination(
        t(x["SV"]), t(x["ST"]), similar(x, "L_multi", binary=False), 3
    ),
    "eq5_frob_inactive": lambda x: equations.hinge(t(x["SpV"]), t(x["SV"]), t(x["ST"]), "frob"),
    "dscmr_base": lambda x: dscmr.loss(*outs(x), t(x["L"]), dscmr.Options()),
    "eq10_omega": lambda x: equations.proportion(*scalars(x)[:2]),
    "eq11_psi": lambda x: equations.progress(t(x["loss_k"])),
    "eq12_phi": lambda x: equations.quality(t(x["map_k"])),
    "eq13_lambda": lambda x: torch.stack([equations.contribution(*scalars(x), float(g)) for g in x["gammas"]]),
    "eq13_without_phi": lambda x: equations.contribution(*scalars(x), 0.0),
    "eq13_partial_02_gamma30": lambda x: equations.contribution(*scalars(x, [0, 2]), 30.0),
    "eq9_W_gamma30": eq9,
}
for _norm in NORMS:
    CHECKS |= {
        f"eq1_{_norm}": lambda x, n=_norm: (
            equations.label_loss(t(x["pv"]), t(x["L"]), n) + equations.label_loss(t(x["pt"]), t(x["L"]), n)
        ),
        f"eq3_{_norm}": lambda x, n=_norm: equations.consistency(*features(x), n),
        f"eq4_{_norm}": lambda x, n=_norm: (
            equations.discrimination(t(x["SV"]), t(x["ST"]), similar(x), 4) + equations.consistency(*features(x), n)
        ),
        f"eq5_{_norm}": lambda x, n=_norm: equations.hinge(t(x["SpV"]), t(x["ST"]), t(x["SV"]), n),
        f"eq6_{_norm}": lambda x, n=_norm: equations.hinge(t(x["SpT"]), t(x["SV"]), t(x["ST"]), n),
        f"eq7_{_norm}": lambda x, n=_norm: equations.cross_space(*features(x), n),
        f"eq8_{_norm}": lambda x, n=_norm: eq8(x, n),
        f"eq8_{_norm}_wo_Lcs": lambda x, n=_norm: eq8(x, n, loss_cs=False),
        f"eq8_{_norm}_wo_Lccs": lambda x, n=_norm: eq8(x, n, loss_ccs=False),
    }


@every(CHECKS)
def test_golden_fedscmr(key: str) -> None:
    compare("fedscmr", key, CHECKS[key])
