"""The constants of methods in use: one step or one merge against the formula written out.

Equations have golden values; these tests check the inputs of a method to them. A silo here has one caption per item and
fits into one batch, so that a task's loss is that of its first step, at the downloaded model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from fedmq.config.scenario import Training
from fedmq.federation.protocol import Local, State, Update, take
from fedmq.seeds import torch_generator
from fedmq.wire.payloads import ClassPrototypes, ModalityPrototypes, Representations, RouterStatistics
from protocols import creamfl_public
from protocols.parts import class_prototypes, personal_adapter, prototypes
from protocols.parts.losses import info_nce
from tests.replies import payload_of, weights_of, with_payload
from tests.small_federation import DIM, SmallFederation, population

PAIRED = ((True, True),) * 4
SAMPLES = torch.tensor([11, 9, 7, 5], dtype=torch.float64)
FAR = 0.5  # a learning rate at which one step of SGD has an effect


def steps(count: int) -> Training:
    return Training(batch_size=64, local_epochs=count, optimizer="sgd", momentum=0.0, weight_decay=0.0)


def plain(name: str, options: Mapping[str, Any] | None = None, count: int = 1, **more: Any) -> SmallFederation:
    run = population(name, options, training=steps(count), **more)
    run.shares = {
        index: dataclasses.replace(share, captions=torch.ones_like(share.captions))
        for index, share in run.shares.items()
    }
    return run


def at(run: SmallFederation, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings of the first silo's pairs by a model, [n, d] each."""
    share = run.shares[0]
    assert share.image is not None
    assert share.text is not None
    run.model.load(theta)
    with torch.no_grad():
        return run.model.image(share.image), run.model.caption(share.text[:, 0])


def added(run: SmallFederation, off: Mapping[str, Any], name: str) -> float:
    """The term that a method adds to the first silo's loss at the run's current state."""
    without = plain(name, off)
    without.state, without.version, without.personal = run.state, run.version, dict(run.personal)
    silo = run.context.silos[0]
    return run.train(silo).loss - without.train(silo).loss


# ------------------------------------------------------------------------------------------------- silos
@pytest.mark.parametrize(
    ("name", "off", "on", "weight"),
    [("fedprox", {"mu": 0.0}, {"mu": 3.0}, 1.5), ("rcsr", {"lambda_s": 0.0}, {"lambda_s": 3.0}, 3.0)],
    ids=["FedProx halves mu", "RCSR does not halve lambda_s"],
)
def test_the_proximal_term_of_a_second_step(
    name: str, off: dict[str, float], on: dict[str, float], weight: float
) -> None:
    once, without, within = plain(name, off), plain(name, off, 2), plain(name, on, 2)
    silo = once.context.silos[0]
    once.train(silo, FAR)
    drift = once.model.flat.detach() - once.state.theta
    found = 2 * (within.train(silo, FAR).loss - without.train(silo, FAR).loss)  # a mean over two steps
    assert found > 1e-2
    assert found == pytest.approx(weight * float(drift.square().sum()), rel=1e-3)


def test_fedmekt_distils_with_weight_one_half() -> None:
    once, without, within = plain("fedavg"), plain("fedavg", count=2), plain("fedmekt", count=2)
    silo = once.context.silos[0]
    once.train(silo, FAR)
    ended = once.model.flat.detach().clone()
    found = 2 * (within.train(silo, FAR).loss - without.train(silo, FAR).loss)
    expected = 0.0
    for teacher, student in zip(at(once, once.state.theta), at(once, ended), strict=True):
        wanted, given = ((DIM**0.5 / 3 * normalize(z, dim=1)).softmax(1) for z in (teacher, student))
        expected += 0.5 * 9 * float((wanted * (wanted / given).log()).sum(1).mean())
    assert found > 1e-4
    assert found == pytest.approx(expected, rel=1e-2)


def test_creamfls_terms_use_rcsrs_weights_and_temperature() -> None:
    run = plain("creamfl")
    run.round()
    state, rows = run.personal[0], torch.arange(len(run.shares[0]))
    codes = dict(zip(("image", "text"), at(run, run.state.theta), strict=True))
    bank = {name: 0.9 * state[f"creamfl_bank_{name}"] + 0.1 * z for name, z in codes.items()}
    expected = 0.0
    for name, other in (("image", "text"), ("text", "image")):
        z, last = codes[name], state[f"creamfl_last_{name}"]
        within = torch.stack([(z * bank[name]).sum(1), (z * last).sum(1)], dim=1) / 0.07
        expected += 0.5 * float(cross_entropy(z @ bank[other].T / 0.07, rows))
        expected += 0.5 / 2 * float(cross_entropy(within, torch.zeros_like(rows)))
        expected += 0.3 * float((z - bank[name]).square().mean())
    found = added(run, {"inter": 0.0, "intra": 0.0, "kd": 0.0}, "creamfl")
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("term", ["cmpr", "cmpc", "other", "cma"])
def test_mfcpls_terms_use_the_complete_or_the_other_modalitys_prototypes(term: str) -> None:
    off = {"cmpr": 0.0, "cmpc": 0.0, "cma": 0.0}
    run = plain("mfcpl", {**off, "cmpc": 1.0, "contrast": "other"} if term == "other" else {**off, term: 1.0})
    run.round()
    shared = run.state.tensors[class_prototypes.GLOBAL].chunk(2)
    valid = run.state.tensors[class_prototypes.VALID].chunk(2)[0]
    labels = run.shares[0].labels
    assert labels is not None
    members = labels[:, valid].argmax(1)
    image, text = (each[valid] for each in shared)
    assert not torch.allclose(image, text, atol=0.1)
    codes = at(run, run.state.theta)
    match term:
        case "cmpr":
            complete = ((image + text) / 2)[members]
            expected = float(((codes[0] + codes[1]) / 2 - complete).square().sum(1).mean())
        case "cmpc" | "other":
            targets = (text, image) if term == "other" else 2 * ((image + text) / 2,)
            scores = [z @ normalize(other, dim=1).T / 0.5 for z, other in zip(codes, targets, strict=True)]
            expected = sum(float(cross_entropy(each, members)) for each in scores)
        case _:
            expected = float(1 - (codes[0] * codes[1]).sum(1).mean())
    assert added(run, off, "mfcpl") == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------------------------- RCSR-p
def adapted(z: Tensor, adapter: Tensor, strength: float) -> Tensor:
    change = torch.nn.functional.gelu(z @ adapter[0].T) @ adapter[1]
    return normalize(z + strength * change, dim=1)


def told(state: State, run: SmallFederation) -> list[float | None]:
    return [take(run.protocol.task(state, silo), RouterStatistics).weight for silo in run.context.silos]


def test_an_adapter_is_fitted_at_a_tenth_of_the_rate_and_at_the_silos_strength() -> None:
    run = plain("rcsr", {"personal": "router", "personal_onset": 0, "personal_hidden": 3})
    silo = run.context.silos[0]
    assert told(run.state, run)[0] == 0.25
    run.train(silo, FAR)
    begun = personal_adapter.initial(DIM, 3, torch_generator(0, "personal", silo.name))
    leaf = begun.clone().requires_grad_()
    pair = (adapted(z, leaf, 0.2 * 1.25) for z in at(run, run.model.flat.detach().clone()))
    (gradient,) = torch.autograd.grad(info_nce(*pair, 0.07), leaf)
    moved = run.personal[0][personal_adapter.STATE] - begun
    assert float(moved.norm()) > 1e-4
    torch.testing.assert_close(moved, -0.1 * FAR * gradient, rtol=2e-2, atol=2e-7)


def test_a_silo_is_evaluated_with_its_adapter_at_its_strength() -> None:
    run = plain("rcsr", {"personal": "router", "personal_onset": 0, "personal_hidden": 3})
    silo, share = run.context.silos[0], run.shares[0]
    adapter = torch.randn(2, 3, DIM, generator=torch.Generator().manual_seed(0))
    protocol: Any = run.protocol
    payloads = protocol.task(run.state, silo)
    own = protocol.encoders(Local(silo, share, run.model, {personal_adapter.STATE: adapter}), payloads)
    with torch.no_grad():
        found = own.image(share.image), own.caption(share.text[:, 0])  # type: ignore[index]
    for z, each in zip(at(run, run.state.theta), found, strict=True):
        torch.testing.assert_close(each, adapted(z, adapter, 0.2 * 1.25))


# ------------------------------------------------------------------------------------------------- coordinator
@pytest.mark.parametrize("masked", [True, False])
def test_fillers_enter_the_moving_average_unless_masked(masked: bool) -> None:
    run = plain("rcsr", {"router": "uniform", "minimax": False, "masked_ema": masked})
    run.round()
    before, generator = run.state.tensors[prototypes.PROTOTYPES], torch.Generator().manual_seed(0)
    replies = []
    for reply in run.replies():
        image, text = normalize(torch.randn(2, DIM, generator=generator), dim=1).numpy()
        sent = dataclasses.replace(payload_of(reply, ModalityPrototypes), image=image, text=text)
        replies.append(with_payload(reply, sent))
    rows, mask = prototypes.read_uploads(replies, DIM)
    after = run.protocol.merge(run.state, replies, 1).state.tensors[prototypes.PROTOTYPES]
    for modality in (0, 1):
        real = mask[:, modality]
        assert int(real.sum()) == 3
        reported = rows[real, modality].sum(0)
        mean = reported / 3 if masked else (reported + before[modality]) / 4
        torch.testing.assert_close(after[modality], normalize(0.9 * before[modality] + 0.1 * mean, dim=0))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedavg_weights_by_samples_or_uniformly(weighting: str) -> None:
    run = plain("fedavg", {"weighting": weighting}, kinds=PAIRED)
    expected = SAMPLES / SAMPLES.sum() if weighting == "samples" else torch.full((4,), 0.25, dtype=torch.float64)
    torch.testing.assert_close(weights_of(run, run.replies()), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedproto_weights_prototypes_by_samples_or_uniformly(weighting: str) -> None:
    run = plain("fedproto", {"weighting": weighting}, kinds=PAIRED)
    replies = run.replies()
    found = [payload_of(reply, ClassPrototypes) for reply in replies]
    counts = np.stack([each.counts for each in found]).astype(np.float64)
    weights = counts if weighting == "samples" else (counts > 0).astype(np.float64)
    assert not (counts == counts[0]).all()
    rows = np.stack([each.prototypes for each in found])
    expected = (rows * weights[..., None]).sum(0) / np.maximum(weights.sum(0), 1)[:, None]
    after = run.protocol.merge(run.state, replies, 0).state.tensors[class_prototypes.GLOBAL]
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-7)


def test_public_representations_are_scored_against_the_other_modality() -> None:
    run = plain("creamfl_public", kinds=PAIRED[:2])
    items, generator = len(run.protocol.public.dataset), torch.Generator().manual_seed(0)  # type: ignore[attr-defined]
    # Sent as float16; the scale makes scores differ clearly, which products of unit vectors do not.
    given = normalize(torch.randn(2, 2 * items, DIM, generator=generator), dim=2).half()
    shared = 20 * normalize(torch.randn(2, items, DIM, generator=generator), dim=2)
    tensors = dict(zip((f"{creamfl_public.GLOBAL}{name}" for name in ("image", "text")), shared, strict=True))

    def reply(index: int) -> Update:
        return Update(run.context.silos[index], 1, 0, 0, 1.0, (Representations(given[index].numpy(), "both"),))

    assert isinstance(run.protocol, creamfl_public.CreamFlPublic)
    wanted = run.protocol.targets(dataclasses.replace(run.state, tensors=tensors), [reply(0), reply(1)])
    for at_, name in enumerate(("image", "text")):
        own = given.float().chunk(2, dim=1)[at_]
        score = (own @ shared[1 - at_].T).log_softmax(2).diagonal(dim1=1, dim2=2)  # [silos, items]
        torch.testing.assert_close(wanted[name], (score.softmax(0)[..., None] * own).sum(0))
