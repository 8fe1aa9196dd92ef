"""The command line in the process of a test."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def printed(*words: object, code: int = 0) -> str:
    """What a command prints that ends with an exit code."""
    done = completed(*words)
    assert done.returncode == code, done.stderr
    return done.stdout


def audited(run: Path, *options: object) -> tuple[int, dict[str, Any]]:
    """Exit code and facts of the audit of a run."""
    done = completed("audit", run, "--json", *options)
    return done.returncode, json.loads(done.stdout)


def refused(*words: object) -> str:
    """The message of a command that is refused with exit code 2 and has no output."""
    done = completed(*words)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    return done.stderr
