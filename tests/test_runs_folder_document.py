"""An auditor without fedmq can check a run folder with what the documents say about it."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config.scenario import Scenario
from fedmq.runs import run_records
from fedmq.runs.results import result_digests
from fedmq.storage.run_folder import RunFolder
from tests.in_process_run import run as run_inline
from tests.own_data_sites import COMMON, arrays

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
