"""Error messages of the command line say what to do next."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedmq.cli import keys as key_commands
from fedmq.errors import InputError
from fedmq.wire.keys import load_identity
from tests.command_line import fedmq


def test_an_unusual_name_of_a_key_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, remarked in (("silo3", True), ("silo-03", False), ("evaluator", False)):
        assert fedmq(monkeypatch, "keys", "new", name, "--keys", tmp_path) == 0
        assert (f"{name} is not the name of a process" in capfd.readouterr().err) is remarked
    assert fedmq(monkeypatch, "keys", "new", "silo-03", "--keys", tmp_path) == 2
    assert "--replace" in capfd.readouterr().err


def test_a_key_that_is_not_confirmed_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fedmq(monkeypatch, "keys", "new", "silo-03", "--keys", tmp_path / "site") == 0
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(key_commands.typer, "confirm", lambda _: False)
    assert fedmq(monkeypatch, "keys", "accept", tmp_path / "keys", tmp_path / "site" / "silo-03.request") == 1
    assert not (tmp_path / "keys" / "accepted" / "silo-03.pub").exists()


def test_a_missing_private_key_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"silo-00\.key: found 'no such file'.*`fedmq keys new silo-00 --keys "):
        load_identity(tmp_path, "silo-00")
