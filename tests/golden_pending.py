"""The list of golden values that nothing in the project computes, with reasons.

When code computes one of them, move its key from here to a test_golden module. test_golden_coverage.py
fails for a key that is in neither place, or in both. Tests' own definitions (tests/definitions.py) are held against
these values in test_golden_metrics.py.
"""

from __future__ import annotations

_TIES = "ties are broken by place in the database, or averaged over; tests bound both by this"
_GRADED = "relevance is 0 or 1 in every method (METHODS 8.3), for which ndcg_N_binary_hamming is checked"
_PARTITION = "a run shows silos' sizes and labels; no method and no report needs this statistic of them"
_MOMENTS = "a fact about the distribution, whose draws are NumPy's; no value that the project computes"

#: file -> reason why none of its keys is checked.
FILES: dict[str, str] = {}

#: file -> key -> reason.
KEYS: dict[str, dict[str, str]] = {
    "metrics": {
        "map_all_best": _TIES,
        "map_all_worst": _TIES,
        **{
            f"ndcg_{n}_{ideal}_{form}": _GRADED
            for n in (5, 10, 20)
            for ideal in ("full", "retrieved")
            for form in ("exp", "linear")
        },
        **{
            f"part_{name}": _PARTITION
            for name in ("size", "size_std", "js_mean", "js_std", "js_mean_bits", "eff_classes", "tv_mean", "held")
        },
        "dirichlet_moments_a0.1_n30": _MOMENTS,
        "dirichlet_moments_a0.5_n10": _MOMENTS,
    }
}
