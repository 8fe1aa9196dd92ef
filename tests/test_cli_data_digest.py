"""`fedmq data digest` prints what a process has to state about its data, as docs/reference/wire.md describes it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.command_line import completed
from tests.own_data_sites import COMMON, arrays


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def of_features(values: np.ndarray[Any, Any]) -> bytes:
    """The digest of an item's image or captions, from the description of data_statement."""
    shape = f"({', '.join(map(str, values.shape))}{',' if values.ndim == 1 else ''})"
    return sha256(f"float32 {shape}\0".encode() + values.astype("<f4").tobytes())


def salted(found: dict[str, np.ndarray[Any, Any]], run: str) -> str:
    """The salted digest of a file of vectors, from the description of data_statement."""
    content = f"fedmq data\0{run}\0".encode()
    for row, key in enumerate(found["keys"]):
        head = [str(key), str(found["split"][row]), [str(found["label_names"][found["labels"][row]])]]
        content += sha256(json.dumps(head).encode())
        content += of_features(np.where(found["image_present"][row], found["image"][row], 0))
        content += of_features(np.where(found["text_present"][row], found["text"][row : row + 1], 0))
    return sha256(content).hex()


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    np.savez(tmp_path / "all.npz", **(arrays(60) | {"keys": np.array([f"é-{row}" for row in range(60)])}))
    path = tmp_path / "column.yaml"
    partition = {"kind": "column", "column": "hospital"}
    data = {"name": "features", "path": str(tmp_path / "all.npz")}
    path.write_text(yaml.safe_dump({"name": "column", **COMMON, "partition": partition, "data": data}))
    return path


def test_the_digest_and_numbers_that_processes_state_are_printed_from_a_scenario(scenario: Path) -> None:
    done = completed("data", "digest", scenario, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    with np.load(scenario.parent / "all.npz") as file:
        found = dict(file)
    expected = salted(found, record["run"])
    assert {stated["data_digest"] for stated in record["stated"].values()} == {expected}
    assert set(record["stated"]) == {"evaluator", "silo-00", "silo-01", "silo-02"}
    trained = (found["split"] == "train") & (found["hospital"] == "berlin")
    assert record["stated"]["silo-00"]["items"]["train"] == {
        "paired": int(trained.sum()), "image_only": 0, "text_only": 0
    }  # fmt: skip
    assert completed("data", "digest", scenario).stdout == f"{expected}  {record['run']}\n"


def test_a_site_file_is_refused_in_a_simulated_partition_and_needed_elsewhere(scenario: Path) -> None:
    refused = completed("data", "digest", scenario, "--site", "silo.yaml")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--site: found 'silo.yaml', allowed: no site file" in refused.stderr
    own = scenario.with_name("own.yaml")
    own.write_text(yaml.safe_dump({"name": "own", **COMMON, "partition": {"kind": "own"}}))
    refused = completed("data", "digest", own)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--site: found 'not given', allowed: a site file" in refused.stderr
