"""t-SNE plots of released models: which points are drawn, and that similar ones are close."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from fedmq.errors import InputError
from fedmq.retrieval import plots
from fedmq.retrieval.released_model import Release, open_release
from tests import threaded_run
from tests.command_line import fedmq
from tests.test_retrieval_pr_curves import HASHING
from tests.test_runs_html_page import titles


@pytest.fixture
def release(tiny: Path, tmp_path: Path) -> Release:
    """A finished run of a hash network."""
    threaded_run.run(threaded_run.resolved(tiny, *HASHING), tmp_path / "run")
    return open_release(tmp_path / "run")


def test_points_are_the_evaluated_items_of_the_commonest_classes(release: Release) -> None:
    found = plots.placed("it", release, items=1000, classes=2, sides=("image", "text"))
    half = len(found.items) // 2
    assert found.places.shape == (2 * half, 2) and np.isfinite(found.places).all()
    assert found.sides == ("image",) * half + ("text",) * half
    assert found.items[:half] == found.items[half:] and len(set(found.items)) == half
    population = plots.labelled_population(release)
    prepared, rows = population.prepared, population.evaluated.tolist()
    labels = np.asarray(prepared.labels)[rows]
    counts = labels.sum(0, dtype=np.int64)
    common = sorted(np.argsort(-counts, kind="stable")[:2])
    expected = {
        prepared.keys[row]: prepared.label_names[next(column for column in common if own[column])]
        for row, own in zip(rows, labels.tolist(), strict=True)
        if any(own[column] for column in common)
    }
    assert dict(zip(found.items, found.classes, strict=True)) == expected
    assert 0 < len(expected) < len(rows)


def test_a_random_subset_of_items_is_reproducible(release: Release) -> None:
    first, second = (plots.placed("it", release, items=6, classes=10, sides=("text",)) for _ in range(2))
    assert len(first.items) == 6
    assert first.items == second.items
    np.testing.assert_array_equal(first.places, second.places)
    with pytest.raises(InputError, match="at least 4"):
        plots.placed("it", release, items=1, classes=10, sides=("image", "text"))


def test_two_clusters_of_codes_are_separated() -> None:
    generator = np.random.default_rng(0)
    centres = np.where(generator.random((2, 32)) < 0.5, -1, 1)
    points = np.repeat(centres, 40, axis=0) * np.where(generator.random((80, 32)) < 0.05, -1, 1)
    plane = plots._plane(points.astype(np.float32), binary=True, seed=0)
    middles = plane.reshape(2, 40, 2).mean(1)
    inside = np.linalg.norm(plane.reshape(2, 40, 2) - middles[:, None], axis=-1).mean()
    assert np.linalg.norm(middles[0] - middles[1]) > 2 * inside


def test_embeddings_are_distinguished_only_by_angle() -> None:
    points = np.random.default_rng(0).normal(size=(30, 8)).astype(np.float32)
    scale = np.float32(2) ** np.arange(30, dtype=np.float32)[:, None]  # exact in floating point
    plain, scaled = (plots._plane(each, binary=False, seed=0) for each in (points, points * scale))
    np.testing.assert_array_equal(plain, scaled)


@pytest.mark.slow
def test_the_command_writes_a_table_and_a_page(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = release.run.root
    other = shutil.copytree(root, tmp_path / "another")
    assert fedmq(monkeypatch, "tsne", str(root), str(other), "--side", "image", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    rows = list(csv.DictReader((root / "tsne" / "tsne.csv").open()))
    assert said["points"] == {name: sum(row["run"] == name for row in rows) for name in ("run", "another")}
    assert {row["side"] for row in rows} == {"image"}
    page = (root / "tsne" / "tsne.html").read_text()
    assert len(titles(page)) == 2
    assert "<script src" not in page  # the page loads nothing from the network
