"""YAML files: values by YAML 1.2, and bounds against files that expand when they are read."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmq.audit.policy import read_policy
from fedmq.config import resolve as scenarios
from fedmq.config import yaml_files
from fedmq.errors import InputError
from fedmq.experiments import files

PLAIN = [
    ("010", 10),
    ("0o10", 8),
    ("0x1F", 31),
    ("1_000", 1000),
    ("1:30", "1:30"),
    ("on", "on"),
    ("No", "No"),
    ("y", "y"),
    ("TRUE", True),
    ("2026-01-13", "2026-01-13"),
    ("1e-4", 1e-4),
    ("1E3", 1000.0),
    (".5", 0.5),
    ("-.inf", -math.inf),
    ("~", None),
    ("", None),
    ("'010'", "010"),
]


def test_plain_values_are_read_by_the_core_schema_of_yaml_1_2() -> None:
    for text, value in PLAIN:
        read = yaml_files.parse(f"a: {text}\n")["a"]
        assert (type(read), read) == (type(value), value), text


def test_values_that_contradict_their_tag_are_refused(tmp_path: Path) -> None:
    for text in ("!!int on", "!!float x", "!!bool 1", "!!int 1:30", "9" * 5000):
        (tmp_path / "x.yaml").write_text(f"rounds: {text}\n")
        with pytest.raises(InputError, match=r"x\.yaml"):
            yaml_files.read_yaml(tmp_path / "x.yaml")


printable = st.text(st.characters(exclude_categories=["C"]))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), printable,
    st.from_regex(r"[-+]?[0-9_:.eEox]{1,6}|on|Off|YES|no|y|null|~|<<|=", fullmatch=True),
)  # fmt: skip


@given(st.dictionaries(printable, st.lists(scalars), max_size=4))
def test_what_is_written_is_read_back(value: dict[str, object]) -> None:
    assert yaml_files.parse(yaml_files.dump(value)) == value


def bomb(levels: int) -> str:
    """A list of nine aliases to a list of nine aliases, and so on."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join([*lines, ""])


#: A mapping that merges nine times a mapping that merges nine times another, and so on.
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9))


def test_a_few_aliases_are_read(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: &a {b: 1}\nc: [*a, *a]\nd: {<<: *a, e: 2}\n")
    assert yaml_files.read_yaml(tmp_path / "x.yaml")["d"] == {"b": 1, "e": 2}


def test_aliases_that_expand_without_bound_are_refused_by_every_reader(tmp_path: Path) -> None:
    path, mappings = tmp_path / "x.yaml", bomb(9).replace("[", "{k: [").replace("]", "]}")
    started = time.process_time()
    for text in (bomb(9), mappings, MERGES, "a: &a [*a]\n", "a: &a {b: *a}\n"):
        path.write_text(text)
        for reader in (yaml_files.read_yaml, scenarios.load, files.read_comparison, read_policy):
            with pytest.raises(InputError, match=r"x\.yaml: line \d+: found .*alias"):
                reader(path)
        with pytest.raises(InputError, match="--set"):
            scenarios.apply_settings({}, [f"name={{{', '.join(text.splitlines())}}}"])
    assert time.process_time() - started < 25


def test_pipes_and_large_files_are_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="no regular file"):
        yaml_files.read_yaml(tmp_path / "pipe")
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(InputError, match="at most 262,144 bytes"):
        yaml_files.read_yaml(tmp_path / "large.yaml")


def test_halves_of_a_character_are_refused_by_every_reader_and_pairs_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text('up: {fields: {delta: ["\\ud83d\\ude00"]}}\n')
    assert yaml_files.read_yaml(path) == {"up": {"fields": {"delta": ["\U0001f600"]}}}
    for half in ("\\ud83d", "\\ude00\\ud83d"):
        path.write_text(f'a: 1\nup: {{fields: {{delta: ["{half}"]}}}}\n')
        for reader in (yaml_files.read_yaml, scenarios.load, files.read_comparison, read_policy):
            with pytest.raises(InputError, match=r"x\.yaml: line 2: found 'half of a UTF-16 character"):
                reader(path)
