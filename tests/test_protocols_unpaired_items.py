"""Items that lack a modality in a silo with both: anchored by RCSR and FedBridge, ignored by the other methods."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import protocols
from fedmq.config.scenario import Training
from fedmq.federation.protocol import Local, SiloFacts, Task, take
from fedmq.wire.payloads import Delta, ModalityPrototypes, Model
from protocols.parts import prototypes, training, unpaired
from protocols.parts.losses import anchor, local_prototype
from tests.gradients import gradient_of
from tests.small_federation import SmallFederation, mixed, population

PLAIN = Training(optimizer="sgd", momentum=0.0, weight_decay=0.0, batch_size=64, local_epochs=1)
ANCHORING = [name for name in protocols.names() if population(name).protocol.traits().unpaired == "anchored"]


def task_of(run: SmallFederation, silo: SiloFacts, learning_rate: float = 1e-2) -> Task:
    return Task(run.version + 1, run.version, run.version, learning_rate, run.protocol.task(run.state, silo))


def delta_of(run: SmallFederation, local: Local, task: Task) -> torch.Tensor:
    return torch.from_numpy(take(run.protocol.train(local, task).payloads, Delta).buffer.copy())


def test_rcsr_and_fedbridge_anchor_unpaired_items_and_the_other_methods_ignore_them() -> None:
    assert ANCHORING == ["fedbridge", "rcsr"]


@pytest.mark.parametrize("modality", ["image", "text"])
def test_an_anchored_item_steps_on_the_cosine_to_the_prototype_of_the_modality_it_lacks(modality: str) -> None:
    """One batch of a kind: theta moves by -rate times the gradient of lambda_anc (1 - mean cos(z, p))."""
    options = {"lambda_anc": 0.7, "client_align": False, "lambda_s": 0.0}
    run = population("rcsr", options, kinds=((True, True),), sizes=[6], training=PLAIN)
    run.round()
    silo, rate = run.context.silos[0], 0.1
    only_image = modality == "image"
    pairs, alone = mixed(silo, 1, 5 * only_image, 5 * (not only_image))  # a single pair has no contrast: only anchors
    task = task_of(run, silo, rate)
    local = Local(silo, pairs, run.model, {}, alone)
    found = delta_of(run, local, task)
    theta = torch.from_numpy(take(task.payloads, Model).buffer.copy())
    sent = take(task.payloads, ModalityPrototypes)
    missing = torch.from_numpy((sent.text if only_image else sent.image).copy())

    run.model.load(theta.numpy())
    (view,) = unpaired.views(local)
    generator = training.generator_of(run.context, local, task, f"unpaired {modality}")
    caption = training.choose_captions(view, generator)
    rows = generator.permutation(5)
    run.model.zero_grad()
    out = next(each for each in training.outputs(view, rows, caption) if each is not None)
    z = out.code
    loss = 0.7 * (1 - torch.stack([row @ missing / row.norm() / missing.norm() for row in z]).mean())
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(loss.detach(), 0.7 * anchor(z, missing).detach(), atol=1e-6)
    expected = -rate * gradient_of(run.model)
    assert torch.allclose(found, expected, atol=1e-6)
    other = run.model.branch("text" if only_image else "image")
    assert not found[other].any()


@pytest.mark.parametrize("name", ANCHORING)
def test_pairs_have_the_same_batches_and_captions_whatever_else_the_silo_holds(name: str) -> None:
    run = population(name, kinds=((True, True),) * 2, sizes=[20, 9])
    silo = replace(run.context.silos[0], image_only=7, text_only=5)
    pairs, alone = mixed(silo, 20, 7, 5)
    for _ in range(3):  # FedBridge's warm-up
        run.round()
    seen: list[list[tuple[np.ndarray, np.ndarray | None]]] = []
    for items in ((), alone):
        local, task = Local(silo, pairs, run.model, {}, items), task_of(run, silo)
        training.load_model(local, take(task.payloads, Model).buffer)
        work, generator = work_of(run, local, task), training.generator_of(run.context, local, task, "train")
        steps = [step for epoch in range(2) for step in work.steps(epoch, generator)]
        seen.append([(step.rows, step.caption) for step in steps if step.items is None])
        assert {step.trains for step in steps if step.items is not None} <= {("image", "shared"), ("text", "shared")}
        assert sum(len(step.rows) for step in steps) == 2 * local.samples
    assert len(seen[0]) == len(seen[1]) > 0
    for (rows, caption), (others, other_caption) in zip(*seen, strict=True):
        assert np.array_equal(rows, others)
        assert caption is not None
        assert np.array_equal(caption, other_caption)


def work_of(run: SmallFederation, local: Local, task: Task) -> training.Work:
    """The work that a method hands to the local epochs."""
    found: list[training.Work | None] = []
    before = training.train_epochs

    def caught(*arguments: object, **more: object) -> training.TrainingResult:
        found.append(arguments[4])  # type: ignore[arg-type]
        return before(*arguments[:4], None)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train_epochs", caught)
        run.protocol.train(local, task)
    (work,) = found
    assert work is not None
    return work


def test_a_prototype_includes_the_items_that_have_only_this_modality() -> None:
    run = population("rcsr", kinds=((True, True),), sizes=[4])
    silo = run.context.silos[0]
    pairs, alone = mixed(silo, 4, 3, 2)
    local, task = Local(silo, pairs, run.model, {}, alone), task_of(run, silo)
    image, _ = prototypes.silo_prototypes(local, run.context, task)
    assert image is not None
    images = torch.cat([each.image for each in (pairs, *alone) if each.image is not None])
    with torch.no_grad():
        expected = local_prototype(run.model.image(images))
    assert torch.allclose(image, expected, atol=1e-6)


@pytest.mark.parametrize("name", ANCHORING)
def test_three_rounds_over_silos_with_unpaired_items_stay_finite_and_use_them(name: str) -> None:
    run = population(name, {"warmup": 0} if name == "rcsr" else {"warmup": 0.0, "support": 1}, sizes=[11, 9, 7, 5])
    silos = tuple(replace(silo, image_only=4, text_only=3) if silo.paired else silo for silo in run.context.silos)
    parts = {silo.index: mixed(silo, 5, 4, 3) for silo in silos if silo.paired}
    for version in range(3):
        replies = []
        for silo in silos:
            data, alone = parts.get(silo.index, (run.shares[silo.index], ()))
            task = task_of(run, silo)
            local = Local(silo, data, run.model, run.personal.get(silo.index, {}), alone)
            trained = run.protocol.train(local, task)
            run.protocol.check(trained.payloads)
            run.personal[silo.index] = trained.state
            assert take(trained.payloads, Delta).n_samples == local.samples
            replies.append(run.reply(silo, trained))
        run.state, run.version = run.protocol.merge(run.state, replies, version).state, version + 1
    assert torch.isfinite(run.state.theta).all()
    silo = silos[0]
    task, (data, alone) = task_of(run, silo), parts[0]
    without = delta_of(run, Local(silo, data, run.model, {}), task)
    assert not torch.equal(delta_of(run, Local(silo, data, run.model, {}, alone), task), without)
