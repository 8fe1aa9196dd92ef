"""Run records round-trip, a wrong value is named by file and key, and digests follow from the documents."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.evaluation import personal_figures
from coordinator.updates import merge_line
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.runs import results, run_records
from fedmq.runs.results import result_digests
from fedmq.runs.run_records import EvaluationLine
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder, append_line, write_json
from fedmq.wire.payloads import Metrics
from tests.in_process_run import run as run_inline
from tests.own_data_sites import COMMON, arrays
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


# ------------------------------------------------------------------------------------------ documents of a run folder
DOCS = Path(__file__).parent.parent / "docs" / "reference"
LINES = {
    "merge": run_records.MergeLine,
    "evaluation": run_records.EvaluationLine,
    "own_heldout": run_records.OwnHeldOutLine,
    "personal": run_records.PersonalLine,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    np.savez(root / "all.npz", **arrays(60))
    partition = {"kind": "column", "column": "hospital"}
    data = {"name": "features", "path": str(root / "all.npz")}
    run_inline(
        Scenario.model_validate({"name": "column", **COMMON, "data": data, "partition": partition}), root / "run"
    )
    return root / "run"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_digests_of_the_results_follow_from_the_documents(folder: Path) -> None:
    summary = read(folder / "summary.json")
    kept = {key: value for key, value in summary.items() if key not in ("seconds", "processes")}
    kept["virtual"] = summary["seconds"]["virtual"]
    noted = result_digests(RunFolder(folder))
    assert noted.pop("summary.json") == sha256(json.dumps(kept, sort_keys=True).encode())
    assert noted == {name: sha256((folder / name).read_bytes()) for name in noted}
    document = (DOCS / "message_logs.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in document for name in noted)


def test_the_models_digest_follows_from_the_documents(folder: Path) -> None:
    content = (folder / "model" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    entries, values = json.loads(content[8 : 8 + length]), content[8 + length :]
    config = read(folder / "model" / "config.json")
    text, buffer = "fedmq layout 1\n", b""
    for name in config["layout"]:
        entry = entries[name]
        assert entry["dtype"] == "F32"
        sizes = ",".join(map(str, entry["shape"]))
        text += f"{name}\tfloat32\t{sizes}\t{len(buffer)}\n"
        start, stop = entry["data_offsets"]
        buffer += values[start:stop]
    layout = hashlib.sha256(text.encode())
    assert layout.hexdigest() == config["layout_digest"]
    found = sha256(layout.digest() + buffer)
    assert found == config["model_digest"] == read(folder / "summary.json")["model_digest"]


def test_the_fields_of_each_line_of_the_metrics_are_documented() -> None:
    document = (DOCS / "run_folder.md").read_text(encoding="utf-8").partition("## Lines of metrics.jsonl")[2]
    common = document.partition("\n- ")[0]
    for kind, line in LINES.items():
        entry = document.partition(f"- `{kind}`")[2].partition("\n- ")[0].partition("\n\n")[0]
        assert line.model_fields.keys() <= set(re.findall(r"`(\w+)`", common + entry)), kind
