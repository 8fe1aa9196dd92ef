"""Golden values of metrics and partitions. The project's recall is a fraction, the golden one a percentage."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmq.data import partition
from fedmq.evaluation import hamming, label_metrics
from fedmq.evaluation import recall as metrics
from fedmq.evaluation.recall import fairness
from tests import definitions
from tests.golden_checks import Check, Inputs, compare, compare_all, expected, names


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


#: Values that the project does not compute: order of ties, which it breaks by place or averages over; graded relevance,
#: which no method has; statistics of a partition; moments of NumPy's draws.
PENDING = re.compile(r"map_all_(best|worst)|ndcg_\d+_(full|retrieved)_\w+|part_\w+|dirichlet_[\w.]+")


def test_golden_metrics() -> None:
    compare_all("metrics", CHECKS, pending=[key for key in expected("metrics") if PENDING.fullmatch(key)])


def test_every_golden_file_has_a_test() -> None:
    files = {path.stem.removeprefix("test_golden_") for path in Path(__file__).parent.glob("test_golden_*.py")}
    assert names() and set(names()) <= files


# --- the definitions that other tests compare with ------------------------------------------------------------------


def test_the_definitions_of_other_tests_give_the_golden_values() -> None:
    def ranked_by(definition: Callable[..., Any], *more: Any, **options: Any) -> Check:
        return lambda x: definition(
            definitions.hamming(x["qB"], x["rB"]), definitions.relevance(x["qL"], x["rL"]), *more, **options
        )

    defined = {
        "hamming": lambda x: definitions.hamming(x["qB"], x["rB"]),
        "relevance": lambda x: definitions.relevance(x["qL"], x["rL"]),
        "map_all": ranked_by(definitions.mean_ap),
        "map_all_skip_empty": ranked_by(definitions.mean_ap, empty="skip"),
        "map_all_expected": ranked_by(definitions.mean_expected_ap),
        "pr_rank_p": lambda x: ranked_by(definitions.pr_by_rank)(x)[0],
        "pr_rank_r": lambda x: ranked_by(definitions.pr_by_rank)(x)[1],
        "pr_radius_p": lambda x: ranked_by(definitions.pr_by_radius, x["qB"].shape[1])(x)[0],
        "pr_radius_r": lambda x: ranked_by(definitions.pr_by_radius, x["qB"].shape[1])(x)[1],
        "map_10": ranked_by(definitions.mean_ap, 10),
        "map_10_denom_total": ranked_by(definitions.mean_ap, 10, denominator="total"),
        "map_10_denom_min": ranked_by(definitions.mean_ap, 10, denominator="min"),
        "ndcg_10_binary_hamming": ranked_by(definitions.ndcg, 10),
        "precision_10": lambda x: ranked_by(definitions.precision_recall_at, 10)(x)[0],
        "recall_top_10": lambda x: ranked_by(definitions.precision_recall_at, 10)(x)[1],
        "part_js_mean": lambda x: definitions.mean_js_divergence(counts(x)),
    }
    for key, check in defined.items():
        compare("metrics", key, check)
