"""JSON schemas of the files that a user writes accept every file of this repository and refuse misspelt keys."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from fedmq.cli import main as cli
from fedmq.cli import reference as schema_command
from fedmq.config.yaml_files import read_yaml
from fedmq.experiments.files import FileKind, schema_of

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "scenarios").rglob("*.yaml"))


@functools.cache
def validator(kind: FileKind) -> jsonschema.Draft202012Validator:
    schema = schema_of(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def kind_of(raw: dict[str, Any]) -> FileKind:
    if "tune" in raw:
        return FileKind.TUNING
    return FileKind.COMPARISON if raw.keys() & {"compare", "sweep"} else FileKind.SCENARIO


@pytest.mark.slow
def test_every_file_of_scenarios_is_valid() -> None:
    known = {kind: validator(kind) for kind in FileKind}
    kinds = set()
    for path in FILES:
        raw = read_yaml(path)
        kinds.add(kind_of(raw))
        found = [error.message for error in known[kind_of(raw)].iter_errors(raw)]
        assert not found, (path, found)
    assert kinds == {FileKind.SCENARIO, FileKind.COMPARISON, FileKind.TUNING}


TEXTS = (
    ("scenario", "{name: a, protocol: fedavg, participation: 0.5, track: csv, objective: dcmh}", True),
    ("scenario", "{name: a, protocol: {name: rcsr, lambda_anc: 1}, faults: [{kind: late, seconds: 5}]}", True),
    ("scenario", "{name: a, protocol: rcsr, round: 3}", False),
    ("scenario", "{name: a, protocol: rcsr, faults: [{kind: late, second: 5}]}", False),
    ("site", "{name: silo-00, data: {name: manifest, path: x}, modalities: [image]}", True),
    ("site", "{file: x}", False),
    ("comparison", "{sweep: a.yaml, vary: 'rounds=1,2', seeds: 0, metric: [mean_r1, map]}", True),
    ("comparison", "{compare: [a.yaml], sweep: b.yaml}", False),
    ("tuning", "{tune: a.yaml, search: {rounds: [1, 2], training.learning_rate: {low: 1, high: 2}}}", True),
    ("tuning", "{tune: a.yaml, search: {training.learning_rate: {low: 1}}}", False),
)


def test_a_schema_takes_short_forms_and_refuses_what_the_model_refuses() -> None:
    for kind, text, valid in TEXTS:
        assert validator(FileKind(kind)).is_valid(yaml.safe_load(text)) is valid, text


def test_the_command_prints_the_schema_of_each_kind() -> None:
    assert tuple(FileKind) == schema_command.KINDS
    done = CliRunner().invoke(cli.app, ["schema", "site"])
    assert json.loads(done.stdout) == schema_of(FileKind.SITE)
    assert "one of scenario, site" in str(CliRunner().invoke(cli.app, ["schema", "yaml"]).exception)
