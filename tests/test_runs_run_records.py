"""Run records: they round-trip, unknown keys are kept, and a wrong value is named by file and key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.aggregation import merge_line
from coordinator.evaluation import personal_figures
from fedmq.errors import InputError
from fedmq.runs import results
from fedmq.runs.release import ReleaseConfig
from fedmq.runs.run_records import EvaluationLine, MergeLine, MetricsLine
from fedmq.storage.json_files import Stored, read_json
from fedmq.storage.run_folder import RunFolder, append_line, write_json
from fedmq.wire.payloads import Metrics
from tests.run_summaries import summary

FIGURES = {"i2t_medr": 1.0, "mean_r1": 0.5}
EVALUATION = EvaluationLine(kind="evaluation", version=1, metrics=FIGURES, per_silo={"silo-00": FIGURES})
MERGE = merge_line(1, 1.5, (), {}, {"router_loss": 0.25, "weight_silo-01": 0.5})
PERSONAL = personal_figures(1, {"silo-00": Metrics(FIGURES, {"silo-00": FIGURES})})
CONFIG = ReleaseConfig(
    backbone={"name": "features", "pretrained": None, "bottleneck": 4},
    protocol="fedavg",
    dim=24,
    layout_digest="ab" * 32,
    model_digest="cd" * 32,
    released_with={"memory": "ef" * 32},
)


def test_a_summary_round_trips(tmp_path: Path) -> None:
    folder, written = RunFolder(tmp_path), summary(unchanged=True, personal=FIGURES)
    write_json(folder.summary, written.plain())
    assert results.read_summary(folder) == written
    assert results.read_summary(folder).plain() == written.plain()


def test_a_summary_contains_only_the_given_keys() -> None:
    assert {"unchanged", "personal", "our_reading", "personal_only", "public_items", "released_with"}.isdisjoint(
        summary().plain()
    )
    assert summary(public_items=20).plain()["public_items"] == 20


def test_a_silos_metrics_keep_their_order() -> None:
    silo = summary().per_silo["silo-00"]
    assert list(silo.plain()) == ["modalities", "samples", "participations", "i2t_medr", "mean_r1"]
    assert silo.figures == FIGURES


@pytest.mark.parametrize("line", [EVALUATION, MERGE, PERSONAL], ids=lambda line: str(line.kind))
def test_a_metrics_line_round_trips(tmp_path: Path, line: MetricsLine) -> None:
    folder = RunFolder(tmp_path)
    append_line(folder.metrics, line.plain())
    assert results.read_metrics(folder) == [line]
    assert json.dumps(line.plain()) + "\n" == folder.metrics.read_text()


def test_a_configuration_round_trips(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", CONFIG.plain())
    assert read_json(tmp_path / "config.json", ReleaseConfig, "a configuration") == CONFIG


def test_a_methods_merge_report_consists_of_numbers_next_to_the_common_keys() -> None:
    assert MERGE.reported == {"router_loss": 0.25, "weight_silo-01": 0.5}
    assert list(MERGE.plain())[-2:] == ["router_loss", "weight_silo-01"]
    noted = MERGE.model_copy(update={"note": "text of a newer version"})
    assert noted.reported == MERGE.reported


def test_values_of_a_merge_that_are_no_numbers_are_written_as_null_and_refused_in_a_file(tmp_path: Path) -> None:
    line = merge_line(1, 1.5, (), {}, {"router_loss": math.nan, "weight_silo-01": 0.5})
    assert line.plain()["router_loss"] is None and line.reported == {"weight_silo-01": 0.5}
    folder = RunFolder(tmp_path)
    for value in ("NaN", "Infinity", "-Infinity"):
        folder.metrics.write_text(json.dumps(MERGE.plain()).replace("0.25", value) + "\n")
        with pytest.raises(
            InputError, match=r"metrics\.jsonl: line 1: .*router_loss is -?(nan|inf), not a finite number"
        ):
            results.read_metrics(folder)


@pytest.mark.parametrize(
    "record", [summary(), EVALUATION, MERGE, PERSONAL, CONFIG], ids=lambda each: type(each).__name__
)
def test_unknown_keys_are_kept(tmp_path: Path, record: Stored) -> None:
    newer: dict[str, Any] = {**record.plain(), "of_a_newer_version": {"a": [1, None, "b"]}}
    write_json(tmp_path / "record.json", newer)
    read = read_json(tmp_path / "record.json", type(record), "a record")
    assert read.plain() == newer
    assert list(read.plain()) == list(newer)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": "none"}, r"summary\.json: seed: found 'none'"),
        ({"bytes": {"up": {"delta": 0.5}, "down": {}}}, r"summary\.json: bytes\.up\.delta: found '0\.5'"),
        ({"seconds": {"total": None}}, r"summary\.json: seconds\.total: found 'None'"),
        ({"model_digest": "abc"}, r"summary\.json: model_digest: found 'abc'"),
        ({"change": math.nan}, r"summary\.json: change: found 'nan'"),
        ({"seconds": {"training": math.inf}}, r"summary\.json: seconds\.training: found 'inf'"),
        ({"tasks": {"merged": "all"}}, r"summary\.json: tasks\.merged: found 'all'"),
    ],
)
def test_a_wrong_value_of_a_summary_is_named_by_file_and_key(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder = RunFolder(tmp_path)
    write_json(folder.summary, {**summary().plain(), **change})
    with pytest.raises(InputError, match=said):
        results.read_summary(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mean_r1": "high"}, r"per_silo\.silo-00\.mean_r1: found 'high'"),
        ({"modalities": ["sound"]}, r"per_silo\.silo-00\.modalities\.0: found 'sound'"),
    ],
)
def test_a_wrong_value_of_a_silo_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    folder, plain = RunFolder(tmp_path), summary().plain()
    own = {**summary().per_silo["silo-00"].plain(), **change}
    write_json(folder.summary, {**plain, "per_silo": {"silo-00": own}})
    with pytest.raises(InputError, match=said):
        results.read_summary(folder)


def test_a_silo_without_the_metric_that_every_report_shows_is_refused(tmp_path: Path) -> None:
    folder, own = RunFolder(tmp_path), summary().per_silo["silo-00"].plain()
    del own["mean_r1"]
    write_json(folder.summary, {**summary().plain(), "per_silo": {"silo-00": own}})
    with pytest.raises(InputError, match=r"summary\.json: per_silo\.silo-00: .*mean_r1 is missing"):
        results.read_summary(folder)


def test_a_wrong_line_is_named_by_its_number_and_key(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    append_line(folder.metrics, MERGE.plain())
    append_line(folder.metrics, {**EVALUATION.plain(), "version": "two"})
    with pytest.raises(InputError, match=r"metrics\.jsonl: line 2: evaluation\.version: found 'two'"):
        results.read_metrics(folder)
    folder.metrics.write_text('{"kind": "other", "version": 1}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl: line 1: .*'merge', 'evaluation', 'own_heldout', 'personal'"):
        results.read_metrics(folder)


def test_records_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        MERGE.version = 2  # type: ignore[misc]


def test_a_merge_line_of_an_older_version_has_no_losses(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"kind": "merge", "version": 1, "now": 2.0}\n')
    (line,) = results.read_metrics(folder)
    assert isinstance(line, MergeLine)
    assert (line.replies, line.staleness, line.loss, line.losses) == ([], [], None, {})
    assert line.plain() == {"kind": "merge", "version": 1, "now": 2.0}
