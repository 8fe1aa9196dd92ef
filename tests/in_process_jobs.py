"""Jobs of a comparison or a search as runs in the process of a test: real runs without the imports of new processes."""

from __future__ import annotations

from typing import ClassVar

import pytest
from typer.testing import CliRunner

from fedmq.cli import main as cli
from fedmq.experiments.process_pool import Job
from fedmq.launch import forkserver


class InThisProcess:
    """A run in this process, which is over when it has started.

    Attributes:
        started: names of all jobs that were started.
    """

    started: ClassVar[list[str]] = []

    def __init__(self, job: Job) -> None:
        self.started.append(job.name)
        done = CliRunner().invoke(cli.app, list(job.words))
        job.log.write_text(f"fedmq: {done.exception}\n" if done.exit_code else "")
        self.exitcode = done.exit_code

    def terminate(self) -> None:
        """It is over."""

    kill = join = terminate


def run_jobs_here(monkeypatch: pytest.MonkeyPatch, kind: type[InThisProcess] = InThisProcess) -> list[str]:
    """Run jobs in this process from now on; returns the names of the jobs that are started, which grows."""
    monkeypatch.setattr(InThisProcess, "started", [])
    monkeypatch.setattr(forkserver, "start_job", kind)
    return InThisProcess.started
