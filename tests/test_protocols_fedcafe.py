"""Behaviour specific to FedCAFE and its two bases."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import io as scipy_io

from fedmq.config.scenario import Backbone, Objective, Training
from fedmq.data.labels import coarse_columns, fine_columns, trained_columns
from fedmq.encoders.base import InputSpec
from fedmq.errors import InputError
from fedmq.evaluation import heldout
from fedmq.federation.protocol import Context, Local, SiloFacts, Task
from fedmq.models import hash_networks
from fedmq.models.build import build
from fedmq.wire.payloads import Memory
from protocols import objectives
from protocols.objectives import shdch
from protocols.parts import alternating, memory, training
from protocols.parts.personal_model import References
from tests import definitions, in_process_run
from tests.replies import payload_of, with_payload
from tests.small_federation import DIM, LABELS, population, share
from tests.threaded_run import resolved

LEVELS = ("fine:a", "coarse:x", "fine:b", "coarse:y")
PAIRED = SiloFacts("silo-00", 0, True, True)


def objective(base: Any = "dcmh", **options: Any) -> Objective:
    return Objective(base=base, bits=8, hidden=16, **options)


def at_work(base: Any, silo: SiloFacts = PAIRED, names: tuple[str, ...] = LABELS, **options: Any) -> tuple[Any, Local]:
    """A base's local work on a silo of 9 items, before its first step."""
    chosen = objective(base, **options)
    model = build(Backbone(name="features"), InputSpec((DIM,), (DIM,)), 0, objective=chosen, label_names=names)
    context = Context(0, 5, (silo,), model.layout, model.dim, Training(batch_size=4), chosen, names)
    local = Local(silo, share(silo, 9), model, {})
    task = Task(1, 0, 0, 1e-3, ())
    return objectives.begin(objectives.options_of(chosen), local, context, task), local


def test_enhancement_alone_has_no_effect_in_the_first_round() -> None:
    off = {"loss_e": False, "loss_c": False, "loss_d": False, "weighted_agg": False}
    plain, run = population("fedcafe", {**off, "afe": False}), population("fedcafe", off)
    plain.round()
    run.round()
    assert torch.equal(run.state.theta, plain.state.theta)
    plain.round()
    run.round()
    assert not torch.equal(run.state.theta, plain.state.theta)


# ------------------------------------------------------------------------- memories
def test_a_class_missing_from_a_silo_has_no_support_and_a_zero_row() -> None:
    run = population("fedcafe", kinds=((True, True),), sizes=(6,))
    labels = run.shares[0].labels
    labels[:, 2], labels[:, 3] = 0, 1
    memory = payload_of(run.replies()[0], Memory)
    assert memory.support[2] == 0
    assert not memory.centroids[2].any()
    assert memory.support[3] == 6
    assert np.allclose(np.linalg.norm(memory.centroids[3]), 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["kmeans_random", "kmeans_two_stage"])
def test_a_silo_with_fewer_items_than_classes_fills_fewer_rows(kind: Any) -> None:
    features = [torch.randn(3, 4, generator=torch.Generator().manual_seed(0))] * 2
    rows, support = memory.local_memory(features, torch.zeros(3, 8), kind, np.random.default_rng(0))
    assert (support > 0).sum() == 3
    assert not rows[support == 0].any()


def test_a_row_without_support_keeps_its_last_value() -> None:
    previous = torch.eye(3)
    rows, support = torch.zeros(2, 3, 3), torch.zeros(2, 3, dtype=torch.int64)
    rows[0, 0], support[0, 0] = torch.tensor([0.0, 1.0, 0.0]), 4
    shared, filled = memory.global_memory(rows, support, previous, "kmeans_seeded", np.random.default_rng(0))
    assert filled.tolist() == [True, False, False]
    assert torch.equal(shared[1:], previous[1:])
    assert torch.equal(shared[0], rows[0, 0])


def test_the_global_memory_is_weighted_by_support_per_class() -> None:
    rows = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    support = torch.tensor([[3], [1]])
    shared, _ = memory.global_memory(rows, support, torch.zeros(1, 2), "class_mean", np.random.default_rng(0))
    torch.testing.assert_close(shared[0], torch.nn.functional.normalize(torch.tensor([3.0, 1.0]), dim=0))


def test_the_table_keeps_silos_that_did_not_report_and_ignores_older_reports() -> None:
    run = population("fedcafe")
    run.round()
    first = run.state.tensors["table_rows"].clone()
    run.round(run.context.silos[:2])
    table = run.state.tensors
    assert torch.equal(table["table_rows"][2:], first[2:])
    assert table["table_versions"].tolist() == [1, 1, 0, 0]
    late = dataclasses.replace(run.replies(run.context.silos[:1])[0], base_version=0, staleness=2)
    after = run.protocol.merge(run.state, [late], 2).state.tensors
    assert torch.equal(after["table_rows"], table["table_rows"])


# ------------------------------------------------------------------------- weights
def differences(*rows: torch.Tensor, shared: torch.Tensor, support: list[list[int]] | None = None) -> torch.Tensor:
    given = support or [[1] * len(shared)] * len(rows)
    reports = [(each, torch.tensor(counts)) for each, counts in zip(rows, given, strict=True)]
    return memory.differences(reports, shared, torch.ones(len(shared), dtype=torch.bool), by_class=True)


def test_a_missing_class_alone_does_not_change_the_weight() -> None:
    shared = torch.eye(4)
    short = shared.clone()
    short[3] = 0
    whole, fewer = differences(shared, short, shared=shared, support=[[1] * 4, [1, 1, 1, 0]])
    assert float(fewer) == pytest.approx(float(whole))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8))
@settings(max_examples=60, deadline=None)
def test_capped_weights_sum_to_one_and_respect_their_caps(values: list[float], stale: list[bool]) -> None:
    weights = torch.tensor(values, dtype=torch.float64) + 1e-9
    limits = torch.where(torch.tensor(stale[: len(values)]), 1.5 / len(values), torch.inf).double()
    capped = memory.capped(weights / weights.sum(), limits)
    assert float(capped.sum()) == pytest.approx(1)
    assert bool((capped <= limits + 1e-12).all())


def test_the_weight_of_a_stale_silo_far_from_the_memory_is_capped() -> None:
    run = population("fedcafe", {"weight": "softmax", "cap": 1.0})
    replies = run.replies()
    far = torch.tensor([1e3, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert float(run.protocol._weights(far, replies)[0]) == 1.0
    stale = dataclasses.replace(replies[0], staleness=1)
    held = run.protocol._weights(far, [stale, *replies[1:]])
    torch.testing.assert_close(held, torch.full((4,), 0.25, dtype=torch.float64))


def test_weights_by_samples_are_those_of_equation_10_times_the_silos_sizes() -> None:
    merged = {}
    for options in ({}, {"weight_samples": True}):
        run = population("fedcafe", options, kinds=((True, True),) * 2, sizes=(12, 4))
        protocol: Any = run.protocol
        replies = run.replies()
        merged[bool(options)] = protocol._weights(torch.tensor([1.0, 2.0], dtype=torch.float64), replies)
    torch.testing.assert_close(merged[False], torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    torch.testing.assert_close(merged[True], torch.tensor([12 / 20, 8 / 20], dtype=torch.float64))


def test_long_rows_or_huge_supports_do_not_raise_a_silos_weight() -> None:
    run = population("fedcafe")
    replies = run.replies()
    sent = payload_of(replies[0], Memory)
    loud = with_payload(replies[0], Memory(sent.centroids * np.float32(1e18), sent.support * 2**60))
    merged = run.protocol.merge(run.state, [loud, *replies[1:]], 0)
    assert merged.log["weight_largest"] < 0.5
    run.state = merged.state
    assert float(run.state.tensors["table_rows"].norm(dim=2).max()) == pytest.approx(1)
    assert int(run.state.tensors["memory_support"].min()) >= 0
    assert torch.isfinite(run.state.tensors["memory"]).all()


# ------------------------------------------------------------------------- silo
def test_the_released_memory_is_the_one_that_enhances_the_codes() -> None:
    run = population("fedcafe")
    run.round()
    (memory,) = run.protocol.release(run.state)
    assert np.array_equal(memory.centroids, run.state.tensors["memory"].numpy())
    assert population("fedcafe", {"afe": False}).protocol.release(run.state) == ()
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(0))
    plain = run.model.outputs("image", x)
    with hash_networks.towers_with(run.model, memory=run.state.tensors["memory"]):
        out = run.model.outputs("image", x)
        torch.testing.assert_close(
            out.code, hash_networks.enhanced(plain.code, plain.logits, run.state.tensors["memory"])
        )
    assert torch.equal(run.model.outputs("image", x).code, plain.code)


@pytest.mark.parametrize("image", [True, False])
def test_a_single_modality_silo_is_pulled_only_to_its_modalitys_half(image: bool) -> None:
    run = population("fedcafe", kinds=((image, not image),), sizes=(5,))
    step = training.Step(np.arange(3), np.zeros(5, np.int64), lambda image, text: torch.zeros(()))
    run.round()
    local = Local(run.context.silos[0], run.shares[0], run.model, {})
    assert len(References.by(local).of(step.rows, step.caption)) == 1


def test_references_use_the_caption_of_the_step() -> None:
    run = population("fedcafe", kinds=((True, True),), sizes=(5,))
    local = Local(run.context.silos[0], run.shares[0], run.model, {})
    rows, caption = np.array([4, 0]), np.array([0, 1, 2, 0, 1])
    step = training.Step(rows, caption, lambda image, text: torch.zeros(()))
    found = References.by(local).of(step.rows, step.caption)
    with torch.no_grad():
        for mine, out in zip(found, training.outputs(local, rows, caption), strict=True):
            torch.testing.assert_close(mine, out.code)


def first_loss(work: Any, local: Local) -> float:
    """The loss of a work's first batch."""
    step = next(iter(work.steps(0, np.random.default_rng(0))))
    return float(step.loss(*training.outputs(local, step.rows, step.caption, step.runs)).detach())


@pytest.mark.parametrize("image", [True, False])
def test_with_shdch_a_single_modality_silo_learns_from_its_labels(image: bool) -> None:
    silo = SiloFacts("silo-00", 0, image, not image)
    losses = []
    for others in (False, True):
        work, local = at_work("shdch", silo)
        assert list(work.buffers) == ["image" if image else "text"]
        for level in work.levels:
            level.labels.copy_(1 - level.labels if others else level.labels)
        losses.append(first_loss(work, local))
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


def test_an_epoch_is_an_image_pass_and_then_a_text_pass() -> None:
    work, _ = at_work("dcmh")
    steps = list(work.steps(0, np.random.default_rng(0)))
    assert [step.runs for step in steps] == [("image",)] * 3 + [("text",)] * 3
    assert all(step.trains == step.runs for step in steps)
    assert sorted(np.concatenate([step.rows for step in steps[:3]])) == list(range(9))


def test_fresh_sampling_trains_a_silo_smaller_than_a_batch() -> None:
    drawn = list(alternating.drawn(3, 128, "fresh", np.random.default_rng(0)))
    assert [sorted(rows) for rows in drawn] == [[0, 1, 2]]
    assert len(list(alternating.drawn(9, 4, "fresh", np.random.default_rng(0)))) == 2


# ------------------------------------------------------------------------- two levels of labels
def test_label_levels_are_distinguished_by_name() -> None:
    assert coarse_columns(LEVELS) == [1, 3]
    assert fine_columns(LEVELS) == [0, 2]
    assert (coarse_columns(LABELS), fine_columns(LABELS)) == ([], [0, 1, 2, 3])
    assert [len(fine_columns(names)) for names in (LEVELS, LABELS)] == [2, 4]
    assert trained_columns(LEVELS, both_levels=True) == [0, 1, 2, 3]
    assert trained_columns(LEVELS, both_levels=False) == [0, 2]
    assert trained_columns(LABELS, both_levels=False) == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("base", ["dpsh", "dscmr", "shdch"])
def test_only_shdch_trains_on_the_upper_of_two_label_levels(base: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images, tags = (generator.normal(size=(48, 6)).astype(np.float32) for _ in range(2))
    labels = np.zeros((48, 35))
    labels[np.arange(48), 8 + np.arange(48) % 6] = 1
    digests = set()
    for upper in (0, 1):
        labels[:, :8] = 0
        labels[np.arange(48), np.arange(48) % (3 - upper)] = 1
        folder = tmp_path / str(upper)
        folder.mkdir()
        scipy_io.savemat(folder / "vgg.mat", {"images": images, "tags": tags, "labels": labels})
        text = f"""
            name: levels
            rounds: 2
            protocol: {{name: fedavg}}
            objective: {{base: {base}, bits: 8, hidden: 8}}
            data: {{name: fashionvc, path: {folder / "vgg.mat"}, queries: 6}}
            backbone: {{name: features}}
            silos: {{count: 2}}
            partition: {{kind: iid}}
            training: {{batch_size: 8, warmup_rounds: 0}}
        """
        (folder / "a.yaml").write_text(textwrap.dedent(text))
        digests.add(in_process_run.run(resolved(folder / "a.yaml"), folder / "run").summary.model_digest)
    assert len(digests) == (2 if base == "shdch" else 1)


def test_relevance_is_defined_by_the_fine_labels() -> None:
    whole = share(PAIRED, 5)
    held_out: Any = SimpleNamespace(run_data=SimpleNamespace(label_names=LEVELS), load=lambda *_, **__: whole)
    assert torch.equal(heldout._with_fine_labels(held_out, np.arange(5)).labels, whole.labels[:, [0, 2]])
    held_out.run_data.label_names = LABELS
    assert torch.equal(heldout._with_fine_labels(held_out, np.arange(5)).labels, whole.labels)


def test_shdch_uses_at_most_as_many_levels_as_the_names_have() -> None:
    assert [len(level.codes) for level in at_work("shdch", names=LEVELS)[0].levels] == [2, 2]
    assert [len(level.codes) for level in at_work("shdch", names=LEVELS, levels=1)[0].levels] == [2]
    assert [len(level.codes) for level in at_work("shdch", names=LABELS)[0].levels] == [4]
    with pytest.raises(InputError, match=r"objective\.levels.*coarse"):
        at_work("shdch", names=LABELS, levels=2)


@pytest.mark.parametrize("levels", [1, 2])
def test_an_update_of_the_class_codes_never_raises_the_objective(levels: int) -> None:
    work, local = at_work("shdch", names=LEVELS, levels=levels)
    generator = torch.Generator().manual_seed(3)
    work.buffers = {name: torch.randn(9, 8, generator=generator).tanh() for name in ("image", "text")}
    labels = local.dataset.labels.float()

    def objective_now() -> float:
        outputs = [shdch.output_loss(each, work.codes, work.levels, 10.0) for each in work.buffers.values()]
        total = torch.stack(outputs).sum()
        if levels == 2:
            present = labels[:, [0, 2]].any(0)
            inclusion = (labels[:, [1, 3]].T @ labels[:, [0, 2]] > 0).float()
            coarse, fine = (level.codes for level in work.levels)
            total = total + definitions.tie_loss(coarse, fine[present], inclusion[:, present], 100.0)
        return float(total)

    work.codes = alternating.common_codes(work.buffers)
    before = objective_now()
    work.update()
    assert objective_now() < before


def test_all_silos_initialise_the_same_class_codes() -> None:
    first = at_work("shdch")[0]
    other = at_work("shdch", SiloFacts("silo-00", 0, False, True))[0]
    for one, two in zip(first.levels, other.levels, strict=True):
        assert torch.equal(one.codes, two.codes)
