"""Run records: they round-trip, unknown keys are kept, and a wrong value is named by file and key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from coordinator.evaluation import personal_figures
from coordinator.updates import merge_line
from fedmq.errors import InputError
from fedmq.runs import results
from fedmq.runs.run_records import EvaluationLine
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder, append_line, write_json
from fedmq.wire.payloads import Metrics
from tests.run_summaries import release_config, summary

FIGURES = {"i2t_medr": 1.0, "mean_r1": 0.5}
EVALUATION = EvaluationLine(kind="evaluation", version=1, metrics=FIGURES, per_silo={"silo-00": FIGURES})
MERGE = merge_line(1, 1.5, (), {"router_loss": 0.25, "weight_silo-01": 0.5})
SILO = {"modalities": ["image"], "samples": 9, "participations": 1, "tasks": 1, "heldout": 3}
PERSONAL = personal_figures(1, {"silo-00": Metrics(FIGURES, {"silo-00": FIGURES})})
CONFIG = release_config(released_with={"memory": "ef" * 32}, frozen={})


def test_a_record_round_trips_with_unknown_keys(tmp_path: Path) -> None:
    path, more = tmp_path / "record.json", {"of_a_newer_version": {"a": [1, None, "b"]}}
    for record in (summary(), EVALUATION, MERGE, PERSONAL, CONFIG):
        write_json(path, record.plain())
        assert read_json(path, type(record), "a record") == record
        newer: dict[str, Any] = {**record.plain(), **more}
        write_json(path, newer)
        read = read_json(path, type(record), "a record")
        assert list(read.plain()) == list(newer) and read.plain() == newer


def test_a_metrics_line_is_read_as_the_type_that_its_kind_names(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for line in (EVALUATION, MERGE, PERSONAL):
        append_line(folder.metrics, line.plain())
    assert results.read_metrics(folder) == [EVALUATION, MERGE, PERSONAL]


def test_a_summary_contains_only_the_given_keys() -> None:
    assert {"personal", "our_reading", "personal_only", "public_items", "released_with"}.isdisjoint(summary().plain())
    assert summary(public_items=20).plain()["public_items"] == 20


def test_a_silos_metrics_keep_their_order() -> None:
    silo = summary().per_silo["silo-00"]
    assert list(silo.plain())[-2:] == ["i2t_medr", "mean_r1"]
    assert silo.figures == FIGURES


def test_a_methods_merge_report_consists_of_numbers_next_to_the_common_keys() -> None:
    assert MERGE.reported == {"router_loss": 0.25, "weight_silo-01": 0.5}
    assert list(MERGE.plain())[-2:] == ["router_loss", "weight_silo-01"]
    noted = MERGE.model_copy(update={"note": "text of a newer version"})
    assert noted.reported == MERGE.reported
    undefined = merge_line(1, 1.5, (), {"router_loss": math.nan, "weight_silo-01": 0.5})
    assert undefined.plain()["router_loss"] is None and undefined.reported == {"weight_silo-01": 0.5}


def silo(**change: object) -> dict[str, object]:
    return {"per_silo": {"silo-00": {**summary().per_silo["silo-00"].plain(), **change}}}


#: Wrong values of a summary, and the key that is named.
WRONG_SUMMARY: list[tuple[dict[str, Any], str]] = [
    ({"seed": "none"}, "seed"),
    ({"bytes": {"up": {"delta": 0.5}, "down": {}}}, "bytes.up.delta"),
    ({"seconds": {"total": None}}, "seconds.total"),
    ({"model_digest": "abc"}, "model_digest"),
    ({"change": math.nan}, "change"),
    (silo(mean_r1="high"), "per_silo.silo-00.mean_r1"),
    (silo(modalities=["sound"]), "per_silo.silo-00.modalities.0"),
    ({"per_silo": {"silo-00": {"modalities": [], "samples": 1, "participations": 0}}}, "per_silo.silo-00.tasks"),
    ({"per_silo": {"silo-00": {**SILO, "i2t_medr": 1.0}}}, "per_silo.silo-00"),  # without mean_r1
]
#: Wrong lines of the metrics, likewise.
WRONG_LINES: list[tuple[dict[str, Any], str]] = [
    ({**EVALUATION.plain(), "version": "two"}, ": evaluation.version"),
    ({**MERGE.plain(), "router_loss": math.nan}, ": merge"),
    ({**MERGE.plain(), "router_loss": -math.inf}, ": merge"),
    ({"kind": "merge", "version": 1, "now": 1.5}, ": merge.replies"),
    ({"kind": "other", "version": 1}, ""),
]


def test_a_wrong_value_is_named_by_file_line_and_key(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for change, place in WRONG_SUMMARY:
        write_json(folder.summary, {**summary().plain(), **change})
        with pytest.raises(InputError) as refusal:
            results.read_summary(folder)
        assert refusal.value.place == f"{folder.summary}: {place}"
    for line, place in WRONG_LINES:
        folder.metrics.write_text(f"{json.dumps(MERGE.plain())}\n{json.dumps(line)}\n")
        with pytest.raises(InputError) as refusal:
            results.read_metrics(folder)
        assert refusal.value.place == f"{folder.metrics}: line 2{place}"
