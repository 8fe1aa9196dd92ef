"""README and CONTRIBUTING say what is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import protocols
from fedmq import cli, cli_compare

ROOT = Path(__file__).parent.parent
COMMAND = re.compile(r"^ {4}fedmq ((?:compare|sweep) .*)$", flags=re.MULTILINE)
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "scenarios/**/*.md")
    for path in ROOT.glob(pattern)
    if COMMAND.search(path.read_text())
)


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


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_comparison_a_document_prints_can_be_planned(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row and candidate is a scenario its method takes, the baseline is a row, and all rows have one budget."""
    resolved = 0

    def only_resolve(options: cli_compare.Options, roots: cli_compare.Roots) -> None:
        nonlocal resolved
        entries = cli_compare._plan(options, roots.resolve).entries
        assert len({len(entry.candidates) for entry in entries}) == 1
        for entry in entries:
            for candidate in entry.candidates:
                roots.resolve(entry.file, [*entry.settings, *candidate], None)
                resolved += 1

    monkeypatch.setattr(cli_compare, "_carry_out", only_resolve)
    monkeypatch.chdir(ROOT)
    commands = COMMAND.findall((ROOT / document).read_text())
    for command in commands:
        CliRunner().invoke(cli.app, shlex.split(command), catch_exceptions=False, standalone_mode=False)
    assert resolved >= len(commands)
