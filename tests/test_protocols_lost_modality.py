"""State that hashing bases keep for a modality that a silo loses and regains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedmq.config.scenario import Objective
from fedmq.federation.protocol import SiloFacts, Trained
from tests.small_federation import SmallFederation, population

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
