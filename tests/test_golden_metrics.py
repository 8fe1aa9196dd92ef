"""Golden values of metrics and partitions. The project's recall is a fraction, the golden one a percentage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedmq.data import partition
from fedmq.evaluation import hamming, label_metrics
from fedmq.evaluation import recall as metrics
from fedmq.evaluation.recall import fairness
from tests import definitions
from tests.golden_checks import Check, Inputs, compare, every


def ranked(**options: Any) -> Callable[[Inputs], label_metrics.RankingMetrics]:
    """Ranking metrics from the evaluator's single pass over packed codes."""
    return lambda x: label_metrics.hamming_metrics(x["qB"], x["rB"], x["qL"], x["rL"], **options)


def curve(which: str, values: str) -> Check:
    return lambda x: getattr(getattr(ranked(curves=True)(x), which), values)


def shared_labels(x: Inputs) -> np.ndarray:
    queries, database = (hamming.words(hamming.pack(x[name] - 0.5)) for name in ("qL", "rL"))
    return np.stack([hamming.shared(query, database) for query in queries.T]).astype(np.float64)


def recall(key: str) -> Check:
    return lambda x: 100 * metrics.recalls(x["zi"], x["zt"], x["cap_img"])[key]


def counts(x: Inputs) -> np.ndarray:
    return partition.split_counts(x["class_sizes"], x["props"])


CHECKS: dict[str, Check] = {
    "hamming": lambda x: hamming.hamming(x["qB"], x["rB"]).astype(np.float64),
    "relevance": shared_labels,
    "map_all": lambda x: ranked()(x).map,
    "map_all_skip_empty": lambda x: ranked(empty="skip")(x).map,
    "map_all_expected": lambda x: ranked()(x).map_expected,
    "i2t_ranks": lambda x: metrics.retrieval_ranks(x["zi"], x["zt"], x["cap_img"])[0],
    "t2i_ranks": lambda x: metrics.retrieval_ranks(torch.from_numpy(x["zi"]), torch.from_numpy(x["zt"]), x["cap_img"])[
        1
    ],
    "pr_rank_p": curve("pr_rank", "precision"),
    "pr_rank_r": curve("pr_rank", "recall"),
    "pr_radius_p": curve("pr_radius", "precision"),
    "pr_radius_r": curve("pr_radius", "recall"),
    "fairness": lambda x: [fairness(x["client_metric"])[name] for name in ("mean", "std", "worst", "gap")],
    "split_counts": counts,
    "split_counts_balanced": lambda x: partition.split_counts_balanced(x["class_sizes"], x["props"]),
}
for cutoff in (5, 10, 20):
    CHECKS[f"map_{cutoff}"] = lambda x, n=cutoff: ranked(at=(n,))(x).map_at[n]  # type: ignore[misc]
    for below in ("total", "min"):
        CHECKS[f"map_{cutoff}_denom_{below}"] = lambda x, n=cutoff, below=below: (  # type: ignore[misc]
            ranked(at=(n,), denominator=below)(x).map_at[n]
        )
    CHECKS[f"ndcg_{cutoff}_binary_hamming"] = lambda x, n=cutoff: ranked(ndcg_at=(n,))(x).ndcg[n]  # type: ignore[misc]
    CHECKS[f"precision_{cutoff}"] = lambda x, n=cutoff: ranked(top_n=(n,))(x).top_n[n][0]  # type: ignore[misc]
    CHECKS[f"recall_top_{cutoff}"] = lambda x, n=cutoff: ranked(top_n=(n,))(x).top_n[n][1]  # type: ignore[misc]
for k in metrics.RECALLS:
    for way in ("i2t", "t2i", "mean"):
        CHECKS[f"{way}_r{k}"] = recall(f"{way}_r{k}")


@every(CHECKS)
def test_golden_metrics(key: str) -> None:
    compare("metrics", key, CHECKS[key])


# --- the definitions that other tests compare with ------------------------------------------------------------------


def distance(x: Inputs) -> np.ndarray:
    return definitions.hamming(x["qB"], x["rB"])


def relevance(x: Inputs) -> np.ndarray:
    return definitions.relevance(x["qL"], x["rL"])


def mean_ap(**options: Any) -> Check:
    return lambda x: definitions.mean_ap(distance(x), relevance(x), **options)


def ndcg(n: int, ideal: Any, form: Any) -> Check:
    return lambda x: definitions.ndcg(-x["sim"], x["gains"], n, ideal=ideal, form=form)


def precision_recall(n: int, which: int) -> Check:
    return lambda x: definitions.precision_recall_at(distance(x), relevance(x), n)[which]


DEFINED: dict[str, Check] = {
    "hamming": distance,
    "relevance": relevance,
    "map_all": mean_ap(),
    "map_all_skip_empty": mean_ap(empty="skip"),
    "map_all_best": mean_ap(ties="best"),
    "map_all_worst": mean_ap(ties="worst"),
    "map_all_expected": lambda x: definitions.mean_expected_ap(distance(x), relevance(x)),
    "pr_rank_p": lambda x: definitions.pr_by_rank(distance(x), relevance(x))[0],
    "pr_rank_r": lambda x: definitions.pr_by_rank(distance(x), relevance(x))[1],
    "pr_radius_p": lambda x: definitions.pr_by_radius(distance(x), relevance(x), x["qB"].shape[1])[0],
    "pr_radius_r": lambda x: definitions.pr_by_radius(distance(x), relevance(x), x["qB"].shape[1])[1],
    "dirichlet_moments_a0.1_n30": lambda x: definitions.dirichlet_moments(0.1, 30),
    "dirichlet_moments_a0.5_n10": lambda x: definitions.dirichlet_moments(0.5, 10),
}
for cutoff in (5, 10, 20):
    DEFINED[f"map_{cutoff}"] = mean_ap(cutoff=cutoff)
    DEFINED[f"map_{cutoff}_denom_total"] = mean_ap(cutoff=cutoff, denominator="total")
    DEFINED[f"map_{cutoff}_denom_min"] = mean_ap(cutoff=cutoff, denominator="min")
    for ideal in ("full", "retrieved"):
        for form in ("exp", "linear"):
            DEFINED[f"ndcg_{cutoff}_{ideal}_{form}"] = ndcg(cutoff, ideal, form)
    DEFINED[f"ndcg_{cutoff}_binary_hamming"] = lambda x, n=cutoff: definitions.ndcg(distance(x), relevance(x), n)  # type: ignore[misc]
    DEFINED[f"precision_{cutoff}"] = precision_recall(cutoff, 0)
    DEFINED[f"recall_top_{cutoff}"] = precision_recall(cutoff, 1)
for name in ("size", "size_std", "js_mean", "js_std", "js_mean_bits", "eff_classes", "tv_mean", "held"):
    DEFINED[f"part_{name}"] = lambda x, name=name: definitions.partition_statistics(counts(x))[name]  # type: ignore[misc]


@every(DEFINED)
def test_the_definitions_of_other_tests_give_the_golden_values(key: str) -> None:
    compare("metrics", key, DEFINED[key])
