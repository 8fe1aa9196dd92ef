"""Comparisons: the page of result plots."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fedmq.experiments import grid as planning
from fedmq.experiments import plots, tables
from fedmq.experiments import summary as made_rows
from fedmq.experiments.grid import ComparisonPlan
from fedmq.runs import results
from fedmq.storage.run_folder import RunFolder
from tests.comparisons import entries, finish, resolve, studied
from tests.test_runs_html_page import drawn


def test_the_page_plots_every_column_against_the_varied_key_over_merges_and_over_time(
    tiny: Path, tmp_path: Path
) -> None:
    plan, rows = studied(tiny, tmp_path)
    table = tables.grid(rows, plan)
    page = plots.page(rows, "title & more", "fedmq compare a&b.yaml", table)
    assert "title &amp; more" in page and "fedmq compare a&amp;b.yaml" in page
    best = {cell.text for row in table.body for cell in row if cell.best}
    assert best and best == set(re.findall("<b>(.*?)</b></td>", page)), "the table, and bold what its intervals prove"
    assert "virtual time [s]" in page
    for column in ("mean_r1", "fairness.worst_r1"):
        for title in (f"{column} against silos.count", f"{column} over merges", f"{column} over virtual time"):
            assert title in page
    figures = drawn(page)
    assert (
        len(figures) == 2 + 2 + 2 + 4
    )  # three columns as differences and against the key, two columns as two curves each
    bands = [trace for figure in figures for trace in figure.data if trace.type == "scatter" and trace.fill == "toself"]
    assert bands
    zero = [figure for figure in figures if figure.layout.shapes]
    assert [shape.x0 for figure in zero for shape in figure.layout.shapes] == [0] * len(zero)
    assert not any(trace.type == "bar" for figure in figures for trace in figure.data)
    assert {trace.mode for trace in bands} == {"lines"}, "a band has no points of its own"


def test_the_spread_over_silos_has_a_curve_and_a_value_measured_once_has_none(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [])
    finish(RunFolder(tmp_path), 0.5)
    with RunFolder(tmp_path).metrics.open("a") as file:
        own = {"silo-00": {"mean_r1": 0.7}}
        line = {"kind": "personal", "version": 2, "personal": {"mean_r1": 0.7}, "personal_whole_split": own}
        spread = {"std_r1": 0.0, "worst_r1": 0.7, "gap_r1": 0.0}
        more = {"personal_per_silo": own, "personal_per_silo_mean": {"mean_r1": 0.7}, "personal_fairness": spread}
        file.write(json.dumps({**line, **more}) + "\n")
    outcome = results.read(RunFolder(tmp_path))
    assert outcome.course("fairness.std_r1") == ((0, 0.0, pytest.approx(0.125)), (2, 3.0, pytest.approx(0.125)))
    assert outcome.course("personal.mean_r1") == ((2, 3.0, 0.7),)
    assert outcome.course("per_silo_mean.mean_r1") == ((0, 0.0, 0.375), (2, 3.0, 0.375))
    assert outcome.untrained().value("per_silo_mean.mean_r1") == 0.375
    assert outcome.course("fairness.none") == outcome.course("seconds to mean_r1 0.5") == ()
    plan = ComparisonPlan((entry,), (0,), ("fairness.std_r1", "personal.mean_r1", "bytes.up"))
    rows = made_rows.rows(plan, {entry.name: ()}, {entry.name: {0: outcome}})
    page = plots.page(rows, "title", "", tables.grid(rows, plan))
    assert set(re.findall(r"([\w.]+) over (?:merges|virtual time)", page)) == {"fairness.std_r1"}


@pytest.mark.parametrize(
    ("vary", "against"),
    [
        (["tiny:rounds=3,4", "other:silos.count=4,5"], None),
        (["rounds=3,4", "other:silos.count=4,5"], "rounds"),
        (["tiny:rounds=3,4"], "rounds"),
    ],
)
def test_plots_are_drawn_against_a_key_that_all_methods_vary(
    tiny: Path, tmp_path: Path, vary: list[str], against: str | None
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(tiny.read_text().replace("name: tiny", "name: other"))
    varied = [planning.parse_variation(text, "--vary") for text in vary]
    plan = ComparisonPlan(planning.entries([tiny, other], [], varied, [], resolve), (0,), ("mean_r1",))
    finished: dict[str, dict[int, results.FinishedRun]] = {}
    for number, row in enumerate(plan.entries):
        finish(RunFolder(tmp_path / str(number)), 0.5)
        finished[row.name] = {0: results.read(RunFolder(tmp_path / str(number)))}
    rows = made_rows.rows(plan, {}, finished)
    page = plots.page(rows, "title", "", tables.grid(rows, plan))
    assert set(re.findall(r"mean_r1 against ([\w.]+)", page)) == ({against} if against else set())
    assert "mean_r1 over merges" in page


def test_the_mean_of_curves_of_different_lengths_ends_at_the_mean_of_their_last_values() -> None:
    x, values = plots.on_common_grid(
        [(np.array([0.0, 2.0, 4.0]), np.array([0.0, 2.0, 4.0])), (np.array([0.0, 3.0]), np.array([1.0, 4.0]))]
    )
    assert x.tolist() == [0.0, 2.0, 3.0, 4.0]
    assert values.tolist() == [[0.0, 2.0, 3.0, 4.0], [1.0, 3.0, 4.0, 4.0]]


def test_no_curve_extends_to_the_left_of_its_first_value() -> None:
    late, early = (np.array([2.0, 3.0]), np.array([5.0, 7.0])), (np.array([1.0, 4.0]), np.array([0.0, 3.0]))
    x, values = plots.on_common_grid([late, early])
    assert x.tolist() == [2.0, 3.0, 4.0]
    assert values.tolist() == [[5.0, 7.0, 7.0], [1.0, 2.0, 3.0]]
