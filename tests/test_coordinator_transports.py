"""Runs over different transports: a transport without ZeroMQ gives the same model as memory://."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.rounds import Phase
from fedmq.audit.log_checks import audit_run
from fedmq.config.scenario import Scenario
from tests import queue_transport, threaded_run
from tests.threaded_run import resolved

SMOKE = Path(__file__).parent.parent / "scenarios" / "smoke.yaml"


def check_queues_give_the_digest_of_memory(scenario: Scenario, folder: Path) -> None:
    assert queue_transport.TRANSPORT.form == "queue://NAME"
    summaries = {}
    for scheme in ("memory", "queue"):
        outcome = threaded_run.run(scenario, folder / scheme, scheme=scheme)
        assert outcome.phase is Phase.DONE
        assert outcome.summary is not None
        summaries[scheme] = outcome.summary.plain()
        audit = audit_run(folder / scheme)
        assert not audit.findings
    memory, queue = summaries["memory"], summaries["queue"]
    assert queue["model_digest"] == memory["model_digest"]
    assert queue["bytes"] == memory["bytes"]
    assert queue["messages"]["logged"]
    assert queue["messages"]["refused"] == 0


@pytest.mark.slow
def test_the_tiny_scenario_over_queues_gives_the_digest_of_memory(tiny: Path, tmp_path: Path) -> None:
    check_queues_give_the_digest_of_memory(resolved(tiny), tmp_path)


@pytest.mark.slow
def test_smoke_over_queues_gives_the_digest_of_memory(tmp_path: Path) -> None:
    check_queues_give_the_digest_of_memory(resolved(SMOKE), tmp_path)
