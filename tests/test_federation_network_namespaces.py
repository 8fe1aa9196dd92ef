"""Sites on machines of their own: network namespaces that reach each other only through virtual links."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.network_namespaces import Network, available
from tests.own_data_sites import HOSPITALS, Sites, fedmq, outputs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not available(), reason="network namespaces need root")]
#: Time that a silo's link is cut [s].
CUT_SECONDS = float(os.environ.get("FEDMQ_CUT_SECONDS", "5"))


def sites_on(network: Network, root: Path, rounds: int) -> Sites:
    """The three hospitals' sites, each on its own machine."""
    uri = f"tcp://{network.address('coordinator')}:5555"
    machines = {name: network.command(name) for name in ("coordinator", *HOSPITALS)}
    sites = Sites(root, uri, prefix=machines)
    sites.write(rounds=rounds)
    return sites


def test_three_sites_on_machines_of_their_own_survive_a_cut_link_with_the_same_model(tmp_path: Path) -> None:
    digests = []
    for cut in (False, True):
        network = Network(("coordinator", *HOSPITALS))
        with network.made():
            sites = sites_on(network, tmp_path / f"cut-{cut}", 30)
            processes = [sites.coordinator(), *map(sites.silo, range(3))]
            if cut:
                _wait_for_round(sites, 2)
                network.cut("lyon", CUT_SECONDS)
            outputs(processes)
        sites.collect_logs()
        audit = fedmq("audit", str(sites.run))
        assert audit.returncode == 0, audit.stdout
        summary = sites.summary()
        assert summary["versions"] == 30
        assert {silo["participations"] for silo in summary["per_silo"].values()} == {30}
        digests.append(summary["model_digest"])
    assert digests[0] == digests[1]


def _wait_for_round(sites: Sites, number: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = sites.run / "status.json"
        if status.is_file() and json.loads(status.read_text())["round"] >= number:
            return
        time.sleep(0.05)
    raise AssertionError("the run did not begin")
