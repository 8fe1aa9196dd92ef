"""RCSR-p: adapters that stay on their silos, and evaluation with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_records import MessageRecord, read_log
from protocols.parts import personal_adapter
from tests import threaded_run
from tests.small_federation import population

ON = {"personal": "router", "personal_onset": 0, "personal_epochs": 3, "personal_rate": 1.0, "warmup": 1}


def test_personalisation_changes_nothing_that_is_shared() -> None:
    plain, personal = population("rcsr", {"warmup": 1}), population("rcsr", ON)
    for _ in range(3):
        plain.round()
        personal.round()
        assert torch.equal(plain.state.theta, personal.state.theta)


def test_fedbridge_p_fits_adapters_only_to_pairs_and_never_shares_them() -> None:
    on = {"personal": True, "personal_onset": 0, "personal_epochs": 3, "personal_rate": 1.0}
    plain, personal = population("fedbridge"), population("fedbridge", on)
    for _ in range(3):
        plain.round()
        personal.round()
        assert torch.equal(plain.state.theta, personal.state.theta)
    has = {silo.index: personal_adapter.STATE in personal.personal[silo.index] for silo in personal.eligible}
    assert has == {silo.index: silo.paired for silo in personal.eligible}
    assert set(has.values()) == {True, False}
    assert not any(personal_adapter.STATE in plain.personal.get(silo.index, {}) for silo in plain.eligible)


@pytest.mark.parametrize("off", [{"anchor": False}, {"lambda_anc": 0.0}], ids=["no anchor", "an anchor of weight 0"])
def test_without_an_anchor_a_silo_that_lacks_a_modality_fits_no_adapter(off: dict[str, Any]) -> None:
    run, anchored = population("rcsr", {**ON, **off}), population("rcsr", ON)
    for _ in range(2):
        run.round()
        anchored.round()
    assert [personal_adapter.STATE in run.personal[silo.index] for silo in run.eligible] == [True, False, False, True]
    # An adapter from a time when the silo had both modalities is kept unchanged.
    for silo in run.context.silos[1:3]:
        run.personal[silo.index] = {**run.personal[silo.index], **anchored.personal[silo.index]}
        before = run.personal[silo.index][personal_adapter.STATE].clone()
        run.train(silo)
        assert torch.equal(run.personal[silo.index][personal_adapter.STATE], before)


@pytest.mark.slow
def test_adapters_never_leave_their_silos_and_survive_a_stop(tiny: Path, tmp_path: Path) -> None:
    settings = [f"protocol.{name}={value}" for name, value in ON.items()]
    scenario = threaded_run.resolved(tiny, *settings)
    whole = threaded_run.run(scenario, tmp_path / "whole").summary.plain()
    plain = threaded_run.run(threaded_run.resolved(tiny, "protocol.warmup=1"), tmp_path / "plain").summary.plain()

    # Uploads equal those without adapters to the byte; downloads also carry each silo's weight.
    assert whole["bytes"]["up"] == plain["bytes"]["up"]
    assert set(whole["bytes"]["down"]) - set(plain["bytes"]["down"]) == {"router_statistics"}
    kinds = {
        kind
        for silo in scenario.silo_names
        for _, record in read_log(RunFolder(tmp_path / "whole").messages(silo))
        if isinstance(record, MessageRecord) and record.action == "sent"
        for kind, _ in record.payloads
    }
    assert not any("adapter" in kind or "personal" in kind for kind in kinds)
    # Personal models are evaluated on the silos, which report the metrics.
    assert 0 < whole["personal"]["mean_r10"] <= 1
    assert set(whole["personal_per_silo"]) == set(scenario.silo_names)
    assert whole["model_digest"] == plain["model_digest"]
    assert any(
        "personal_adapter" in path.read_bytes()[:4096].decode("utf-8", "ignore")
        for path in (tmp_path / "whole").rglob("task-*.safetensors")
    )

    stops = iter([False] * 25 + [True] * 1000)
    threaded_run.run(scenario, tmp_path / "cut", stop_wanted=lambda: next(stops, True))
    again = threaded_run.run(scenario, tmp_path / "cut", resume=True).summary.plain()
    assert json.dumps(again["personal"]) == json.dumps(whole["personal"])
