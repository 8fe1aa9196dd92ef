"""Comparisons: values of a row, tables and plots."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from fedmq.config.sections import Evaluation
from fedmq.errors import InputError
from fedmq.evaluation.gallery_ranking import Embedded, fold_recalls
from fedmq.evaluation.metrics import Measured, known_names, measure
from fedmq.experiments import grid as planning
from fedmq.experiments import plots, summary, tables
from fedmq.experiments import summary as made_rows
from fedmq.experiments.grid import ComparisonPlan
from fedmq.runs import results
from fedmq.runs.results import Gallery, Target
from fedmq.runs.run_records import BelowStart
from fedmq.storage.run_folder import RunFolder
from fedmq.text import as_csv
from tests.comparisons import Study, digest_of, entries, finish, resolve, studied
from tests.test_runs_html_page import drawn


@pytest.fixture
def study(tiny: Path, tmp_path: Path) -> Study:
    return studied(tiny, tmp_path)


def test_methods_are_compared_at_the_same_values_of_varied_keys(study: Study) -> None:
    _, rows = study
    assert {row.entry.name: row.against for row in rows} == {
        "zero-shot": "fedavg, silos.count=4",
        "fedavg, silos.count=4": None,
        "rcsr, silos.count=4": "fedavg, silos.count=4",
        "fedavg, silos.count=50": None,
        "rcsr, silos.count=50": "fedavg, silos.count=50",
    }
    best = {row.entry.name for row in rows if "mean_r1" in row.best}
    assert best == {"rcsr, silos.count=4"}, "the other point has but one complete row"
    assert rows[2].columns["mean_r1"].difference == pytest.approx(0.1)


def test_the_baseline_is_a_method_or_a_named_row(tiny: Path) -> None:
    rows = entries(tiny, ["silos.count=4,5", "protocol=fedavg,rcsr"])
    by_method = made_rows.baselines(ComparisonPlan(rows, (0,), baseline="rcsr"))
    assert by_method["fedavg, silos.count=5"] == "rcsr, silos.count=5"
    by_row = made_rows.baselines(ComparisonPlan(rows, (0,), baseline="rcsr, silos.count=4"))
    assert by_row["fedavg, silos.count=5"] == "rcsr, silos.count=4"
    with pytest.raises(InputError, match=r"--baseline.*'moon'.*fedavg, silos\.count=4.*none"):
        made_rows.baselines(ComparisonPlan(rows, (0,), baseline="moon"))


def test_without_a_matching_baseline_no_differences_are_shown(study: Study) -> None:
    plan, rows = study
    finished = {row.entry.name: row.outcomes for row in rows[1:]}
    plan = replace(plan, baseline="none")
    grid = tables.grid(made_rows.rows(plan, {}, finished), plan)
    assert grid.head == ("", "mean_r1", "fairness.worst_r1", "seconds to mean_r1 0.55")
    assert not any(cell.best for line in grid.body for cell in line)
    assert not any("difference" in note or "bold" in note for note in grid.notes)


def test_values_of_a_varied_key_are_shown_side_by_side_on_request(study: Study) -> None:
    plan, rows = study
    long = {line[0].text: line for line in tables.grid(rows, plan).body}
    grid = tables.grid(rows, replace(plan, across="silos.count"))
    columns = ("mean_r1", "fairness.worst_r1", "seconds to mean_r1 0.55")
    titles = [title for column in columns for value in (4, 50) for title in (f"{column}, {value}", "difference")]
    assert grid.head == ("", *titles)
    assert [line[0].text for line in grid.body] == ["zero-shot", "fedavg", "rcsr"]
    nothing = (tables.Cell("-"), tables.Cell("-"))
    for name, line in zip(("fedavg", "rcsr"), grid.body[1:], strict=True):
        four, fifty = (long[f"{name}, silos.count={value}"] for value in (4, 50))
        assert line[1:] == tuple(cell for at in (1, 3, 5) for own in (four, fifty) for cell in own[at : at + 2])
    assert grid.body[0][1:] == tuple(cell for at in (1, 3, 5) for cell in (*long["zero-shot"][at : at + 2], *nothing))
    assert grid.notes[0] == "side by side: the values of silos.count"
    assert grid.notes[1:] == tables.grid(rows, plan).notes
    assert tables.markdown(grid, "fedmq").splitlines()[2].startswith("|  | mean_r1, 4 | difference | mean_r1, 50 |")


def test_choices_are_shown_side_by_side_and_the_lines_of_a_sweep_are_its_other_keys(tiny: Path) -> None:
    made = entries(tiny, ["silos.count=4,5", "rounds=3,4"], ["training.learning_rate=0.1,0.2"])
    plan = ComparisonPlan(made, (0,), ("mean_r1",), across="silos.count")
    chosen = {row.name: ("training.learning_rate=0.2",) for row in made}
    rows = made_rows.rows(plan, chosen, {row.name: {} for row in made})
    grid = tables.grid(rows, plan)
    assert [line[0].text for line in grid.body] == ["tiny, rounds=3", "tiny, rounds=4"]
    assert grid.head[-4:] == ("chosen, 4", "tried, 4", "chosen, 5", "tried, 5")
    assert [cell.text for cell in grid.body[0][-4:]] == ["learning_rate=0.2", "2"] * 2


def test_a_metric_that_no_run_has_is_a_column_of_dashes_and_a_warning(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [])
    finish(RunFolder(tmp_path), 0.5)
    unreached, unknown = Target("fairness.worst_r1", 0.9), Target("fairness.worst", 0.5)
    plan = ComparisonPlan((entry,), (0,), ("mean_r1", "fairness.wurst_r1", "bytes.upp"), (unreached, unknown))
    rows = made_rows.rows(plan, {entry.name: ()}, {entry.name: {0: results.read(RunFolder(tmp_path))}})
    (row,) = tables.grid(rows, plan).body
    assert [cell.text for cell in row[1:]] == ["0.5000", "-", "-", "-", "-"]
    told = made_rows.empty_columns(plan, rows)
    assert list(told) == [
        "column 'fairness.wurst_r1' holds only dashes: no run has fairness.wurst_r1",
        "column 'bytes.upp' holds only dashes: no run has bytes.upp",
        "column 'seconds to fairness.worst 0.5' holds only dashes: no run has fairness.worst",
    ], "a target that is not reached is no wrong name"


def test_recalls_that_every_model_reaches_are_dashes_in_each_table_and_named(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [])
    finish(RunFolder(tmp_path), 0.5)
    read = results.read(RunFolder(tmp_path))
    assert read.summary is not None
    perfect = read.summary.model_copy(update={"metrics": {"mean_r1": 0.5, "mean_r10": 1.0}})
    run = replace(read, summary=perfect, gallery=Gallery("8 test images", 8, 40))
    assert run.shows("mean_r1") and run.shows("i2t_r10") and not run.shows("personal.mean_r10")
    plan = ComparisonPlan((entry,), (0,), ("mean_r1", "mean_r10"), (Target("t2i_r10", 1.0),), zero_shot=True)
    rows = made_rows.rows(plan, {entry.name: ()}, {entry.name: {0: run}})
    for line in tables.grid(rows, plan).body:
        assert [cell.text == "-" for cell in line[1:]] == [False, line[0].text != "zero-shot", True, True, True, True]
    assert [row["mean_r10"] for row in tables.runs(rows, plan)] == [None, None]
    small = "holds only dashes: in a gallery of 8 items every model reaches 1"
    assert made_rows.empty_columns(plan, rows) == (
        f"column 'mean_r10' {small}", f"column 'seconds to t2i_r10 1' {small}"
    )  # fmt: skip


def test_metrics_that_no_run_can_have_are_refused_and_cut_offs_come_from_the_rows(tiny: Path) -> None:
    rows = entries(tiny, ["evaluation.map_at=[50],[100]"])
    named = ("mean_r1", "t2i_r10", "spread_text", "map", "map_expected", "map_at50", "map_at100_i2t", "personal.map")
    made_rows.check_metrics(ComparisonPlan(rows, (0,), named, (Target("map_at100", 0.5),)), resolve)
    for name in ("map_at5", "map_i2i", "ndcg_at50", "mean_r2", "foo", "personal.any", "seconds_.total"):
        with pytest.raises(InputError, match=f"--metric: found '{name}'"):
            made_rows.check_metrics(ComparisonPlan(rows, (0,), ("mean_r1", name)), resolve)
    with pytest.raises(InputError, match=r"--target: found 'mean_r2', allowed: a metric, e\.g\. mean_r"):
        made_rows.check_metrics(ComparisonPlan(rows, (0,), targets=(Target("mean_r2", 0.5),)), resolve)


def test_the_metrics_of_an_evaluation_are_known_beforehand(tmp_path: Path) -> None:
    asked = Evaluation(map_at=(2,), ndcg_at=(3,), gallery="database", within=True)
    generator = np.random.default_rng(0)
    image, text = generator.normal(size=(2, 6, 4)).astype(np.float32)
    items = Embedded(image, text, np.arange(6), np.eye(2, dtype=np.uint8)[np.arange(6) % 2], binary=True)
    assert set(measure(Measured(items, asked, items))) == set(known_names(asked))
    with_folds = set(known_names(asked.model_copy(update={"fold_size": 2})))
    assert with_folds == set(known_names(asked)) | set(fold_recalls(items, 2))


def test_runs_of_differing_software_or_hardware_are_noted_under_the_table(study: Study) -> None:
    plan, rows = study
    assert not any("alike" in note for note in tables.grid(rows, plan).notes)
    own = rows[1].outcomes[0]
    assert own.summary is not None
    elsewhere = {**own.summary.versions_of, "processor": "x86_64 AVX2"}
    moved = dataclasses.replace(own, summary=own.summary.model_copy(update={"versions_of": elsewhere}))
    rows = (rows[0], dataclasses.replace(rows[1], outcomes={**rows[1].outcomes, 0: moved}), *rows[2:])
    assert tables.grid(rows, plan).notes[-1].endswith("processor not recorded and x86_64 AVX2")


def test_holms_correction_is_that_of_the_paper_and_leaves_out_what_is_not_compared() -> None:
    assert made_rows.holm([0.01, 0.04, math.nan, 0.03]) == [
        0.03, 0.06, pytest.approx(math.nan, nan_ok=True), 0.06
    ]  # fmt: skip
    assert made_rows.holm([0.6, 0.7]) == [1.0, 1.0]
    assert made_rows.holm([]) == []


def against(seeds: int, *means: float) -> tuple[ComparisonPlan, list[made_rows.Row]]:
    """Rows whose differences to the first have these means and a spread of 1."""
    spread = np.linspace(-1, 1, seeds)
    values = [{seed: mean + float(spread[seed] * (mean > 0)) for seed in range(seeds)} for mean in (0.0, *means)]
    by_row = {
        str(place): {"mean_r1": made_rows.statistic(each, values[0] if place else None)}
        for place, each in enumerate(values)
    }
    made_rows.correct(by_row)
    names = list(by_row)
    plan = ComparisonPlan(
        tuple(planning.Entry(name, name, (), Path("x"), ()) for name in names), tuple(range(seeds)), ("mean_r1",)
    )
    rows = [
        made_rows.Row(entry, (), {}, by_row[entry.name], frozenset(), None if entry.name == "0" else "0")
        for entry in plan.entries
    ]
    return plan, rows


def test_a_difference_has_a_star_only_if_it_holds_with_the_correction() -> None:
    plan, rows = against(6, 1.0, 8.0)
    one, many = rows[1].columns["mean_r1"], against(6, 1.0, 1.0, 1.0, 1.0)[1][1].columns["mean_r1"]
    assert one.p == pytest.approx(stats.ttest_1samp(1 + np.linspace(-1, 1, 6), 0).pvalue)
    assert one.holm == one.p < 0.05 < many.holm == pytest.approx(4 * many.p)
    assert tables.difference_text(one).endswith("]*") and tables.difference_text(many).endswith("]")
    for some, words in ((rows, "2 rows"), (rows[:2], "1 row")):
        notes = tables.grid(some, plan).notes
        assert any(note.startswith("*: significant") and note.endswith(f"correction for {words}") for note in notes)


def test_silos_that_lack_a_modality_with_every_seed_are_noted() -> None:
    plan, rows = against(5, 1.0)
    for same in (True, False):
        notes = tables.grid(rows, replace(plan, same_mask=same)).notes
        assert any("the same silos lack a modality with every seed" in note for note in notes) is same


def test_a_difference_that_is_claimed_from_few_seeds_is_noted() -> None:
    def noted(seeds: int, mean: float) -> list[str]:
        plan, rows = against(seeds, mean)
        return [note for note in tables.grid(rows, plan).notes if "are claimed" in note]

    assert noted(4, 20.0) == ["differences are claimed from 4 seeds: at least 5 are needed"]
    assert noted(4, 0.1) == [] and noted(5, 20.0) == []


def changed(row: made_rows.Row, **changes: object) -> made_rows.Row:
    """A row whose runs have other summaries."""
    outcomes = {
        seed: dataclasses.replace(own, summary=own.summary.model_copy(update=changes))
        for seed, own in row.outcomes.items()
        if own.summary is not None
    }
    return dataclasses.replace(row, outcomes=outcomes)


def test_a_table_states_sizes_steps_and_divergence_of_its_silos(study: Study) -> None:
    plan, (zero_shot, first, *others) = study
    assert "training items of a silo: 9" in tables.grid((zero_shot, first, *others), plan).notes
    silo = next(iter(first.outcomes.values())).summary.per_silo["silo-00"]
    facts = ({"steps": 1, "samples": 7, "label_divergence": 0.2}, {"steps": 1, "samples": 10, "label_divergence": 0.4})
    silos = {name: silo.model_copy(update=own) for name, own in zip(("a", "b"), facts, strict=True)}
    notes = tables.grid((zero_shot, changed(first, per_silo=silos), *others), plan).notes
    (note,) = (note for note in notes if "steps of a task: 1" in note)
    assert note.startswith("fedavg, silos.count=4: training items of a silo: 7 to 10, median 8.5")
    assert note.endswith("divergence of labels: 0.200 to 0.400, median 0.300")
    assert "every task is one optimiser step: fedavg, silos.count=4" in notes
    several = {name: own.model_copy(update={"steps": 2}) for name, own in silos.items()}
    notes = tables.grid((zero_shot, changed(first, per_silo=several), *others), plan).notes
    assert not any(note.startswith("every task") for note in notes)


def test_rows_of_one_model_and_rows_that_end_below_their_start_are_named(study: Study) -> None:
    plan, (zero_shot, first, second, *_) = study

    def notes(*rows: made_rows.Row) -> list[str]:
        found = tables.grid((zero_shot, *rows), plan).notes
        return [note for note in found if "bit-identical" in note or "below the untrained" in note]

    assert notes(first, second) == []
    same = (changed(first, model_digest="0" * 64), changed(second, model_digest="0" * 64))
    assert notes(*same) == [f"bit-identical models: {first.entry.name} and {second.entry.name}"]
    personal = [changed(row, personal_only=True) for row in same]
    assert notes(*personal) == []
    below = changed(second, below_start=BelowStart(metric="mean_r1", before=0.7, after=0.6))
    assert notes(first, below) == [f"ended below the untrained model: {second.entry.name} (3 seeds)"]


def test_tables_have_the_same_content_in_every_format(study: Study) -> None:
    plan, rows = study
    grid = tables.grid(rows, plan)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(*tables.terminal(grid, "title", 160))
    text, latex, markdown = console.export_text(), tables.latex(grid, "fedmq x_y"), tables.markdown(grid, "fedmq x_y")
    for form in (text, markdown):
        assert "0.6100 ± 0.0100" in form
        assert "0.6050 ± 0.0071 (2 of 3 seeds)" in form
        assert "+0.1000 [+0.1000, +0.1000]" in form
        assert "to fedavg at the same point" in re.sub(r"\s+", " ", form)
    assert "**0.6100 ± 0.0100**" in markdown
    assert "\\textbf{0.6100 $\\pm$ 0.0100}" in latex
    assert "rcsr, silos.count=4 & " in latex
    assert "mean\\_r1 & difference & fairness.worst\\_r1" in latex
    assert latex.splitlines()[0] == "% fedmq x_y"
    broken = "fedmq compare --vary 'protocol=a,\n  b'"
    assert tables.latex(grid, broken).splitlines()[:2] == ["% fedmq compare --vary 'protocol=a,", "%   b'"]
    assert tables.markdown(grid, broken).startswith("    fedmq compare --vary 'protocol=a,\n      b'\n\n")
    assert tables.markdown_cell("a | b\nc") == "a \\| b c"
    hostile = "\x1b[2J<b>\n\\input{secret}\u202e"
    odd = replace(grid, notes=(hostile,), body=[[replace(cell, text=hostile) for cell in grid.body[0]]])
    for form in (tables.latex(odd, "fedmq"), tables.markdown(odd, "fedmq")):
        assert all(each.isprintable() or each == "\n" for each in form)
        assert not any(line.startswith("\\input") for line in form.splitlines())
    assert "<b>" not in tables.markdown(odd, "fedmq")
    assert [latex.count(rule) for rule in ("\\toprule", "\\midrule", "\\bottomrule")] == [1, 1, 1]
    assert all(line.count(" & ") == len(grid.head) - 1 for line in latex.splitlines() if line.endswith("\\\\"))
    records = list(csv.DictReader(io.StringIO(as_csv(tables.plain(rows)))))
    assert float(records[2]["mean_r1.mean"]) == pytest.approx(0.61)
    assert records[2]["silos.count"] == "4"
    assert records[1]["mean_r1.low"] == ""
    runs = list(csv.DictReader(io.StringIO(as_csv(tables.runs(rows, plan)))))
    assert len(runs) == 14
    assert runs[3]["model_digest"] == digest_of(0.5)
    assert [run["seconds to mean_r1 0.55"] for run in runs[6:9]] == ["4.0", "5.0", "6.0"]


def test_a_terminal_too_narrow_for_all_columns_splits_them_into_several_tables() -> None:
    names = [f"metric_{number}" for number in range(9)]
    head = ("", *(title for name in names for title in (name, "difference")))
    cells = [tables.Cell(text) for number in range(9) for text in (f"0.{number}446 ± 0.0031", "+0.1 [+0.0, +0.2]")]
    grid = tables.Grid(head, ((tables.Cell("a name of a row that is folded"), *cells),), ("a note",))
    for width, count in ((80, 3), (400, 1)):
        console = Console(width=width, record=True, file=io.StringIO())
        views = tables.terminal(grid, "title", width)
        console.print(*views, sep="\n")
        text = console.export_text()
        assert len(views) == 1 + count + 1
        assert views[0].plain == "title"
        assert all(name in text and f"0.{number}446 ± 0.0031" in text for number, name in enumerate(names))
        assert (text.count("title"), text.count("a note")) == (1, 1)


# ---------------------------------------------------------------------------------------------------- values of a row
def test_values_are_found_by_metric_name_or_by_path_in_the_summary(tmp_path: Path) -> None:
    finish(RunFolder(tmp_path), 0.5)
    outcome = results.read(RunFolder(tmp_path))
    assert outcome.value("mean_r1") == 0.5
    assert outcome.value("fairness.worst_r1") == 0.25
    assert (outcome.value("bytes.up"), outcome.value("bytes.up.delta")) == (108.0, 100.0)
    assert outcome.value("seconds.virtual") == 3.0
    assert [outcome.value(name) for name in ("personal.mean_r1", "protocol", "map", "bytes", "fairness")] == [None] * 5


def test_the_time_to_target_is_that_of_the_first_evaluation_that_reaches_it(tmp_path: Path) -> None:
    finish(RunFolder(tmp_path), 0.5)
    outcome = results.read(RunFolder(tmp_path))
    assert outcome.time_to(Target("mean_r1", 0.1)) == 0.0
    assert outcome.time_to(Target("mean_r1", 0.3)) == 3.0
    assert outcome.time_to(Target("mean_r1", 0.6)) is None
    evaluations = [
        each._replace(figures={"metrics": {"i2t_medr": rank}})
        for each, rank in zip(outcome.evaluations, (50.0, 4.0), strict=True)
    ]
    ranked = dataclasses.replace(outcome, evaluations=tuple(evaluations))
    assert ranked.time_to(Target("i2t_medr", 5.0)) == 3.0
    assert ranked.time_to(Target("i2t_medr", 3.0)) is None
    assert outcome.time_to(Target("fairness.worst_r1", 0.25)) == 0.0
    assert outcome.time_to(Target("fairness.worst_r1", 0.3)) is None


def test_version_0_yields_the_untrained_values_and_an_unfinished_run_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="finished run"):
        results.read(RunFolder(tmp_path))
    finish(RunFolder(tmp_path), 0.5)
    before = results.read(RunFolder(tmp_path)).untrained()
    assert before.value("mean_r1") == 0.1
    assert before.value("fairness.gap_r1") == pytest.approx(0.25)
    assert before.value("bytes.up") is None


def test_the_confidence_interval_is_the_paired_t_interval() -> None:
    own, base = {0: 0.50, 1: 0.61, 2: 0.55}, {0: 0.45, 1: 0.52, 2: 0.53}
    found = summary.statistic(own, base)
    differences = np.array([0.05, 0.09, 0.02])
    half = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / np.sqrt(3)
    assert (found.n, found.mean, found.std) == (3, pytest.approx(np.mean([0.5, 0.61, 0.55])), pytest.approx(0.0550757))
    assert found.difference == pytest.approx(differences.mean())
    assert (found.low, found.high) == (
        pytest.approx(differences.mean() - half),
        pytest.approx(differences.mean() + half),
    )


def test_differences_use_the_seeds_that_both_rows_have() -> None:
    found = summary.statistic({0: 1.0, 2: 3.0}, {0: 0.5, 1: 9.0, 2: 2.5})
    assert (found.n, found.difference, found.low, found.high) == (2, 0.5, 0.5, 0.5)
    assert "seeds" not in tables.difference_text(found)
    missing = summary.statistic({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.5, 2: 2.0})
    assert (missing.n, missing.pairs) == (3, 2)
    assert tables.difference_text(missing).endswith("(2 of 3 seeds)")
    single = summary.statistic({0: 1.0}, {0: 0.25, 1: 3.0})
    assert single.difference == 0.75
    assert np.isnan([single.std, single.low, single.high]).all()
    assert np.isnan(summary.statistic({}, {0: 1.0}).mean)


def test_the_best_row_is_better_than_every_complete_row_by_a_paired_interval() -> None:
    low, high, noisy = {0: 0.10, 1: 0.20, 2: 0.30}, {0: 0.15, 1: 0.26, 2: 0.36}, {0: 0.9, 1: 0.0, 2: 0.0}
    incomplete = {0: 9.0}
    assert summary.best([low, high, incomplete], "mean_r1") == {1}
    assert summary.best([low, high, incomplete], "fairness.std_r1") == {0}
    assert summary.best([low, high, incomplete], "bytes.up") == {0}
    assert summary.best([low, high, noisy], "mean_r1") == set(), "no row is better than the noisy one beyond chance"
    assert summary.best([low, low], "mean_r1") == summary.best([low], "mean_r1") == set()
    assert summary.best([{0: 0.1}, {0: 0.9}], "mean_r1") == set(), "one seed has no interval"


# -------------------------------------------------------------------------------------------------------------- plots
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


def test_recall_is_plotted_against_the_epsilon_of_the_runs_that_have_one(tiny: Path, tmp_path: Path) -> None:
    varied, outcomes = entries(tiny, ["rounds=2,3,4"]), {}
    for entry, (recall, epsilon) in zip(varied, ((0.3, None), (0.2, 9.0), (0.1, 2.0)), strict=True):
        folder = RunFolder(tmp_path / str(recall))
        finish(folder, recall)
        summary_file = json.loads(folder.summary.read_text())
        spent = {"epsilon": epsilon, "delta": 1e-5, "tasks": 2, "without_noise": ["loss"]}
        folder.summary.write_text(json.dumps(summary_file | ({} if epsilon is None else {"privacy": spent})))
        outcomes[entry.name] = {0: results.read(folder)}
    plan = ComparisonPlan(varied, (0,), ("mean_r1", plots.EPSILON))
    rows = made_rows.rows(plan, dict.fromkeys(outcomes, ()), outcomes)
    figures = drawn(plots.page(rows, "title", "", tables.grid(rows, plan)))
    (line,) = figures[0].data
    assert figures[0].layout.xaxis.type == "log"
    assert (list(line.x), list(line.y)) == ([2.0, 9.0], [0.1, 0.2]), "the run without noise has no epsilon"


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
