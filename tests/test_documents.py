"""README and CONTRIBUTING say what is there."""

from __future__ import annotations

import re
from pathlib import Path

import protocols

ROOT = Path(__file__).parent.parent


def test_the_readme_opens_with_the_two_commands() -> None:
    commands = re.findall(r"^    make (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert commands[:2] == ["run", "test"]


def test_every_scenario_is_in_the_readme_and_the_other_way_round() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`(\w+\.yaml)`", text))
    assert {path.name for path in (ROOT / "scenarios").glob("*.yaml")} == named


def test_files_the_documents_name_exist() -> None:
    for document in ("README.md", "CONTRIBUTING.md"):
        for name in re.findall(
            r"`((?:fedmq|protocols|tests|docs|coordinator|silos|scenarios)/[\w/.]+\.\w+)`",
            (ROOT / document).read_text(),
        ):
            if "mine" not in name:
                assert (ROOT / name).exists(), name
        for name in re.findall(r"\]\((?!http)([^)]+)\)", (ROOT / document).read_text()):
            assert (ROOT / name).exists(), name


def test_the_methods_have_a_line_for_the_listing() -> None:
    assert all(len(protocols.summary(name)) > 20 for name in protocols.names())


def test_nothing_committed_names_a_host_of_a_registry_or_a_path_of_one_machine() -> None:
    for path in ROOT.rglob("*.toml"):
        if ".venv" not in path.parts:
            assert "index-url" not in path.read_text()
