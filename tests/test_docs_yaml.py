"""YAML that the documents print: each block is valid in a scenario, site, comparison, tuning file or policy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fedmq.audit.policy import read_policy

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FOLDERS = ("tutorial", "howto", "reference", "explanation")
SCHEMAS = {
    path.stem: {key: value for key, value in json.loads(path.read_text()).items() if key != "required"}
    for path in sorted((DOCS / "reference" / "schemas").glob("*.json"))
}
#: Keys by which a policy is recognised; it has no schema.
POLICY = {"up", "down", "evaluator", "silos", "peers"}


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The fenced and the indented blocks of a page, each with the number of its first line."""
    lines, row = text.splitlines(), 0
    while row < len(lines):
        fenced, end = lines[row].lstrip().startswith("```"), row + 1
        if fenced:
            while not lines[end].lstrip().startswith("```"):
                end += 1
            yield row + 2, "\n".join(lines[row + 1 : end])
            row = end + 1
        elif lines[row].startswith("    ") and not lines[row - 1].strip():
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield row + 1, "\n".join(line[4:] for line in lines[row:end])
            row = end
        else:
            row += 1


def mappings() -> list[tuple[str, dict[str, Any]]]:
    """All blocks that are a YAML mapping with words as keys, and where they are."""
    found = []
    for page in sorted(path for folder in FOLDERS for path in (DOCS / folder).glob("*.md")):
        for line, block in blocks(page.read_text(encoding="utf-8")):
            try:
                value = yaml.safe_load(block)
            except yaml.YAMLError:
                continue
            if isinstance(value, dict) and all(re.fullmatch(r"[a-z_]+", str(key)) for key in value):
                found.append((f"{page.relative_to(ROOT)}:{line}", value))
    return found


def test_the_documents_print_yaml_of_every_kind() -> None:
    keys = [set(value) for _, value in mappings()]
    assert len(keys) > 20
    assert any("rounds" in each for each in keys) and any("compare" in each for each in keys)
    assert any("tune" in each for each in keys) and any(each <= POLICY for each in keys)


@pytest.mark.parametrize(("place", "block"), mappings(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_printed_block_is_valid(place: str, block: dict[str, Any], tmp_path: Path) -> None:
    if block.keys() <= POLICY:
        (tmp_path / "policy.yaml").write_text(yaml.safe_dump(block))
        assert read_policy(tmp_path / "policy.yaml")
        return
    fitting = [name for name, schema in SCHEMAS.items() if block.keys() <= schema["properties"].keys()]
    assert fitting, f"{place}: {', '.join(block)} are keys of no file of fedmq"
    errors = {}
    for name in fitting:
        try:
            jsonschema.validate(block, SCHEMAS[name])
        except jsonschema.ValidationError as error:
            errors[name] = error.message
    assert len(errors) < len(fitting), f"{place}: {errors}"
