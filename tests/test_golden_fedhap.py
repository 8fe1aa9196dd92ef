"""Golden values of FedHAP and its hashing bases, each computed by the project's own functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from fedmq.models.hash_networks import signs
from fedmq.wire.layout import Layout
from protocols import fedhap
from protocols.objectives import csq, dch, dpsh, greedyhash, triplet
from protocols.parts import aggregation, class_prototypes
from protocols.parts.labelled import Samples
from tests.golden_checks import Check, Inputs, compare_all, t

#: The functions need a generator, but nothing that is checked here draws from it.
GENERATOR = np.random.default_rng(0)


def votes(x: Inputs, silos: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    found = [class_prototypes.class_means(t(x["b"])[silo], t(x["y"])[silo]) for silo in silos]
    return torch.stack([means for means, _ in found]), torch.stack([counts for _, counts in found])


def means_and_valid(x: Inputs, silos: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return class_prototypes.global_means(*votes(x, silos), weighted=False)


def prototypes(x: Inputs, silos: list[int]) -> torch.Tensor:
    return fedhap.binary_prototypes(*means_and_valid(x, silos), t(x["prev_H"]))


def silo(x: Inputs, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    labels = t(x["y"])[i]
    return t(x["b"])[i], labels, labels.argmax(1)


def eq2(x: Inputs, i: int, kind: triplet.Distance) -> torch.Tensor:
    codes, _, _ = silo(x, i)
    found, rows = triplet.distances(codes, codes, kind), torch.arange(len(codes))
    return triplet.triplet_loss(found[rows, x["pos"][i]], found[rows, x["neg"][i]], float(x["margin"]), "sum")


def eq3(x: Inputs, i: int, kind: triplet.Distance) -> torch.Tensor:
    codes, _, classes = silo(x, i)
    found, rows = triplet.distances(codes, prototypes(x, [0, 1, 2]), kind), torch.arange(len(codes))
    return triplet.triplet_loss(found[rows, classes], found[rows, x["gneg"][i]], float(x["margin"]), "sum")


def eq4(x: Inputs, i: int, kind: triplet.Distance) -> torch.Tensor:
    return eq2(x, i, kind) + eq3(x, i, kind)


def eq2_all(x: Inputs, i: int) -> torch.Tensor:
    codes, labels, _ = silo(x, i)
    everything = triplet.Options(margin=float(x["margin"]), mining="all", reduce="mean", mu=0.0)
    return triplet.loss(Samples(codes, labels, None), everything, GENERATOR)


def eq3_all(x: Inputs, i: int) -> torch.Tensor:
    codes, labels, _ = silo(x, i)
    _, valid = means_and_valid(x, [0, 1, 2])
    everything = triplet.Options(margin=float(x["margin"]), mining="all", reduce="mean")
    return fedhap.prototype_triplets(
        Samples(codes, labels, None), prototypes(x, [0, 1, 2]), valid, everything, GENERATOR
    )


def eq7(x: Inputs, i: int) -> torch.Tensor:
    return triplet.quantisation(silo(x, i)[0], "sum")


def log_odds(x: Inputs, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Discriminator logits of a silo's binary codes and of the valid global prototypes."""
    codes, labels, _ = silo(x, i)
    _, valid = means_and_valid(x, [0, 1, 2])
    parts = ("w1", "b1", "w2", "b2")
    theta = torch.cat([t(x[name]).ravel() for name in parts])
    layout = Layout.of((name, x[name].shape, "float32") for name in parts)
    one_hot = torch.eye(labels.shape[1], dtype=torch.float64)
    local = fedhap.discriminator_logits(theta, layout, signs(codes), fedhap.label_vectors(labels))
    return local, fedhap.discriminator_logits(theta, layout, prototypes(x, [0, 1, 2])[valid], one_hot[valid])


def eq8(x: Inputs, i: int, form: fedhap.Eq8 = "corrected") -> torch.Tensor:
    return fedhap.discriminator_loss(*log_odds(x, i), form)


def adversarial(x: Inputs, i: int, kind: fedhap.Adversarial = "nonsat") -> torch.Tensor:
    return fedhap.generator_loss(*log_odds(x, i), kind)


def local_loss(
    x: Inputs, i: int, *, global_triplets: bool = True, kind: fedhap.Adversarial | None = "nonsat"
) -> torch.Tensor:
    total = eq4(x, i, "cosine") if global_triplets else eq2(x, i, "cosine")
    total = total + float(x["mu"]) * eq7(x, i)
    return total if kind is None else total + float(x["lam"]) * adversarial(x, i, kind)


def greedy(x: Inputs) -> torch.Tensor:
    codes, labels, _ = silo(x, 0)
    return greedyhash.loss(codes, signs(codes) @ t(x["greedy_W"]).T, labels, greedyhash.Options())


def csq_loss(x: Inputs, labels: torch.Tensor) -> torch.Tensor:
    centres = csq.hash_centres(labels.shape[1], x["b"].shape[-1], GENERATOR).double()
    return csq.loss(t(x["b"])[0], labels, centres, t(x["csq_tiebreak"]), csq.Options())


def of_each_silo(check: Callable[[Inputs, int], torch.Tensor], name: str) -> dict[str, Check]:
    return {f"{name}_{i}": partial(check, i=i) for i in range(3)}


CHECKS: dict[str, Check] = {
    "eq5_class_means": lambda x: votes(x, [0, 1, 2])[0],
    "class_counts": lambda x: votes(x, [0, 1, 2])[1],
    "eq6_real": lambda x: means_and_valid(x, [0, 1, 2])[0],
    "eq6_valid": lambda x: means_and_valid(x, [0, 1, 2])[1],
    "eq6_H": lambda x: prototypes(x, [0, 1, 2]),
    "eq6_H_only_silos_0_2": lambda x: prototypes(x, [0, 2]),
    **of_each_silo(partial(eq2, kind="cosine"), "eq2_cosine"),
    **of_each_silo(partial(eq2, kind="euclidean"), "eq2_euclidean"),
    **of_each_silo(partial(eq3, kind="cosine"), "eq3_cosine"),
    **of_each_silo(partial(eq3, kind="euclidean"), "eq3_euclidean"),
    **of_each_silo(partial(eq4, kind="cosine"), "eq4_cosine"),
    **of_each_silo(partial(eq4, kind="euclidean"), "eq4_euclidean"),
    **of_each_silo(eq2_all, "eq2_all"),
    **of_each_silo(eq3_all, "eq3_all"),
    **of_each_silo(eq7, "eq7"),
    **of_each_silo(lambda x, i: log_odds(x, i)[0].sigmoid(), "D_local"),
    **of_each_silo(lambda x, i: log_odds(x, i)[1].sigmoid(), "D_global"),
    **of_each_silo(eq8, "eq8"),
    **of_each_silo(partial(eq8, form="printed"), "eq8_printed"),
    **of_each_silo(adversarial, "adv_G"),
    **of_each_silo(local_loss, "eq9"),
    **of_each_silo(partial(local_loss, kind="literal"), "eq9_sum_LD"),
    **of_each_silo(partial(local_loss, global_triplets=False, kind=None), "hap1"),
    **of_each_silo(partial(local_loss, global_triplets=False), "hap2"),
    **of_each_silo(partial(local_loss, kind=None), "hap3"),
    "agg_theta": lambda x: aggregation.weighted_sum(list(t(x["theta"])), aggregation.sample_weights([1, 1, 1])),
    "dpsh": lambda x: dpsh.loss(t(x["b"])[0], t(x["y_multi"]), t(x["bank_u"]), t(x["bank_y"]), dpsh.Options().alpha),
    "dch": lambda x: dch.loss(t(x["b"])[0], t(x["y_multi"]), dch.Options()),
    "greedy": greedy,
    "csq_centers": lambda x: csq.hash_centres(x["y"].shape[-1], x["b"].shape[-1], GENERATOR).double(),
    "csq_single": lambda x: csq_loss(x, t(x["y"])[0]),
    "csq_multi": lambda x: csq_loss(x, t(x["y_multi"])),
}


def test_golden_fedhap() -> None:
    compare_all("fedhap", CHECKS)


def test_by_default_eqs_2_3_and_7_are_the_printed_sums() -> None:
    """Independent loops over every triplet; all options but the mining, which the paper leaves open, are defaults."""
    random = np.random.default_rng(3)
    codes, prototypes, classes = random.normal(size=(7, 5)), random.normal(size=(3, 5)), np.array([0, 1, 2, 0, 1, 2, 0])

    def apart(a: np.ndarray, b: np.ndarray) -> float:
        return 1 - float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    quantisation = ((codes - np.where(codes >= 0, 1, -1)) ** 2).sum()
    among_codes = sum(
        max(apart(codes[j], codes[p]) - apart(codes[j], codes[n]) + 0.5, 0)
        for j, p, n in np.ndindex(7, 7, 7)
        if j != p and classes[j] == classes[p] != classes[n]
    )
    with_prototypes = sum(
        max(apart(codes[j], prototypes[classes[j]]) - apart(codes[j], prototypes[n]) + 0.5, 0)
        for j, n in np.ndindex(7, 3)
        if n != classes[j]
    )
    samples, options = Samples(t(codes), t(np.eye(3)[classes]), None), triplet.Options(mining="all")
    assert float(triplet.loss(samples, options, GENERATOR)) == pytest.approx(among_codes + 0.05 * quantisation)
    valid = torch.ones(3, dtype=torch.bool)
    found = fedhap.prototype_triplets(samples, t(prototypes), valid, options, GENERATOR)
    assert float(found) == pytest.approx(with_prototypes)
