"""The command line in the process of a test."""

from __future__ import annotations

import sys

import pytest

from fedmq.cli import main as cli


def fedmq(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run a command; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["fedmq", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)
