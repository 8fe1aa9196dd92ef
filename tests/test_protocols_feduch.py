"""FedUCH and its unsupervised bases: DGCPN, DJSRH, JDSH."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedmq.config.scenario import Objective, Training
from fedmq.federation.protocol import Task
from fedmq.models.hash_networks import dropout_mask, signs, towers_with
from fedmq.models.two_tower import Out
from fedmq.seeds import torch_generator
from fedmq.wire.payloads import Delta
from protocols import feduch, objectives
from protocols.objectives import dgcpn
from protocols.parts import personal_model, training
from protocols.parts.losses import unit
from protocols.parts.similarity import batch_features, item_features
from tests.replies import silo_of
from tests.small_federation import SmallFederation, population, share

SGD = Training(optimizer="sgd", batch_size=4, local_epochs=2)
LONE = ((True, True), (True, False), (False, True))


def small(base: str, name: str = "fedavg", options: dict[str, Any] | None = None, **changes: Any) -> SmallFederation:
    objective = Objective(base=base, bits=8, hidden=16)
    return population(name, options, objective=objective, **{"training": SGD, **changes})


def deltas(run: SmallFederation) -> list[np.ndarray]:
    return [payload.buffer for reply in run.replies() for payload in reply.payloads if isinstance(payload, Delta)]


def features(n: int, seed: int = 0, twins: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image, text = (torch.rand(n, d, generator=generator, dtype=torch.float64) for d in (6, 4))
    image[n - twins :], text[n - twins :] = image[:twins].clone(), text[:twins].clone()
    return unit(image), unit(text)


def dense(image: torch.Tensor, text: torch.Tensor, a1: float = 0.3, a2: float = 0.3) -> torch.Tensor:
    """The similarity over all items in one dense matrix, by sorting whole rows."""
    n = len(image)
    scale = round(0.9 * n)
    pairs = a1 * text @ text.T + (1 - a1) * image @ image.T
    near = pairs.clone()
    for i, row in enumerate(near):
        row[torch.argsort(pairs[i], stable=True)[: round(0.45 * scale)]] = 0
        row[i] = 0
    near /= near.sum(1, keepdim=True).clamp_min(1e-12)
    return 2 * ((1 - a2) * pairs + a2 * scale * near @ near.T) - 1


# --------------------------------------------------------------------------------------------------- similarity
@pytest.mark.parametrize("n", [1, 2, 3, 7, 40])
def test_blockwise_similarity_equals_the_dense_one(n: int) -> None:
    image, text = features(n)
    wanted, graph = dense(image, text), dgcpn.Graph(image, text)
    for rows in torch.randperm(n, generator=torch.Generator().manual_seed(1)).split(3):
        torch.testing.assert_close(graph.similarity(rows), wanted[rows][:, rows], rtol=1e-10, atol=1e-12)


def test_similarity_uses_directions_and_makes_no_second_copy_of_the_features() -> None:
    image, text = features(40)
    longer = dgcpn.Graph(image * torch.arange(1, 41)[:, None], text * 3), dgcpn.Graph(image, text)
    rows = torch.arange(0, 40, 3)
    torch.testing.assert_close(*(graph.similarity(rows) for graph in longer), rtol=1e-10, atol=1e-12)
    held = share(small("dgcpn").context.silos[1], 9)
    assert held.image is not None
    assert item_features(held)[0].data_ptr() == held.image.data_ptr()


def test_duplicate_items_remain_each_others_neighbours() -> None:
    image, text = features(20, twins=4)
    graph, rows = dgcpn.Graph(image, text), torch.arange(20)
    near = graph.neighbours(rows, graph.pairs(rows))
    assert torch.equal(near.diagonal(), torch.zeros(20, dtype=near.dtype))
    assert (near[torch.arange(4), torch.arange(16, 20)] > 0).all()
    torch.testing.assert_close(near.sum(1), torch.ones(20, dtype=near.dtype))


@pytest.mark.parametrize("count", [0, 1, 3, 6])
def test_the_smallest_entries_match_a_stable_sort(count: int) -> None:
    values = torch.tensor([[3.0, 1.0, 1.0, 2.0, 1.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    wanted = torch.zeros_like(values, dtype=torch.bool).scatter(
        1, torch.argsort(values, dim=1, stable=True)[:, :count], True
    )
    assert torch.equal(dgcpn.smallest(values, count), wanted)


def test_a_silo_without_text_uses_the_similarity_of_its_images() -> None:
    lone = share(small("dgcpn").context.silos[1], 9)
    image, text = item_features(lone)
    assert lone.text is None
    torch.testing.assert_close(image, text)
    pairs = dgcpn.Graph(image, text).pairs(torch.arange(9))
    torch.testing.assert_close(pairs, unit(image) @ unit(image).T)


def test_a_batch_uses_the_features_of_the_captions_it_trains_on() -> None:
    run = small("djsrh")
    local, rows = silo_of(run, 0), np.array([2, 0])
    caption = np.zeros(len(local.dataset), np.int64)
    assert local.dataset.text is not None
    _, text = batch_features(local, rows, caption)
    assert torch.equal(text, local.dataset.text[[2, 0], 0])


def test_dgcpn_makes_two_updates_on_a_paired_batch_and_one_on_single_modality_batches() -> None:
    run = small("dgcpn", kinds=LONE, sizes=[4, 4, 4])
    found = [list(work_of(run, index).steps(0, np.random.default_rng(0))) for index in range(3)]
    assert [len(steps) for steps in found] == [2, 1, 1]
    assert [step.main for step in found[0]] == [True, False]


def work_of(run: SmallFederation, index: int) -> training.Work:
    task = Task(1, 0, 0, 1e-3, ())
    work = objectives.begin(objectives.options_of(run.context.objective), silo_of(run, index), run.context, task)
    assert work is not None
    return work


@pytest.mark.parametrize("form", ["code", "paper"])
def test_dgcpns_binary_update_trains_each_tower_against_the_others_previous_codes(
    form: Literal["code", "paper"],
) -> None:
    generator, options = torch.Generator().manual_seed(0), dgcpn.Options(form=form)
    image, text = (torch.randn(5, 8, generator=generator, requires_grad=True) for _ in range(2))
    similar = torch.rand(5, 5, generator=generator)
    both = torch.autograd.grad(dgcpn.binary_loss(image, text, similar, options), [image, text])
    (alone,) = torch.autograd.grad(dgcpn.loss(image, signs(text.detach()), similar, options), [image])
    (other,) = torch.autograd.grad(dgcpn.loss(signs(image.detach()), text, similar, options), [text])
    assert torch.equal(both[0], alone)
    assert torch.equal(both[1], other)


def test_the_papers_similarity_is_computed_from_the_batchs_codes_without_gradient() -> None:
    generator, options = torch.Generator().manual_seed(0), dgcpn.Options(similarity="codes")
    image, text = (torch.rand(7, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = dgcpn.similarity_of_codes(image, text, options)
    torch.testing.assert_close(found, dense(unit(image.detach()), unit(text.detach())))
    assert not found.requires_grad
    alone = dgcpn.similarity_of_codes(None, text, options)
    torch.testing.assert_close(alone, dense(unit(text.detach()), unit(text.detach())))


@pytest.mark.parametrize("base", ["djsrh", "jdsh"])
def test_sharpness_grows_with_the_silos_epochs_over_all_its_tasks(base: str) -> None:
    run = small(base)
    seen: list[float] = []
    for _ in range(2):
        work = work_of(run, 0)
        for epoch in range(2):
            with contextlib.closing(work.steps(epoch, np.random.default_rng(0))) as steps:
                next(steps)
                seen.append(run.model.visual.sharpness)
        run.personal[0] = work.kept()
    assert seen == pytest.approx([1.0, 2**0.5, 3**0.5, 2.0])
    assert run.model.visual.sharpness == run.model.text.sharpness == 1.0


def test_a_silo_of_one_modality_is_distilled_but_not_contrasted() -> None:
    def second(**switches: bool) -> list[np.ndarray]:
        run = small("dgcpn", "feduch", switches, kinds=LONE)
        run.replies()
        return deltas(run)

    none, contrast, both = (
        second(contrast=False, distill=False),
        second(contrast=True, distill=False),
        second(contrast=True, distill=True),
    )
    for index in (1, 2):
        assert np.array_equal(none[index], contrast[index])
        assert not np.array_equal(none[index], both[index])
    assert not np.array_equal(none[0], contrast[0])


def test_the_terms_are_added_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small("dgcpn", "feduch", sizes=[8, 4, 4, 4])
    batches: list[int] = []
    real = feduch.terms

    def counted(own: Sequence[Out | None], *rest: Any) -> torch.Tensor | None:
        batches.append(len(own[0].code))  # type: ignore[union-attr]
        return real(own, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(feduch, "terms", counted)
    run.train(run.context.silos[0])
    assert batches == [4] * 4  # two batches in each of two epochs, three updates each


def test_reference_nets_run_without_dropout_and_leave_the_model_as_it_was() -> None:
    run = small("dgcpn", "feduch")
    local, step = silo_of(run, 0), training.Step(np.arange(4), np.zeros(11, np.int64), lambda *_: torch.zeros(()))
    other = run.state.theta * 1.5
    before = run.model.flat.detach().clone()
    run.model.visual.noise = run.model.text.noise = torch_generator(0, "dropout")
    image, text = personal_model.Reference(local, other, 1)(step)
    again, _ = personal_model.Reference(local, other, 1)(step)
    run.model.visual.noise = run.model.text.noise = None
    assert image is not None and text is not None and again is not None
    assert torch.equal(image.code, again.code)
    assert not image.code.requires_grad
    assert torch.equal(run.model.flat.detach(), before)


def test_a_precomputed_reference_equals_one_computed_per_batch_at_the_epochs_sharpness() -> None:
    run = small("djsrh", "feduch")
    local, other = silo_of(run, 0), run.state.theta * 1.5
    captions = np.arange(len(local.dataset)) % local.dataset.captions.numpy()
    once, anew = personal_model.Reference(local, other, 50), personal_model.Reference(local, other, 1)
    for runs, sharpness in ((("image", "text"), 1.0), (("image", "text"), 3.0), (("text",), 1.0)):
        step = training.Step(np.array([3, 0, 2]), captions, lambda *_: torch.zeros(()), runs=runs)
        with towers_with(local.model, sharpness=sharpness):
            for kept, made in zip(once(step), anew(step), strict=True):
                assert (kept is None) == (made is None)
                if kept is not None and made is not None:
                    torch.testing.assert_close(kept.code, made.code)
                    torch.testing.assert_close(kept.hidden, made.hidden)
    assert {"_images", "_texts"} <= set(vars(once))
    assert not {"_images", "_texts"} & set(vars(anew))


@pytest.mark.parametrize("base", ["djsrh", "jdsh"])
@pytest.mark.parametrize(
    ("method", "options"),
    [("creamfl", {"inter": 0.0, "intra": 0.0, "kd": 1.0}), ("fedproto", {}), ("mfcpl", {"cmpc": 0.0, "cma": 0.0})],
)
def test_codes_compared_with_earlier_codes_have_the_same_sharpness(
    method: str, options: dict[str, Any], base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unchanged model has zero distance to itself at any sharpness of training."""
    extras: list[training.Extra] = []
    epochs = training.train_epochs

    def watched(*args: Any, extra: training.Extra, **others: Any) -> training.TrainingResult:
        extras.append(extra)
        return epochs(*args, extra=extra, **others)

    monkeypatch.setattr(training, "train_epochs", watched)
    # With one item and one caption a class prototype is that item's code; MFCPL's covers both modalities, here equal.
    run = small(base, method, options, kinds=((True, True),), sizes=[1])
    only, flat = run.shares[0], run.model.flat.data
    assert only.image is not None
    alike = replace(only, text=only.image[:, None].clone(), captions=torch.ones(1, dtype=torch.int64))
    run.shares = {0: alike}
    if method == "mfcpl":
        flat[run.model.branch("text")] = flat[run.model.branch("image")]
        run.state = run.protocol.initial(flat.clone())
    silo = run.context.silos[0]
    run.state = run.protocol.merge(run.state, [run.reply(silo, run.train(silo, 0.0))], 0).state
    run.train(silo, 0.0)
    caption = np.zeros(1, np.int64)
    step = training.Step(np.zeros(1, np.int64), caption, lambda *_: torch.zeros(()))
    for sharpness in (1.0, 2.0, 10.0):
        with towers_with(run.model, sharpness=sharpness):
            image, text = training.outputs(silo_of(run, 0), step.rows, caption)
            found = extras[-1](step, image, text)
        assert image is not None and found is not None
        assert float(found.detach()) == pytest.approx(0.0, abs=1e-10), sharpness
        assert torch.equal(image.code, torch.tanh(sharpness * image.raw))


def test_dropout_masks_are_two_or_zero_with_equal_probability_and_reproducible_by_seed() -> None:
    masks = [dropout_mask((33, 1001), torch_generator(seed, "dropout")) for seed in (0, 0, 1)]
    assert masks[0].shape == (33, 1001)
    assert masks[0].unique().tolist() == [0.0, 2.0]
    assert float(masks[0].mean()) == pytest.approx(1.0, abs=0.03)  # five standard deviations of 33,033 bits
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_a_silo_that_regains_a_modality_still_has_its_previous_nets() -> None:
    run = small("dgcpn", "feduch")
    paired = run.context.silos[0]
    run.train(paired)
    before = run.personal[0][personal_model.OWN]
    lone = replace(paired, text=False)
    run.shares = {**run.shares, 0: share(lone, 9)}
    run.train(lone)
    assert torch.equal(run.personal[0][personal_model.OWN], before)
