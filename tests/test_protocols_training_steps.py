"""The objective of a silo's training step, term by term: its update against gradients of the papers' formulas.

Each silo takes one plain gradient step of rate 1 on all of its items, so that its update is minus the gradient
of its objective. The formulas are written out here again; the golden values check each function of a method on
its own, but not the signs and weights with which a step adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, one_hot, relu, softplus

from fedmq.config.scenario import Objective, Training
from fedmq.federation.protocol import Local, Task, Trained, take
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import ClassPrototypes, Delta, DiscriminatorDelta, Memory, Model, Representations
from protocols import fedhap
from protocols.creamfl import LAST
from protocols.parts import centroids, training
from protocols.parts.losses import info_nce
from protocols.parts.personal_model import OWN
from tests.gradients import gradient_of
from tests.replies import payload_of
from tests.small_federation import SmallFederation, population, share

BITS = 8
SIZES = (11, 9)
LEVELS = ("coarse:x", "coarse:y", "fine:a", "fine:b", "fine:c")


def started(name: str, options: Mapping[str, Any] | None = None, *, epochs: int = 1, **changes: Any) -> SmallFederation:
    """Two paired silos with one caption per item, where a task is one step per epoch."""
    training = Training(
        optimizer="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0, batch_size=64, local_epochs=epochs
    )
    run = population(name, options, kinds=((True, True),) * 2, sizes=SIZES, training=training, **changes)
    run.shares = {silo.index: share(silo, size, 1) for silo, size in zip(run.context.silos, SIZES, strict=True)}
    return run


def enlarge(run: SmallFederation, factor: float) -> None:
    """DCMH's and SHDCH's first outputs are so small that tanh does not bend them."""
    run.state = replace(run.state, theta=run.state.theta * factor)


def task_of(run: SmallFederation) -> Task:
    payloads = run.protocol.task(run.state, run.context.silos[0])
    return Task(run.version + 1, run.version, run.version, 1.0, payloads)


def trained(run: SmallFederation, state: Mapping[str, Tensor] | None = None) -> Trained:
    """Result of the first silo's task at rate 1; personal state is as given and unchanged."""
    local = Local(run.context.silos[0], run.shares[0], run.model, dict(state or {}))
    return run.protocol.train(local, task_of(run))


def update(run: SmallFederation, state: Mapping[str, Tensor] | None = None) -> Tensor:
    return torch.from_numpy(take(trained(run, state).payloads, Delta).buffer.copy())


def downloaded(run: SmallFederation) -> Tensor:
    return torch.from_numpy(take(task_of(run).payloads, Model).buffer.copy())


def outs(run: SmallFederation, theta: Tensor) -> list[Out]:
    """Outputs of a model on the first silo's images and captions, with gradients."""
    run.model.load(theta)
    run.model.zero_grad()
    held = run.shares[0]
    assert held.image is not None
    assert held.text is not None
    return [run.model.outputs("image", held.image), run.model.outputs("text", held.text[:, 0])]


def descent(run: SmallFederation, loss: Tensor) -> Tensor:
    """Negative gradient at the model's parameters."""
    loss.backward()  # type: ignore[no-untyped-call]
    return -gradient_of(run.model)


def assert_same(run: SmallFederation, found: Tensor, wanted: Tensor, tolerance: float = 1e-3) -> None:
    """Assert that both agree in each branch and are nonzero there."""
    for name in ("image", "text"):
        part = run.model.branch(name)
        assert float(wanted[part].norm()) > 1e-3, name
        assert float((found - wanted)[part].norm()) < tolerance * float(wanted[part].norm()), name


def labels_of(run: SmallFederation) -> Tensor:
    labels = run.shares[0].labels
    assert labels is not None
    return labels.float()


# ------------------------------------------------------------------------------------------------- FedHAP
HAP = Objective.model_validate(
    {"base": "triplet", "bits": BITS, "hidden": 16, "mining": "all", "reduce": "mean", "mu": 0.3}
)


def all_triplets(anchors: Tensor, candidates: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Mean of max(d+ - d- + 1/2, 0) over all triplets, with d = 1 - cos (eqs 2 and 3)."""
    apart = 1 - cosine_similarity(anchors[:, None], candidates[None], dim=-1)
    lost = relu(apart[:, :, None] - apart[:, None, :] + 0.5)
    return lost[positive[:, :, None] & negative[:, None, :]].mean()


def judged(theta: Tensor, codes: Tensor, labels: Tensor) -> Tensor:
    """D(code | label vector): two layers, the logistic function."""
    hidden, inputs = 128, BITS + labels.shape[1]
    w1, b1, w2, b2 = torch.split(theta, [hidden * inputs, hidden, hidden, 1])
    found: Tensor = relu(torch.cat([codes, labels], 1) @ w1.view(hidden, inputs).T + b1) @ w2 + b2
    return found.sigmoid()


@pytest.mark.parametrize(
    "switches",
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["fedhap-1", "fedhap-3", "fedhap-2", "fedhap"],
)
def test_a_fedhap_silo_descends_both_triplets_mu_quantisation_and_lambda_adversarial(
    switches: tuple[bool, bool],
) -> None:
    globally, fooled = switches
    options = {"proto_triplet": globally, "discriminator": fooled, "lambda_d": 0.7}
    run = started("fedhap", options, objective=HAP)
    run.round()
    given = trained(run)
    image, text = outs(run, downloaded(run))
    codes, labels = torch.cat([image.code, text.code]), labels_of(run).repeat(2, 1)
    alike = labels @ labels.T > 0
    loss = all_triplets(codes, codes, alike & ~torch.eye(len(codes), dtype=torch.bool), ~alike)
    loss = loss + 0.3 * (codes - codes.detach().sign()).square().sum(1).mean()
    if globally or fooled:
        received = take(task_of(run).payloads, ClassPrototypes)
        valid = torch.from_numpy(received.counts.copy()) > 0
        prototypes = torch.from_numpy(received.prototypes.copy())
    if globally:
        loss = loss + all_triplets(codes, prototypes, (labels > 0) & valid, (labels == 0) & valid)
    if fooled:
        signs = codes.detach().sign() + codes - codes.detach()
        drawn = fedhap.initial_discriminator(fedhap.discriminator_layout(BITS, labels.shape[1], 128), run.context.seed)
        start = drawn + torch.from_numpy(take(task_of(run).payloads, DiscriminatorDelta).buffer.copy())
        moved = torch.from_numpy(take(given.payloads, DiscriminatorDelta).buffer.copy())
        start.requires_grad_()
        real = judged(start, prototypes[valid], torch.eye(len(valid))[valid])
        lost = -(1 - judged(start, signs.detach(), labels)).log().mean() - real.log().mean()
        (gradient,) = torch.autograd.grad(lost, start)
        torch.testing.assert_close(moved, -gradient, rtol=1e-3, atol=1e-5)  # eq 8: its own step comes first
        loss = loss - 0.7 * judged(start.detach() + moved, signs, labels).log().mean()
    assert_same(run, torch.from_numpy(take(given.payloads, Delta).buffer.copy()), descent(run, loss))


# ------------------------------------------------------------------------------------------------- FedCAFE
OFF = {"loss_e": False, "loss_c": False, "loss_d": False}


def cafe(options: Mapping[str, Any]) -> SmallFederation:
    run = started("fedcafe", options)
    enlarge(run, 30.0)
    run.round()
    run.personal = {}
    return run


def enhanced(out: Out, memory: Tensor) -> Tensor:
    """V_E = O + tanh(O) V_P with V_P = L' P_g (eqs 3 and 4)."""
    assert out.logits is not None
    return out.code + out.code.tanh() * (out.logits.softmax(1) @ memory)


@pytest.mark.parametrize(("term", "weight"), [("e", "alpha"), ("c", "eta"), ("d", "gamma")])
def test_a_fedcafe_silo_descends_each_of_its_terms_with_its_weight(term: str, weight: str) -> None:
    run, bare = cafe({**OFF, f"loss_{term}": True, weight: 6.0}), cafe(OFF)
    bare.state = run.state
    memory = torch.from_numpy(take(task_of(run).payloads, Memory).centroids.copy())
    assert memory.any()
    found = update(run) - update(bare)
    both, labels = outs(run, downloaded(run)), labels_of(run)
    references = [enhanced(out, memory).detach() for out in both]
    total = torch.zeros(())
    for out in both:
        own = enhanced(out, memory)
        match term:
            case "e":
                total = total + (1 - cosine_similarity(own, out.code)).mean()
            case "c":
                total = total + sum(0.5 * (1 - cosine_similarity(own, each)).mean() for each in references)
            case "d":
                assert out.logits is not None
                total = total - (labels * out.logits.log_softmax(1)).sum(1).mean()
    assert_same(run, found, descent(run, 6.0 * total))


def test_fedcafe_weights_each_update_by_its_memorys_share_of_the_distances_to_the_global_memory() -> None:
    run = cafe({})
    replies = [run.reply(silo, run.train(silo, 0.5)) for silo in run.context.silos]
    after = run.protocol.merge(run.state, replies, run.version).state
    common, filled = after.tensors["memory"].double(), after.tensors["memory_support"] > 0
    differences = []
    for reply in replies:
        own = payload_of(reply, Memory)
        present = torch.from_numpy(own.support.copy()) > 0
        theta = 0.5 * torch.from_numpy(own.centroids.copy()).double() @ common.T
        unlike = (softplus(theta) - torch.eye(len(common)) * theta)[present][:, filled]  # eq 9, large is far
        differences.append(unlike.mean())
    shares = torch.stack(differences) / sum(differences)
    assert float(shares.max() - shares.min()) > 1e-3
    deltas = torch.stack([torch.from_numpy(payload_of(reply, Delta).buffer.copy()) for reply in replies])
    assert_same(run, after.theta - run.state.theta, (shares.float() @ deltas), tolerance=1e-4)


# ------------------------------------------------------------------------------------------------- DCMH, SHDCH
def test_a_dcmh_silo_descends_the_likelihood_of_its_pairs_across_modalities() -> None:
    objective = Objective.model_validate({"base": "dcmh", "bits": BITS, "hidden": 16, "gamma": 0.5, "eta": 0.25})
    run = started("fedavg", objective=objective)
    enlarge(run, 30.0)
    found = update(run)
    image, text = (out.code for out in outs(run, downloaded(run)))
    similar = (labels_of(run) @ labels_of(run).T > 0).float()
    codes = (image + text).detach().sign()
    total = torch.zeros(())
    for own, other in ((image, text.detach()), (text, image.detach())):
        theta = 0.5 * own @ other.T
        total = total + (softplus(theta) - similar * theta).sum()
        total = total + 0.5 * (codes - own).square().sum() + 0.25 * own.sum(0).square().sum()
    assert_same(run, found, descent(run, total / SIZES[0] ** 2))


def test_an_shdch_silo_weights_coarse_labels_by_alpha_and_fine_ones_by_beta() -> None:
    weights = {"alpha": 0.2, "beta": 0.9, "gamma": 3.0}
    objective = Objective.model_validate({"base": "shdch", "bits": BITS, "hidden": 16, **weights})
    run = started("fedavg", objective=objective, labels=LEVELS)
    enlarge(run, 30.0)
    items = torch.arange(SIZES[0])
    coarse, fine = one_hot(items % 3 // 2, 2), one_hot(items % 3, 3)
    labels = torch.cat([coarse, fine], 1).to(torch.uint8)
    run.shares = {**run.shares, 0: replace(run.shares[0], labels=labels)}
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(0, 2, (count, BITS), generator=generator).float() * 2 - 1 for count in (2, 3))
    found = update(run, {"base.codes.0": first, "base.codes.1": second})
    both = [out.raw.tanh() for out in outs(run, downloaded(run))]
    codes = torch.stack(both).sum(0).detach().sign()
    total = torch.zeros(())
    for own in both:
        total = total + 0.2 * (BITS * coarse - own @ first.T).square().sum()
        total = total + 0.9 * (BITS * fine - own @ second.T).square().sum()
        total = total + 3.0 * (codes - own).square().sum()
    assert_same(run, found, descent(run, total / SIZES[0] ** 2))


# ------------------------------------------------------------------------------------- FedUCH, MOON, FedProx
def contrast(own: Tensor, to: Tensor, away: Tensor, tau: float) -> Tensor:
    """Mean over the batch of -log of the positive's share of the sum of e^{cos / tau}."""
    near, far = (cosine_similarity(own, each.detach()) / tau for each in (to, away))
    return softplus(far - near).mean()


def previous_of(run: SmallFederation) -> Tensor:
    """Parameters like those of the silo's previous task."""
    theta = downloaded(run)
    return theta + 0.2 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(2))


def hidden_of(run: SmallFederation, theta: Tensor) -> list[Tensor]:
    return [out.hidden for out in outs(run, theta)]


@pytest.mark.parametrize(
    ("name", "options", "bare"),
    [("feduch", {"distill": False}, ("feduch", {"distill": False, "contrast": False})), ("moon", {}, ("fedavg", {}))],
    ids=["feduch", "moon"],
)
def test_a_silo_descends_mu_times_its_contrast_in_feduch_with_the_other_modality(
    name: str, options: Mapping[str, Any], bare: tuple[str, Mapping[str, Any]]
) -> None:
    run = started(name, {**options, "mu": 0.7, "contrast_tau": 0.4})
    previous = previous_of(run)
    found = update(run, {"own_model": previous}) - update(started(*bare))
    old, new = hidden_of(run, previous), hidden_of(run, downloaded(run))
    if name == "feduch":
        total = contrast(new[0], new[1], old[1], 0.4) + contrast(new[1], new[0], old[0], 0.4)
    else:
        total = contrast(new[0], new[0], old[0], 0.4) + contrast(new[1], new[1], old[1], 0.4)
    assert_same(run, found, descent(run, 0.7 * total))


def test_a_feduch_silo_descends_phi_times_the_distillation_from_the_global_net() -> None:
    run = started("feduch", {"contrast": False, "phi": 5.0}, epochs=2)
    bare = started("feduch", {"contrast": False, "distill": False}, epochs=2)
    first = update(started("feduch", {"contrast": False, "distill": False}))
    found = update(run) - update(bare)  # at the first step own and global codes are the same, which has no gradient
    theta = downloaded(run)
    teachers = [out.code.detach() for out in outs(run, theta)]
    total = torch.zeros(())
    for own, teacher in zip(outs(run, theta + first), teachers, strict=True):
        wanted = (teacher / 1.5).softmax(1)
        total = total + 1.5**2 * (wanted * (wanted.log() - (own.code / 1.5).log_softmax(1))).sum(1).mean()
    assert_same(run, found, descent(run, 5.0 * total), tolerance=1e-2)


def test_a_fedprox_silo_descends_half_of_mu_times_its_squared_distance_from_the_global_model() -> None:
    run, bare = started("fedprox", {"mu": 0.3}, epochs=2), started("fedavg", epochs=2)
    first = update(started("fedavg"))  # at the first step there is no distance yet
    gone = first.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(0.3 / 2 * gone.square().sum(), gone)
    assert_same(run, update(run) - update(bare), -gradient)


# ------------------------------------------------------------------------------------------------- PLFedCMH
@pytest.mark.parametrize(
    "weights", [{"beta": 0.8, "eta": 0.0}, {"beta": 0.0, "eta": 5e3}], ids=["products", "features"]
)
def test_a_plfedcmh_silo_descends_its_prototype_terms_divided_by_batch_and_items(weights: Mapping[str, float]) -> None:
    run, bare = started("plfedcmh", weights), started("plfedcmh", {"beta": 0.0, "eta": 0.0})
    enlarge(run, 30.0)
    run.round()
    bare.state, bare.version = run.state, run.version
    received = take(task_of(run).payloads, ClassPrototypes)
    assert (received.counts > 0).all()
    found = update(run) - update(bare)
    labels, total = labels_of(run), torch.zeros(())
    rows = torch.from_numpy(received.prototypes.copy()).chunk(2)
    for out, prototypes in zip(outs(run, downloaded(run)), rows, strict=True):
        total = total + weights["beta"] * (BITS * labels - out.raw.tanh() @ prototypes.T).square().sum()
        total = total + weights["eta"] * (labels @ prototypes - out.raw).square().mean()
    assert_same(run, found, descent(run, total / SIZES[0] ** 2))


# ------------------------------------------------------------------------- embeddings
PLAIN = Training(optimizer="sgd", momentum=0.0, weight_decay=0.0, batch_size=64, local_epochs=1)


@pytest.mark.parametrize("kind", [(True, False), (False, True)])
def test_a_silo_of_one_modality_steps_on_fedbridges_assignment_keeping_and_pairs(kind: tuple[bool, bool]) -> None:
    options = {
        "warmup": 0.0,
        "support": 1,
        "centroids": 3,
        "lambda_pseudo": 0.7,
        "lambda_pair": 0.4,
        "lambda_keep": 3.0,
    }
    # Keeping near the downloaded model has a gradient from the second step on.
    settings = PLAIN.model_copy(update={"local_epochs": 2})
    run = population("fedbridge", options, kinds=((True, True), kind), sizes=SIZES, training=settings)
    run.round()
    silo, rate = run.context.silos[1], 0.1
    task = Task(run.version + 1, run.version, run.version, rate, run.protocol.task(run.state, silo))
    local = Local(silo, run.shares[1], run.model, {})
    found = torch.from_numpy(take(run.protocol.train(local, task).payloads, Delta).buffer.copy())
    received = centroids.received(task.payloads, silo)
    assert received is not None
    start = torch.from_numpy(take(task.payloads, Model).buffer.copy())
    generator, counts = training.generator_of(run.context, local, task, "train"), local.dataset.captions.numpy()

    def embedded(caption: np.ndarray | None, rows: np.ndarray) -> Tensor:
        out = next(each for each in training.outputs(local, rows, caption) if each is not None)
        return out.code

    theta = start.clone()
    for _ in range(2):
        caption = other = None
        if silo.text:
            caption = (generator.random(len(counts)) * counts).astype(np.int64)
            ahead = 1 + (generator.random(len(counts)) * (counts - 1)).astype(np.int64)
            other = np.where(counts > 1, (caption + ahead) % counts, caption)
        rows = generator.permutation(len(counts))
        with torch.no_grad():
            run.model.load(start)
            teacher = embedded(caption, rows)
        run.model.load(theta)
        run.model.zero_grad()
        z = embedded(caption, rows)
        target = (teacher @ received.T / 0.05).softmax(1)
        student = (z @ received.T / 0.07).log_softmax(1)
        loss = 0.7 * (target * (target.log() - student)).sum(1).mean() + 3.0 * (1 - (z * teacher).sum(1)).mean()
        if silo.text:
            several = counts[rows] > 1
            loss = loss + 0.4 * info_nce(z[torch.from_numpy(several)], embedded(other, rows[several]), 0.07)
        theta = theta + rate * descent(run, loss)
    torch.testing.assert_close(found, theta - start, rtol=1e-3, atol=1e-6)
    assert found.abs().max() > 1e-4


@pytest.mark.parametrize("image", [True, False])
def test_a_silo_steps_on_creamfls_contrasts_with_the_global_representations(image: bool) -> None:
    run = population("creamfl_public", kinds=((image, not image), (True, True)), sizes=SIZES, training=PLAIN)
    run.round()
    silo, held, lacked = run.context.silos[0], *(("image", "text") if image else ("text", "image"))
    before, rate = run.personal[0], 0.1
    task = Task(run.version + 1, run.version, run.version, rate, run.protocol.task(run.state, silo))
    after = run.protocol.train(Local(silo, run.shares[0], run.model, dict(before)), task).state
    sent = torch.from_numpy(take(task.payloads, Representations).values.astype(np.float32)).chunk(2)
    shared = dict(zip(("image", "text"), sent, strict=True))
    public = replace(run.protocol.public.coordinator(), silo=silo, model=run.model)  # type: ignore[attr-defined]
    generator = training.generator_of(run.context, public, task, "train")
    counts = public.dataset.captions.numpy()
    caption = None if image else (generator.random(len(counts)) * counts).astype(np.int64)
    rows = generator.permutation(len(counts))
    run.model.load(before[OWN])
    run.model.zero_grad()
    z = training.outputs(public, rows, caption, (held,))[0 if image else 1]  # type: ignore[arg-type]
    assert z is not None
    across = (z.code @ shared[lacked].T / 0.5).log_softmax(1)[torch.arange(len(rows)), torch.from_numpy(rows)]
    last = before[LAST + held][rows]
    within = torch.stack([(z.code * each).sum(1) / 0.5 for each in (shared[held][rows], last)], dim=1).log_softmax(1)
    wanted = rate * descent(run, -0.5 * across.mean() - 0.5 * within[:, 0].mean())
    torch.testing.assert_close(after[OWN] - before[OWN], wanted, rtol=1e-3, atol=1e-6)
    assert wanted.abs().max() > 1e-4


def test_creamfls_coordinator_steps_on_the_public_pairs_and_the_distillation() -> None:
    rate = 0.1
    run = population(
        "creamfl_public", {"kd": 2.0, "server_rate": rate}, kinds=((True, True),), sizes=SIZES[:1], training=PLAIN
    )
    replies, before = run.replies(), run.state.theta
    after = run.protocol.merge(run.state, replies, 0).state.theta
    # Of one silo the ensemble is what it sent.
    sent = torch.from_numpy(take(replies[0].payloads, Representations).values.astype(np.float32)).chunk(2)
    own = run.protocol.public.coordinator()  # type: ignore[attr-defined]
    generator = training.generator_of(run.context, own, Task(1, 0, 0, rate, ()), "train")
    counts = own.dataset.captions.numpy()
    caption = (generator.random(len(counts)) * counts).astype(np.int64)
    rows = generator.permutation(len(counts))
    own.model.load(before)
    own.model.zero_grad()
    image, text = training.outputs(own, rows, caption)
    assert image is not None
    assert text is not None
    apart = [(out.code - each[rows]).square().mean() for out, each in zip((image, text), sent, strict=True)]
    (info_nce(image.code, text.code, 0.07) + 2.0 * torch.stack(apart).sum()).backward()  # type: ignore[no-untyped-call]
    wanted = -rate * gradient_of(own.model)
    torch.testing.assert_close(after - before, wanted, rtol=1e-3, atol=1e-6)
    assert wanted.abs().max() > 1e-4
