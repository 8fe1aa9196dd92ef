"""The metric registry: what an entry declares about values, and a user-defined metric in a whole run."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedmq.audit.log_checks import audit_run
from fedmq.cli.scenarios import resolved_file
from fedmq.cli.terminal import print_summary
from fedmq.config.scenario import Scenario
from fedmq.config.sections import Evaluation
from fedmq.errors import InputError, RunError
from fedmq.evaluation import metrics
from fedmq.evaluation.custom_metrics import GROUP, measures_of
from fedmq.evaluation.gallery_ranking import Embedded
from fedmq.evaluation.metrics import Measure, Metric, higher_is_better, metric_of
from fedmq.evaluation.program import Evaluator
from fedmq.experiments import grid, tables
from fedmq.experiments import summary as comparisons
from fedmq.experiments.grid import ComparisonPlan
from fedmq.runs import results
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.messages import Message
from fedmq.wire.payloads import Metrics
from silos.tasks import Silo
from tests import in_process_run, threaded_run
from tests.adversary_forged_logs import edit_metrics
from tests.threaded_run import resolved, run_of

#: A user's metrics file, the only place where the metrics are defined.
MINE = """
import numpy as np
from fedmq.evaluation.metrics import Measure, Metric


def reciprocal(items):
    i2t, t2i = (float(np.mean(1 / (1 + ranks))) for ranks in items.ranks)
    return {"mrr_i2t": i2t, "mrr_t2i": t2i, "mrr": (i2t + t2i) / 2}


def shift(items):
    image, text, _ = items.vectors
    return {"shift": float(np.linalg.norm(image.mean(axis=0) - text.mean(axis=0)))}


METRICS = [
    Measure(
        (Metric("mrr{_way}", "mean reciprocal rank", short="MRR"),),
        reciprocal,
        lambda _: ("mrr_i2t", "mrr_t2i", "mrr"),
    ),
    Measure((Metric("shift", "distance of the modalities' means", high=2.0, higher_is_better=False),), shift),
]
"""
OWN = {"mrr_i2t", "mrr_t2i", "mrr", "shift"}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def with_own(tiny: Path, mine: Path, *settings: str) -> Scenario:
    """A short run of a method with personal models that also measures the metrics of a file."""
    given = ("protocol={name: fedper}", "rounds=2", "participation=1", f"evaluation.metrics=[{mine}]", *settings)
    return resolved(tiny, *given)


def told(run: Path) -> str:
    text, folder = io.StringIO(), RunFolder(run)
    print_summary(results.read_summary(folder), folder, Console(file=text, width=120))
    return text.getvalue()


# ------------------------------------------------------------------------------------------- a user-defined metric
@pytest.mark.slow
def test_a_metric_defined_in_one_file_appears_in_summary_terminal_report_audit_and_comparison(
    tiny: Path, tmp_path: Path, mine: Path
) -> None:
    out = tmp_path / "run"
    threaded_run.run(with_own(tiny, mine, "evaluation.personal_every=1"), out)
    summary = json.loads((out / "summary.json").read_text())
    for values in (summary["metrics"], summary["per_silo_mean"], summary["personal"], summary["per_silo"]["silo-02"]):
        assert values.keys() >= OWN
    assert summary["personal_per_silo_mean"].keys() >= OWN
    assert summary["custom_metrics"]["shift"]["title"] == "distance of the modalities' means"

    shown = told(out)
    assert re.search(r"R@1 .* R@10 .* mAP .* MRR", shown)
    assert re.search(rf"personal models, mean .* {summary['personal']['mrr']:.4f}", shown)
    shift = f"{summary['metrics']['shift']:.4f}, personal models, {summary['personal']['shift']:.4f}"
    assert f"distance of the modalities' means: {shift}" in shown

    report = (out / "report.html").read_text()
    assert ">mrr_i2t</td>" in report
    assert "mean reciprocal rank, image to text" in report
    assert '"name":"MRR"' in report
    assert "Retrieval on the held-out split: distance of the modalities" in report

    assert audit_run(out).findings == []

    plan, rows = compared(tiny, {0: out}, ("mrr", "personal.shift"))
    assert tables.grid(rows, plan).head == ("", "mrr", "personal.shift")
    assert f"{summary['metrics']['mrr']:.4f}" in tables.markdown(tables.grid(rows, plan), "fedmq")
    assert len(rows[0].outcomes[0].course("shift")) == 2


def compared(
    tiny: Path, runs: dict[int, Path], columns: tuple[str, ...]
) -> tuple[ComparisonPlan, tuple[comparisons.Row, ...]]:
    """Comparison rows of single-seed runs."""
    varied = [grid.parse_variation("training.learning_rate=" + ",".join(f"0.{each + 1}" for each in runs), "--vary")]
    entries = grid.entries([tiny], [], varied, [], lambda path, settings, _: run_of(resolved(path, *settings)))
    plan = ComparisonPlan(entries, (0,), columns)
    finished = {
        entry.name: {0: results.read(RunFolder(folder))} for entry, folder in zip(entries, runs.values(), strict=True)
    }
    return plan, comparisons.rows(plan, {}, finished)


def test_the_best_row_of_a_comparison_follows_the_direction_of_a_user_metric(
    tiny: Path, tmp_path: Path, mine: Path
) -> None:
    for rounds in (1, 2):
        scenario = with_own(tiny, mine, f"rounds={rounds}", "training.warmup_rounds=0")
        in_process_run.run(scenario, tmp_path / str(rounds))
    _, rows = compared(tiny, {0: tmp_path / "1", 1: tmp_path / "2"}, ("shift",))
    least = min(row.columns["shift"].mean for row in rows)
    assert len({row.columns["shift"].mean for row in rows}) == 2
    assert not any(row.best for row in rows), "one seed is no evidence"
    seeds = [dict.fromkeys(range(3), row.columns["shift"].mean) for row in rows]
    (found,) = comparisons.best(seeds, "shift", rows[0].outcomes[0].custom_metrics)
    assert rows[found].columns["shift"].mean == least


def test_a_user_metric_value_out_of_bounds_is_refused_by_name_and_reported_at_the_end(
    tiny: Path, tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Silo.measure

    def answer(silo: Silo, message: Message) -> Metrics:
        found = measure(silo, message)
        lie = replace(found, values={**found.values, "shift": 2.5})
        return lie if silo.facts.name == "silo-01" else found

    monkeypatch.setattr(Silo, "measure", answer)
    summary = in_process_run.run(with_own(tiny, mine), tmp_path / "run").summary.plain()
    assert sorted(summary["personal_whole_split"]) == ["silo-00", "silo-02", "silo-03"]
    why = "version 2: refused: an evaluation with shift 2.5, allowed: 0 to 2"
    assert summary["personal_missing"] == {"silo-01": why}
    assert why in " ".join(told(tmp_path / "run").split())


@pytest.mark.slow
def test_a_user_metric_with_values_above_one_is_accepted_from_silos(tiny: Path, tmp_path: Path, mine: Path) -> None:
    """A metric whose values are not fractions does not invalidate a silo's measurements."""
    mine.write_text(MINE.replace("high=2.0", "low=-50, high=-1").replace('"shift": float(', '"shift": -3 - float('))
    summary = in_process_run.run(with_own(tiny, mine), tmp_path / "run").summary.plain()
    assert len(summary["personal_whole_split"]) == 4
    assert "personal_missing" not in summary
    assert summary["personal"]["shift"] < -3


def test_the_audit_finds_a_metric_value_out_of_bounds_in_a_run_folder(tiny: Path, tmp_path: Path, mine: Path) -> None:
    out = tmp_path / "run"
    in_process_run.run(with_own(tiny, mine), out)
    assert audit_run(out).findings == []
    edit_metrics(out, "evaluation", lambda line: line["per_silo"]["silo-00"].update(shift=9.0), 0)
    (finding,) = audit_run(out).findings
    assert finding.what == "an impossible metric of version 0: shift 9, allowed: 0 to 2"


def test_an_evaluator_that_reports_an_impossible_value_ends_the_run_with_the_metrics_name(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Evaluator.evaluate

    def lie(self: Evaluator, payloads: object) -> Metrics:
        found = evaluate(self, payloads)  # type: ignore[arg-type]
        return replace(found, values={**found.values, "map": 1.5})

    monkeypatch.setattr(Evaluator, "evaluate", lie)
    with pytest.raises(RunError, match=r"an invalid evaluation; .*an evaluation with map 1\.5, allowed: 0 to 1"):
        in_process_run.run(resolved(tiny, "rounds=2"), tmp_path)


def test_a_metrics_file_is_found_next_to_the_scenario_or_relative_to_where_it_is_set(tiny: Path, mine: Path) -> None:
    beside = mine.parent / "own.yaml"
    beside.write_text(tiny.read_text().replace("every: 2", "every: 2\n  metrics: [mine.py]"))
    (reference,) = resolved_file(beside).scenario.evaluation.metrics
    assert re.fullmatch(r"mine\.py@[0-9a-f]{64}", reference)
    scenario = resolved_file(tiny, [f"evaluation.metrics=[{mine}]"]).scenario
    assert scenario.evaluation.metrics == (reference,)
    assert set(metrics.known_names(scenario.evaluation, measures_of(scenario.evaluation))) >= OWN
    mine.unlink()
    with pytest.raises(InputError, match=r"mine\.py: found 'no such file'"):
        resolved_file(beside)


def test_a_file_without_metrics_is_refused_in_one_line(tiny: Path, mine: Path) -> None:
    for text, error in (
        ("METRIC = 3", "evaluation.metrics: mine.py: found 'a int', allowed: METRIC, a Measure"),
        ("", "evaluation.metrics: mine.py: found 'neither METRIC nor METRICS'"),
        ("1 / 0", "mine.py: line 1: found 'ZeroDivisionError: division by zero'"),
        (MINE.replace('"shift", "', '"map", "'), "found 'metric map', allowed: a name that is not one of fedmq's own"),
        (MINE.replace("high=2.0", "high=None"), "metric shift: low 0.0 and high None must be finite numbers"),
        (MINE.replace("high=2.0", "high=0.0"), "found 'ValueError: metric shift: low 0.0 and high 0.0 must be finite"),
        (MINE.replace('"shift", "', '"Shift", "'), "metric name 'Shift': small letters, digits and _ are allowed"),
    ):
        mine.write_text(text)
        with pytest.raises(InputError) as caught:
            measures_of(with_own(tiny, mine).evaluation)
        assert error in str(caught.value)
        assert "\n" not in str(caught.value)


def test_an_installed_package_offers_metrics_through_entry_points(
    tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.rename(tmp_path / "installed_metrics_of_a_test.py")
    info = tmp_path / "custom_metrics-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-metrics\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nreciprocal = installed_metrics_of_a_test\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = Evaluation(metrics=("reciprocal",))
    assert set(metrics.known_names(asked, measures_of(asked))) >= OWN
    with pytest.raises(InputError, match=r"evaluation\.metrics: found 'reciprocol', allowed: .*: reciprocal"):
        measures_of(Evaluation(metrics=("reciprocol",)))


def test_a_metrics_file_the_user_did_not_name_is_not_executed(mine: Path) -> None:
    """The scenario in a run folder may come from someone else and name any file."""
    with pytest.raises(InputError, match=r"evaluation\.metrics: found"):
        measures_of(Evaluation(metrics=(str(mine),)))


# ----------------------------------------------------------------------------------------------------- the registry
ITEMS = Embedded(np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32), np.arange(3))


def test_a_computed_value_out_of_bounds_or_without_an_entry_is_an_error_that_names_the_function() -> None:
    def two(_: metrics.Measured) -> dict[str, float]:
        return {"two": 2.0}

    with pytest.raises(RunError, match=r"metric two 2, allowed: 0 to 1; computed by .*two"):
        metrics.measure(metrics.Measured(ITEMS, Evaluation()), measures=[Measure((Metric("two", "two"),), two)])
    with pytest.raises(RunError, match=r"metric two: computed by .*two, which has no entry for it"):
        metrics.measure(metrics.Measured(ITEMS, Evaluation()), measures=[Measure((Metric("one", "one"),), two)])
    with pytest.raises(RunError, match=r"metric two nan"):
        entry = Metric("two", "two")
        metrics.measure(
            metrics.Measured(ITEMS, Evaluation()), measures=[Measure((entry,), lambda _: {"two": float("nan")})]
        )


def test_a_metric_name_with_cut_off_and_direction_has_an_entry() -> None:
    for name, title, way, high, higher in (
        ("mean_r1", "recall@1, mean", "mean", 1.0, True),
        ("i2t_medr", "median rank of the first match, image to text", "i2t", 2.0**32, False),
        ("map", "mean average precision (mAP), mean", "mean", 1.0, True),
        ("map_at50_t2i", "mAP of the first 50 items, text to image", "t2i", 1.0, True),
        ("map_expected_i2i", "mAP averaged over the orders of tied items, image to image", "i2i", 1.0, True),
        ("ndcg_at10", "NDCG of the first 10 items, mean", "mean", 1.0, True),
        ("fold_mean_r5", "recall@5 within folds, mean over folds, mean", "mean", 1.0, True),
        ("spread_text", "spread of the texts' embeddings (0: all are the same)", "", 1.0, True),
        ("gap_r1", "mean recall@1 of the best silo minus that of the worst", "", 1.0, False),
    ):
        metric = metric_of(name)
        told = (metric.name, metric.title, metric.way, metric.high, metric.higher_is_better)
        assert told == (name, title, way, high, higher)


def test_every_metric_name_of_an_evaluation_has_an_entry() -> None:
    asked = Evaluation(map_at=(5, 50), ndcg_at=(10,), gallery="database", within=True, fold_size=7)
    assert [metric_of(name).name for name in metrics.known_names(asked)] == list(metrics.known_names(asked))


def test_an_unknown_metric_is_refused_with_similar_names() -> None:
    with pytest.raises(InputError, match=r"found 'mean_r11x', allowed: a metric; did you mean mean_r1 or mean_r10"):
        metric_of("mean_r11x")
    for name in ("map_at0", "map_at", "i2i_r1", "map_mean", "", "mean_r1 "):
        with pytest.raises(InputError):
            metric_of(name)


def test_columns_where_lower_is_better_are_known() -> None:
    less = ("i2t_medr", "personal.t2i_medr", "fairness.std_r1", "personal_fairness.gap_r1", "bytes.up", "seconds.total")
    more = ("mean_r1", "fairness.worst_r1", "personal_per_silo_mean.map_at50", "participation", "tasks.merged")
    assert not any(map(higher_is_better, less))
    assert not higher_is_better("seconds to mean_r1 0.5")
    assert all(map(higher_is_better, more))


def test_rounding_errors_do_not_count_as_out_of_bounds() -> None:
    assert metric_of("mean_r1").objection(1 + 1e-9) is None
    assert metric_of("mean_r1").objection(1.01) == "mean_r1 1.01, allowed: 0 to 1"
    assert metric_of("mean_r1").objection(float("nan")) == "mean_r1 nan, allowed: 0 to 1"


def test_an_own_metric_without_a_usable_value_takes_no_other_with_it_and_is_named(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.py"
    path.write_text(
        "from fedmq.evaluation.metrics import Measure, Metric\n"
        "def values(items):\n"
        "    return {'not_a_number': float('nan'), 'high': 2.0, 'text': 'x', 'without': 0.5, 'good': 0.5}\n"
        "def broken(items):\n    return {'broken': 1 / 0}\n"
        "METRICS = [Measure(tuple(Metric(name, name) for name in ('not_a_number', 'high', 'text', 'good')), values),\n"
        "           Measure((Metric('broken', 'broken'),), broken)]\n"
    )
    out, odd = tmp_path / "run", {"not_a_number", "high", "text", "broken"}
    threaded_run.run(with_own(tiny, path, "rounds=1", "training.warmup_rounds=0"), out)
    summary = results.read_summary(RunFolder(out))
    assert summary.metrics["good"] == summary.personal["good"] == 0.5
    assert summary.metrics.keys() >= {"mean_r1", "map"} and not summary.metrics.keys() & odd
    assert summary.personal_missing == {} and summary.custom_metrics.keys() == {"good"}
    everywhere = ["evaluator", "silo-00", "silo-01", "silo-02", "silo-03"]
    assert summary.unmeasured == dict.fromkeys(("not_a_number", "high", "text", "broken"), everywhere)
    stderr = capfd.readouterr().err
    for line in (
        "metric not_a_number nan, allowed: 0 to 1; odd.py computed it, and it is left out",
        "metric high 2, allowed: 0 to 1; odd.py",
        "metric text: found a str, allowed: a number; odd.py",
        "metric without, which has no entry; odd.py",
        "metric broken: left out, odd.py failed: ZeroDivisionError: division by zero",
    ):
        assert stderr.count(line) == 1
    assert "metric high: no value that can be used in the last evaluation of the evaluator, silo-00" in told(out)
