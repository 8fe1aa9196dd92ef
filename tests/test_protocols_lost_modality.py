"""State of a modality that a silo loses and regains, and updates of silos that lack one or share nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.round_events import Phase
from fedmq.audit.log_checks import audit_run
from fedmq.config.scenario import Objective
from fedmq.federation.protocol import SiloFacts, Trained
from fedmq.wire.payloads import PartialDelta
from protocols.parts.aggregation import completed, layers_of, shortened, trainable
from tests import in_process_run, threaded_run
from tests.small_federation import SmallFederation, population
from tests.threaded_run import resolved

PAIRED = ((True, True),)


def made(base: str) -> tuple[SmallFederation, SiloFacts]:
    run = population("fedavg", kinds=PAIRED, sizes=[9], objective=Objective(base=base, bits=8, hidden=16))  # type: ignore[arg-type]
    (silo,) = run.context.silos
    return run, silo


def trained_with(run: SmallFederation, silo: SiloFacts, *, image: bool = True, text: bool = True) -> Trained:
    """Run a task of the silo with only these modalities; its dataset is restored afterwards."""
    whole = run.shares[silo.index]
    run.shares = {silo.index: replace(whole, image=whole.image if image else None, text=whole.text if text else None)}
    trained = run.train(replace(silo, image=image, text=text))
    run.shares = {silo.index: whole}
    return trained


@pytest.mark.parametrize(
    ("base", "name"), [("dcmh", "base.buffer"), ("shdch", "base.buffer"), ("dpsh", "base.bank")], ids=str
)
def test_state_of_a_lost_modality_is_kept_and_used_when_it_returns(base: str, name: str) -> None:
    run, silo = made(base)
    before = dict(run.train(silo).state)
    for _ in range(2):
        lone = trained_with(run, silo, text=False).state
        assert torch.equal(lone[f"{name}.text"], before[f"{name}.text"])
        assert not torch.equal(lone[f"{name}.image"], before[f"{name}.image"])
    # Training resumes from the kept state: changing it changes the model.
    kept = run.personal[0]
    models = []
    for change in (0.0, 3.0):
        run.personal[0] = {**kept, f"{name}.text": kept[f"{name}.text"] + change}
        run.train(silo)
        models.append(run.model.flat.detach().clone())
    assert not torch.equal(*models)


@pytest.mark.parametrize(("base", "name"), [("dcmh", "base.buffer"), ("dpsh", "base.bank")], ids=str)
def test_no_state_is_kept_when_the_items_change(base: str, name: str) -> None:
    run, silo = made(base)
    run.train(silo)
    run.shares = {0: replace(run.shares[0], rows=run.shares[0].rows + 100)}
    assert f"{name}.text" not in trained_with(run, silo, text=False).state


def test_a_bank_of_images_is_never_used_for_captions() -> None:
    changes = []
    for earlier in (True, False):
        run, silo = made("dpsh")
        if earlier:
            trained_with(run, silo, text=False)
        run.version += 1
        trained_with(run, silo, image=False)
        changes.append(run.model.flat.detach().clone())
    assert torch.equal(*changes)


# -------------------------------------------------------------------- layers and updates of a silo without a modality
#: FedPer keeps the last layers personal, and the image net of these bases has no others with ``image_layers: 0``.
BASE = "objective={base: dcmh, bits: 8, hidden: 16, image_layers: 0}"
SETTINGS = ("protocol=fedper", "rounds=2", "participation=1", BASE)
LONE = "missing_modality.silos={silo-01: image}"


@pytest.mark.parametrize("base", ["dcmh", "shdch"])
def test_an_update_has_no_layer_of_the_branch_that_the_silo_lacks(base: str) -> None:
    objective = Objective.model_validate({"base": base, "bits": 8, "hidden": 16, "image_layers": 0})
    run = population("fedper", objective=objective)
    image_only = next(silo for silo in run.context.silos if not silo.text)
    layout, shared = run.context.layout, layers_of(run.context.layout, run.protocol.traits().shared_layers)
    assert trainable(shared, image_only) == ()
    (update,) = [each for each in run.train(image_only).payloads if isinstance(each, PartialDelta)]
    sent = shortened(update, layout, image_only)
    assert isinstance(sent, PartialDelta) and sent.names == () and sent.buffer.size == 0
    whole = completed(sent, layout, shared, image_only)
    assert isinstance(whole, PartialDelta) and whole.names == shared
    np.testing.assert_array_equal(whole.buffer, update.buffer)


@pytest.mark.slow
def test_a_silo_with_nothing_to_share_sends_no_parameters_and_the_run_is_the_same_over_the_wire(
    tiny: Path, tmp_path: Path
) -> None:
    scenario = resolved(tiny, *SETTINGS, LONE)
    outcome = threaded_run.run(scenario, tmp_path / "wire")
    assert outcome.phase is Phase.DONE and outcome.summary.messages.refused == 0
    audit = audit_run(tmp_path / "wire")
    assert not audit.findings
    assert audit.payloads.bytes["silo-01"]["partial_delta"] == 0 < audit.payloads.bytes["silo-00"]["partial_delta"]
    assert in_process_run.run(scenario, tmp_path / "inline").summary.model_digest == outcome.summary.model_digest


@pytest.mark.parametrize(
    "more",
    [
        ["privacy={clip_norm: 1.0, noise_multiplier: 0.1}"],
        ["faults=[{kind: noise, silos: [silo-01]}, {kind: sign_flip}]"],
        ["aggregation.robust.rule=norm_bound"],
        ["aggregation.robust.rule=krum"],
    ],
)
def test_an_empty_update_passes_privacy_faults_and_robust_rules(tiny: Path, tmp_path: Path, more: list[str]) -> None:
    summary = in_process_run.run(resolved(tiny, *SETTINGS, LONE, *more), tmp_path).summary.plain()
    assert summary["tasks"] == {"merged": 8, "failed": 0, "discarded": 0}
