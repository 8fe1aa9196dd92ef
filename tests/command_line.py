"""The command line in the process of a test."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys

import pytest

from fedmq.cli import main as cli


def fedmq(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run a command; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["fedmq", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def completed(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command; returns its exit code and what it printed, as a process of its own would.

    It saves the imports of a process. A run with ``launcher: local`` has real processes here, too, which are forked
    from one forkserver for all tests of this process; they inherit the environment in which it was started.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = fedmq(patch, *words)
    return subprocess.CompletedProcess(list(map(str, words)), code, out.getvalue(), err.getvalue())
