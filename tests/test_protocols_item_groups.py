"""Differential privacy of single items: clipped gradients of groups, noise in local steps, and epsilon."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant

import protocols
from fedmq.config.privacy import ItemNoise
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.federation.noise import item_epsilon
from fedmq.federation.protocol import Local, SiloFacts, Task, protects_items, why_no_items
from fedmq.models.hash_networks import towers_with
from fedmq.storage.run_folder import RunFolder
from protocols.parts import item_groups, training
from protocols.parts.losses import info_nce
from tests import in_process_run, threaded_run
from tests.small_federation import SmallFederation, population
from tests.threaded_run import resolved

TASK = Task(3, 2, 2, 1e-3, ())
NORM = 0.05
Groups = item_groups.GroupedBatches


def federation(items: ItemNoise, size: int = 40) -> SmallFederation:
    found = population("fedavg", kinds=[(True, True), (True, False)], sizes=[size, size])
    found.context = replace(found.context, items=items)
    return found


def work(found: SmallFederation, silo: int = 0, secret: bytes | None = None) -> Groups:
    """The work of a paired silo, or of one with images that is anchored to a prototype."""
    facts, whole = found.context.silos[silo], found.shares[silo]
    local = Local(facts, whole, found.model, {}, secret=secret)
    prototype = torch.nn.functional.normalize(torch.ones(found.context.dim), dim=0)

    def loss(image: torch.Tensor | None, text: torch.Tensor | None) -> torch.Tensor:
        assert image is not None
        return 1 - (image @ prototype.to(image)).mean() if text is None else info_nce(image, text, 0.07)

    plain = training.EveryBatch(local, 8, loss, least=1 + facts.paired)
    made = item_groups.protected(plain, local, found.context, TASK)
    assert isinstance(made, Groups)
    return made


def clipped(made: Groups, rows: Sequence[np.ndarray]) -> torch.Tensor:
    """The sum of clipped gradients [P] of some groups."""
    caption = np.zeros(len(made.local.dataset), np.int64)
    step = training.Step(np.concatenate(rows), caption, made._loss)
    return item_groups.clipped_sum(made.local, step, rows, None, NORM)[1]


@pytest.mark.parametrize(("silo", "group"), [(0, 3), (1, 1), (1, 4)])
def test_the_sum_is_that_of_independently_clipped_gradients(silo: int, group: int) -> None:
    """Of anchored items one by one it is the sum of DP-SGD (Abadi et al. 2016, algorithm 1)."""
    made = work(federation(ItemNoise(group=group, clip_norm=NORM)), silo)
    model, items = made.local.model, made.local.dataset
    assert sorted(np.concatenate(made.groups)) == list(range(40)), "each item is in one group"
    assert {len(rows) for rows in made.groups} <= {group, group + 1, 40 % group}
    expected = torch.zeros(model.flat.numel(), dtype=torch.float64)
    for rows in made.groups:
        index = torch.from_numpy(rows)
        assert items.image is not None
        captions = None if items.text is None else model.caption(items.text[index, torch.zeros_like(index)])
        loss, parameters = made.loss(model.image(items.image[index]), captions), model.within([slice(0, len(expected))])
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        flat = torch.cat([each.double().flatten() for each in gradients])
        expected += flat * min(1.0, NORM / float(flat.norm()))
    found = clipped(made, made.groups)
    assert float(expected.norm()) > NORM
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_another_item_moves_the_sum_by_no_more_than_twice_the_norm() -> None:
    found = federation(ItemNoise(group=4, clip_norm=NORM))
    before, largest = clipped(work(found), work(found).groups), 0.0
    for item in range(8):
        images = found.shares[0].image
        assert images is not None
        changed = images.clone()
        changed[item] = -50 * changed[item].flip(0)
        other = replace(found, shares={0: replace(found.shares[0], image=changed)})
        made = work(other)
        assert all(map(np.array_equal, made.groups, work(found).groups))
        largest = max(largest, float((clipped(made, made.groups) - before).norm()))
    assert NORM / 2 < largest <= 2 * NORM * (1 + 1e-5)
    broken = found.shares[0].image
    assert broken is not None
    broken[0] = torch.nan
    assert clipped(work(found), work(found).groups).isfinite().all(), "a gradient that is not finite adds nothing"


def test_each_group_is_in_a_step_with_the_same_probability_and_the_noise_has_its_deviation() -> None:
    options = ItemNoise(group=2, clip_norm=NORM, noise_multiplier=3.0)
    for secret in (None, bytes(range(32))):
        found = federation(options)
        found.context = replace(found.context, training=found.context.training.model_copy(update={"local_epochs": 60}))
        made, taken, noise = work(found, secret=secret), np.zeros(20), list[torch.Tensor]()
        plain = replace(made, context=replace(made.context, items=ItemNoise(group=2, clip_norm=NORM)))
        generator = np.random.default_rng(0)
        with towers_with(found.model, noise=None):
            for epoch in range(60):
                for step, other in zip(made.steps(epoch, generator), plain.steps(epoch, generator), strict=True):
                    assert np.array_equal(step.rows, other.rows)
                    taken += np.isin([rows[0] for rows in made.groups], step.rows)
                    if epoch < 3:
                        gradients = []
                        for each in (step, other):
                            assert each.backward is not None
                            each.backward(replace(each, caption=np.zeros(40, np.int64)), None)
                            parts = found.model.within([slice(0, found.model.flat.numel())])
                            gradients.append(
                                torch.cat([part.grad.flatten() for part in parts if part.grad is not None])
                            )
                        noise.append(gradients[0] - gradients[1])
        assert made.batches == 5 and len(made.groups) == 20
        rate = 8 / 40
        assert taken.sum() / (300 * 20) == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / 6000))
        assert taken.min() > 30, "every group has its turn"
        drawn = torch.cat(noise)
        deviation = 3.0 * NORM / (rate * 20)
        assert float(drawn.std()) == pytest.approx(deviation, rel=5 / math.sqrt(2 * len(drawn)))
        assert abs(float(drawn.mean())) < 5 * deviation / math.sqrt(len(drawn))


def test_draws_repeat_for_a_repeated_task_and_a_secret_gives_other_ones() -> None:
    def delta(secret: bytes | None, norm: float = NORM) -> torch.Tensor:
        found = federation(ItemNoise(group=4, clip_norm=norm, noise_multiplier=1.0))
        base = found.model.flat.detach().clone()
        made = work(found, secret=secret)
        return training.train_epochs(made.local, found.context, TASK, base, made).delta

    one, two = bytes(range(32)), bytes(range(1, 33))
    for secret in (None, one):
        assert torch.equal(delta(secret), delta(secret))
    assert not torch.equal(delta(None), delta(one)) and not torch.equal(delta(two), delta(one))


def of(tiny: Path, *settings: str, noise: float = 1.0) -> Scenario:
    items = f"privacy={{items: {{group: 4, clip_norm: 0.1, noise_multiplier: {noise}}}}}"
    return resolved(tiny, "protocol={name: fedavg}", items, *settings)


def test_epsilon_is_dp_accountings_for_the_same_events(tiny: Path) -> None:
    batch = ("training.batch_size=30", "training.local_epochs=2")
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.3, gaussian(12.0)), 3 * 2 * 4)
    accountant.compose(gaussian(15.0), 3)
    found = item_epsilon(of(tiny, *batch, noise=12.0), 100, 3, 3 * 15.0**-2, 1e-5)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


def test_epsilon_is_that_of_a_replaced_item(tiny: Path) -> None:
    """By hand: without sampling a Gaussian of sensitivity 2 C; of one sampled step the divergence of two mixtures."""
    whole = item_epsilon(of(tiny, "training.batch_size=100", noise=2.0), 100, 5, 0.0, 1e-5)
    assert whole == pytest.approx(dp_accounting.get_epsilon_gaussian(2.0 / 2 / math.sqrt(5), 1e-5), rel=1e-3)
    x = np.linspace(-20, 20, 400_001)

    def density(mean: float, rate: float, z: float) -> np.ndarray:
        parts = [np.exp(-((x - each) ** 2) / (2 * z**2)) / (z * math.sqrt(2 * math.pi)) for each in (0, mean)]
        return np.asarray((1 - rate) * parts[0] + rate * parts[1])

    # One epoch of 100 items in batches of 60: two steps, each with probability 0.6; of two draws the sum is convolved.
    scenario = of(tiny, "training.batch_size=60", "training.local_epochs=1", noise=0.8)
    epsilon, width = item_epsilon(scenario, 100, 1, 0.0, 1e-3), x[1] - x[0]
    upper, lower = (density(mean, 0.6, 0.8)[::200] for mean in (1, -1))
    both = np.maximum(0, np.outer(upper, upper) - math.exp(epsilon) * np.outer(lower, lower)).sum() * (200 * width) ** 2
    assert both == pytest.approx(1e-3, rel=1e-2)


METHODS = {"central", "fedavg", "fednova", "fedopt", "fedprox", "matched_control", "paired_only", "rcsr"}


def test_only_methods_whose_steps_follow_from_groups_are_allowed() -> None:
    assert {name for name in protocols.names() if protects_items(protocols.load(name))} == METHODS

    class Subclass(protocols.load("fedavg")):  # type: ignore[misc] # a user's method
        def extra_loss(self, local: Local, task: Task) -> training.Extra | None:
            return None

    assert not protects_items(Subclass)
    unpaired = population("rcsr", kinds=[(True, True)])
    silo = SiloFacts("silo-00", 0, True, True, image_only=3)
    unpaired.protocol.context = replace(unpaired.context, silos=(silo,))
    assert "without a pair" in why_no_items(unpaired.protocol)


def test_what_local_steps_cannot_protect_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    for settings, words in (
        (
            ("protocol=moon",),
            r"privacy\.items: found 'with moon: its local training is more than steps .*a method of .*rc",
        ),
        (
            ("protocol={name: rcsr, personal: fixed}",),
            "its personal models are trained without noise.*allowed: null, or rcsr without that$",
        ),
        (("objective={base: dcmh, bits: 8}",), r"with fedavg: the loss of objective\.base dcmh has no groups"),
        (("privacy.items.group=1",), r"privacy\.items\.group: found 1, allowed: 2 or more: info_nce contrasts"),
        (("faults=[{kind: drift, silos: [silo-00], rounds: [1, 2]}]",), "not drift"),
    ):
        with pytest.raises(InputError, match=words):
            in_process_run.run(of(tiny, *settings), tmp_path)


def test_a_run_reports_the_epsilon_of_its_items_and_what_it_does_not_cover(tiny: Path, tmp_path: Path) -> None:
    noise = "privacy.statistics={loss: {clip_norm: 5, noise_multiplier: 4}}"
    scenario = of(tiny, "missing_modality={}", "participation=1.0", noise)
    summary = in_process_run.run(scenario, tmp_path).summary
    assert summary is not None and summary.item_privacy is not None and summary.privacy is not None
    samples = {silo.samples for silo in summary.per_silo.values()}
    expected = max(item_epsilon(scenario, n, scenario.rounds, scenario.rounds / 16, 1e-5) for n in samples)
    assert summary.item_privacy.epsilon == pytest.approx(expected)
    assert summary.item_privacy.without_noise == ["modality_prototypes"]
    assert summary.privacy.without_noise == ["delta", "modality_prototypes"], "an update has no noise of a whole silo"


def test_a_stopped_run_with_noise_from_keys_is_resumed_with_the_same_draws(tiny: Path, tmp_path: Path) -> None:
    """The same keys and tasks give the same groups and noise; other keys give others."""
    scenario = of(tiny, "participation=1.0", "missing_modality={}", "privacy.noise_from=key", "rounds=3")
    whole, stopped, others = (tmp_path / name for name in ("whole", "stopped", "others"))
    expected = threaded_run.run(scenario, whole).summary
    shutil.copytree(whole / "keys", stopped / "keys")
    merged = RunFolder(stopped).checkpoints / "version-000001"
    assert threaded_run.run(scenario, stopped, stop_wanted=merged.exists).summary is None
    resumed = threaded_run.run(scenario, stopped, resume=True).summary
    other = threaded_run.run(scenario, others).summary
    assert expected is not None and resumed is not None and other is not None
    assert resumed.model_digest == expected.model_digest != other.model_digest
