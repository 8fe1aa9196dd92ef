"""Sites on machines of their own: network namespaces that reach each other only through virtual links."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from fedmq.audit.log_checks import audit_run
from fedmq.config.scenario import Scenario
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord, read_log
from tests.in_process_run import run as run_inline
from tests.network_namespaces import Network, available
from tests.own_data_sites import COMMON, HOSPITALS, IMAGE_ONLY, Sites, arrays, outputs
from tests.waiting import wait_for_merges

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not available(), reason="network namespaces need root")]
#: Time that a silo's link is cut [s].
CUT_SECONDS = float(os.environ.get("FEDMQ_CUT_SECONDS", "5"))
ROUNDS = 30


def sites_on(network: Network, root: Path) -> Sites:
    """The three hospitals' sites, each on its own machine."""
    uri = f"tcp://{network.address('coordinator')}:5555"
    machines = {name: network.command(name) for name in ("coordinator", *HOSPITALS)}
    sites = Sites(root, uri, prefix=machines)
    sites.write(rounds=ROUNDS)
    return sites


@pytest.mark.longest
def test_three_sites_survive_a_cut_link_a_stopped_coordinator_and_another_address_with_the_same_model(
    tmp_path: Path,
) -> None:
    network = Network(("coordinator", *HOSPITALS))
    with network.made():
        sites = sites_on(network, tmp_path / "sites")
        coordinator, silos = sites.coordinator(), [sites.silo(index) for index in range(3)]
        wait_for_merges(sites.run, 2)
        network.cut("lyon", CUT_SECONDS)
        wait_for_merges(sites.run, 8)
        coordinator.send_signal(signal.SIGTERM)
        assert "silos and evaluator wait" in outputs([coordinator])[0]
        coordinator = sites.resumed()
        wait_for_merges(sites.run, 14)
        network.move("oslo")
        outputs([coordinator, *silos])
    sites.collect_logs()
    assert not audit_run(sites.run).findings
    summary = sites.summary()
    assert summary["versions"] == ROUNDS
    assert {silo["participations"] for silo in summary["per_silo"].values()} == {ROUNDS}
    notes = [
        record.event
        for _, record in read_log(sites.run / "messages" / "coordinator.jsonl")
        if isinstance(record, NoteRecord)
    ]
    assert notes.count(LogEvent.RESUMED) == 1
    assert summary["model_digest"] == _undisturbed(tmp_path)


def _undisturbed(root: Path) -> str:
    """The model of a simulation, whose digest is that of sites with the same items."""
    np.savez(root / "all.npz", **arrays())
    raw = {"name": "column", **COMMON, "rounds": ROUNDS, "data": {"name": "features", "path": str(root / "all.npz")}}
    raw |= {"partition": {"kind": "column", "column": "hospital"}, "missing_modality": {"silos": {IMAGE_ONLY: "image"}}}
    outcome = run_inline(Scenario.model_validate(raw), root / "together")
    assert outcome.summary is not None
    return outcome.summary.model_digest
