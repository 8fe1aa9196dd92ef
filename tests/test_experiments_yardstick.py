"""Linear yardsticks: what they compute, and their rows in a comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedmq.cli.scenarios import resolved_file
from fedmq.errors import InputError
from fedmq.experiments import summary, tables, yardstick
from fedmq.experiments.grid import ComparisonPlan
from fedmq.runs import results
from fedmq.storage.run_folder import RunFolder
from tests.comparisons import entries, finish


def test_canonical_variates_are_uncorrelated_across_places_and_ordered_by_correlation() -> None:
    random = np.random.default_rng(0)
    shared = random.normal(size=(400, 2))
    x = np.concatenate([shared, random.normal(size=(400, 3))], 1) @ random.normal(size=(5, 5)) + 3.0
    y = np.concatenate([shared, random.normal(size=(400, 2))], 1) @ random.normal(size=(4, 4)) - 7.0
    of_x, of_y = yardstick.canonical_variates(x, y)
    a, b = of_x(x), of_y(y)
    # Reference: the squared correlations are the eigenvalues of R_x^-1 C_xy R_y^-1 C_yx.
    covariance = np.cov(np.concatenate([x, y], 1).T, bias=True)
    xx, yy, xy = covariance[:5, :5], covariance[5:, 5:], covariance[:5, 5:]
    xx, yy = (c + yardstick.RIDGE * np.trace(c) / len(c) * np.eye(len(c)) for c in (xx, yy))
    squares = np.sort(np.linalg.eigvals(np.linalg.solve(xx, xy) @ np.linalg.solve(yy, xy.T)).real)[::-1][:4]
    cross = a.T @ b / len(a)  # diag(S) U^T A C_xy B V diag(S) = S^3
    np.testing.assert_allclose(cross, np.diag(squares**1.5), atol=1e-12)
    assert a.mean(0) == pytest.approx(0, abs=1e-12)
    assert b.mean(0) == pytest.approx(0, abs=1e-12)


def test_class_probabilities_exclude_each_other_only_with_one_label_per_item() -> None:
    random = np.random.default_rng(0)
    number = random.integers(0, 3, 300)
    x = random.normal(size=(300, 6)) * 100 + 50
    x[np.arange(300), number] += 300
    one = np.eye(3, dtype=bool)[number]
    p = yardstick.class_probabilities(x, one)(x)
    assert p.sum(1) == pytest.approx(1)
    assert (p.argmax(1) == number).mean() > 0.9
    both = one | np.eye(3, dtype=bool)[(number + 1) % 3]
    q = yardstick.class_probabilities(x, np.concatenate([both, np.zeros((300, 1), bool)], 1))(x)
    assert q.shape == (300, 3), "a label that no item has is left out"
    assert q.sum(1).mean() == pytest.approx(2, abs=0.1)
    assert ((q > 0.5) == both).mean() > 0.9


def test_both_yardsticks_find_the_pairs_of_features_that_depend_on_the_class(cache: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    classes = np.arange(120) % 4
    image = random.normal(size=(120, 5)) + 4 * np.eye(5)[classes]
    text = random.normal(size=(120, 1, 7)) + 4 * np.eye(7)[classes + 2][:, None]
    split = np.where(np.arange(120) < 80, "train", "test")
    np.savez(tmp_path / "features.npz", image=image, text=text, labels=np.eye(4, dtype=np.uint8)[classes], split=split)
    scenario = {
        "name": "linear", "seed": 0, "rounds": 1, "silos": {"count": 2}, "partition": {"kind": "iid"},
        "data": {"name": "features", "path": str(tmp_path / "features.npz")}, "backbone": {"name": "features"},
        "protocol": "fedavg", "evaluation": {"gallery": "database"},
    }  # fmt: skip
    (tmp_path / "linear.yaml").write_text(json.dumps(scenario))
    run = resolved_file(tmp_path / "linear.yaml")
    for kind in summary.YARDSTICKS:
        found = yardstick.figures(kind, {0: run, 5: run})
        assert found[0] == found[5]
        measured = found[0]["metrics"]
        assert isinstance(measured, dict) and measured["map"] > 0.9, "chance is 0.25"
        assert found[0]["fairness"]


def test_yardsticks_are_rows_that_are_the_baseline_only_on_request(tiny: Path, tmp_path: Path) -> None:
    rows = entries(tiny, ["protocol=fedavg,rcsr"])
    finished = {}
    for place, row in enumerate(rows):
        finish(RunFolder(tmp_path / row.name), 0.5 + 0.1 * place)
        finished[row.name] = {0: results.read(RunFolder(tmp_path / row.name))}
    plan = ComparisonPlan(rows, (0,), ("mean_r1",), yardstick=("classes",))
    reached = {"classes": {0: {"metrics": {"mean_r1": 0.7}}}}
    made = summary.rows(plan, {}, finished, reached)
    grid = tables.grid(made, plan)
    assert [line[0].text for line in grid.body] == ["yardstick (classes)", "fedavg", "rcsr"]
    assert [line[1].text for line in grid.body] == ["0.7000", "0.5000", "0.6000"]
    assert [row.against for row in made] == ["fedavg", None, "fedavg"]
    assert any(note.startswith("yardstick (classes): a logistic regression") for note in grid.notes)
    against = summary.baselines(replace(plan, baseline="yardstick (classes)"))
    assert against["rcsr"] == "yardstick (classes)"


def test_an_unknown_yardstick_is_refused_with_what_is_allowed() -> None:
    assert summary.parse_yardsticks(["pairs", "classes", "pairs"]) == ("pairs", "classes")
    with pytest.raises(InputError, match="--yardstick: found 'labels', allowed: classes or pairs"):
        summary.parse_yardsticks(["labels"])
