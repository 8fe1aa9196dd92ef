"""Golden values of FedCAFE and its base DCMH, each computed by the project's own functions."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from fedmq.config.scenario import Objective
from fedmq.encoders.base import InputSpec
from fedmq.models import hash_networks
from protocols import fedcafe
from protocols.objectives import dcmh
from protocols.parts import aggregation, alternating, memory
from protocols.parts.class_prototypes import class_means
from tests.golden_checks import Check, Inputs, compare_all, t

Kl = Literal["normalised", "code", "printed"]


def enhanced(
    x: Inputs, modality: str, outputs: torch.Tensor | None = None, *, downloaded: bool = False
) -> torch.Tensor:
    where = f"g_{modality}" if downloaded else f"_{modality}"
    raw = t(x[f"O{where}"]) if outputs is None else outputs
    return hash_networks.enhanced(raw, t(x[f"logits{where}"]), t(x["P_g"]))


def eq5(x: Inputs, modality: str) -> torch.Tensor:
    return fedcafe.enhancement_loss(enhanced(x, modality), t(x[f"O_{modality}"]))


def eq5_gradient(x: Inputs, *, detached: bool) -> torch.Tensor:
    raw = t(x["O_x"]).requires_grad_()
    options = fedcafe.FedCafeOptions(alpha=1.0, loss_c=False, loss_d=False, le_detach=detached)
    loss = fedcafe.auxiliary_loss(enhanced(x, "x", raw), raw, raw, raw, [], options)
    assert loss is not None
    return torch.autograd.grad(loss, raw)[0]


def references(x: Inputs) -> list[torch.Tensor]:
    return [enhanced(x, modality, downloaded=True) for modality in "xy"]


def eq7(x: Inputs, modality: str, kl: Kl) -> torch.Tensor:
    return fedcafe.label_divergence(t(x[f"logits_{modality}"]), t(x["L_multi"]), kl)


def dcmh_terms(x: Inputs, modality: str) -> torch.Tensor:
    buffers = {"x": t(x["F_buf"]), "y": t(x["G_buf"])}
    rows, labels = torch.from_numpy(x["ind"]), t(x["L_multi"])
    return dcmh.terms(
        t(x[f"O_{modality}"])[rows],
        buffers[modality],
        buffers["y" if modality == "x" else "x"],
        alternating.common_codes({"image": buffers["x"], "text": buffers["y"]})[rows],
        (labels[rows] @ labels.T > 0).double(),
        rows,
    )


def dcmh_loss(x: Inputs, modality: str) -> torch.Tensor:
    return dcmh.batch_loss(dcmh_terms(x, modality), len(x["ind"]), len(x["L_multi"]), dcmh.Options(eta=1.0))


def eq8(x: Inputs, modality: str) -> torch.Tensor:
    alpha, eta, gamma = (float(value) for value in x["hyper"])
    added = fedcafe.auxiliary_loss(
        enhanced(x, modality),
        t(x[f"O_{modality}"]),
        t(x[f"logits_{modality}"]),
        t(x["L_multi"]),
        references(x),
        fedcafe.FedCafeOptions(alpha=alpha, eta=eta, gamma=gamma),
    )
    assert added is not None
    return dcmh_loss(x, modality) + added


def similar(x: Inputs, kind: str, silo: int) -> torch.Tensor:
    shared = torch.from_numpy(x["labels_global"])
    local = shared if kind == "identity" else torch.from_numpy(x["labels_local"][silo])
    return (local[:, None] == shared[None]).double()


def eq9(x: Inputs, kind: str) -> torch.Tensor:
    memories = t(x["P_local"])
    return torch.stack([memory.difference(p, t(x["P_g"]), similar(x, kind, k)) for k, p in enumerate(memories)])


def eq9_of_reports(x: Inputs) -> torch.Tensor:
    """Equation 9 as a merge computes it from all reports; every row has support here."""
    classes = len(x["P_g"])
    reports = [(each, torch.ones(classes, dtype=torch.int64)) for each in t(x["P_local"])]
    return memory.differences(reports, t(x["P_g"]), torch.ones(classes, dtype=torch.bool), by_class=True)


def eq11(x: Inputs, name: str, kind: str) -> torch.Tensor:
    models = t(x[name])
    merged = aggregation.weighted_sum([each.flatten() for each in models], memory.shares(eq9(x, kind), "linear"))
    return merged.view(models.shape[1:])


def fused(x: Inputs) -> torch.Tensor:
    return memory.fused([enhanced(x, "x"), enhanced(x, "y")])


def means(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return class_means(fused(x), t(x["L_single"]))


def global_memory(x: Inputs) -> torch.Tensor:
    rows = t(x["P_local"])
    support = torch.ones(rows.shape[:2], dtype=torch.int64)
    return memory.global_memory(rows, support, torch.zeros_like(rows[0]), "kmeans_seeded", np.random.default_rng(0))[0]


CHECKS: dict[str, Check] = {
    **{f"eq3_VP_{m}": lambda x, m=m: hash_networks.memory_feature(t(x[f"logits_{m}"]), t(x["P_g"])) for m in "xy"},
    **{f"eq4_VE_{m}": lambda x, m=m: enhanced(x, m) for m in "xy"},
    "eq4_round0_zero_memory": lambda x: hash_networks.enhanced(
        t(x["O_x"]), t(x["logits_x"]), torch.zeros_like(t(x["P_g"]))
    ),
    **{f"eq5_LE_{m}": lambda x, m=m: eq5(x, m) for m in "xy"},
    "eq5_grad_x": lambda x: eq5_gradient(x, detached=False),
    "eq5_grad_x_detached": lambda x: eq5_gradient(x, detached=True),
    **{f"eq6_LC_{m}": lambda x, m=m: fedcafe.consistency_loss(enhanced(x, m), references(x)) for m in "xy"},
    **{f"eq7_LD_code_{m}": lambda x, m=m: eq7(x, m, "code") for m in "xy"},
    **{f"eq7_LD_norm_{m}": lambda x, m=m: eq7(x, m, "normalised") for m in "xy"},
    **{f"eq7_LD_printed_{m}": lambda x, m=m: eq7(x, m, "printed") for m in "xy"},
    **{f"dcmh_{m}": lambda x, m=m: dcmh_loss(x, m) for m in "xy"},
    **{f"dcmh_{m}_terms": lambda x, m=m: dcmh_terms(x, m) for m in "xy"},
    **{f"eq8_total_{m}": lambda x, m=m: eq8(x, m) for m in "xy"},
    "eq9_sim_identity": eq9_of_reports,
    "eq9_sim_cluster": lambda x: eq9(x, "cluster"),
    **{f"eq10_softmax_{s}": lambda x, s=s: memory.shares(eq9(x, s), "softmax") for s in ("identity", "cluster")},
    **{f"eq10_linear_{s}": lambda x, s=s: memory.shares(eq9(x, s), "linear") for s in ("identity", "cluster")},
    **{f"eq11_W_{s}": lambda x, s=s: eq11(x, "W", s) for s in ("identity", "cluster")},
    **{f"eq11_b_{s}": lambda x, s=s: eq11(x, "b", s) for s in ("identity", "cluster")},
    "memory_class_mean": lambda x: means(x)[0],
    "memory_has_class": lambda x: means(x)[1] > 0,
    "memory_kmeans_from_class_mean": lambda x: memory.spherical_kmeans(fused(x), means(x)[0])[0],
    "memory_assign": lambda x: memory.spherical_kmeans(fused(x), means(x)[0])[1],
    "memory_global": global_memory,
}

LOOSE = ("eq5_grad_x", "eq5_grad_x_detached")


def test_golden_fedcafe() -> None:
    compare_all("fedcafe", CHECKS, loose=LOOSE)


@pytest.mark.parametrize("base", ["dcmh", "shdch"])
def test_the_image_tower_over_features_has_a_hidden_layer_unless_the_paper_is_followed(base: str) -> None:
    inputs = InputSpec((6,), (5,))
    for options, hidden in (({}, True), ({"image_layers": 0}, False)):
        objective = Objective.model_validate({"base": base, "bits": 4, "hidden": 7, **options})
        shapes = {
            entry.name: entry.shape
            for entry in hash_networks.build(objective, inputs, 3, 0, torch.device("cpu")).layout.entries
        }
        assert shapes.get("visual.hidden.0.weight") == ((7, 6) if hidden else None)
        assert shapes["visual.last.weight"] == (4, 7 if hidden else 6)


def test_by_default_dcmh_weighs_the_balance_of_bits_a_thousandth_of_the_quantisation() -> None:
    sums = torch.tensor([3.0, 5.0, 1e6])
    assert float(dcmh.batch_loss(sums, 2, 10, dcmh.Options())) == pytest.approx((3.0 + 5.0 + 1e3) / 20)
    assert float(dcmh.batch_loss(sums, 2, 10, dcmh.Options(eta=1.0))) == pytest.approx((3.0 + 5.0 + 1e6) / 20)
