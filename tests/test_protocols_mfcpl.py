"""MFCPL: class prototypes of paired silos, and the pseudo-classes of data without labels."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedmq.config.scenario import Training
from fedmq.errors import RemoteWireError
from fedmq.seeds import numpy_generator
from fedmq.wire.payloads import ClassPrototypes, Delta
from protocols.parts import centroids, class_prototypes
from tests.replies import payload_of, with_payload
from tests.small_federation import DIM, LABELS, SmallFederation, population


def prototype_kinds(run: SmallFederation) -> dict[int, str]:
    """Silo index to the modality of the class prototypes it sends, for those that send any."""
    return {
        reply.silo.index: payload.modality
        for reply in run.replies()
        for payload in reply.payloads
        if isinstance(payload, ClassPrototypes)
    }


def test_with_labels_paired_silos_report_class_prototypes_from_the_first_round() -> None:
    run = population("mfcpl")
    assert prototype_kinds(run) == {0: "both", 3: "both"}
    run.round()
    valid = run.state.tensors[class_prototypes.VALID]
    held = (run.shares[0].labels.sum(0) + run.shares[3].labels.sum(0)) > 0
    assert torch.equal(valid, held.repeat(2))


def test_without_labels_the_first_centroids_become_fixed_pseudo_classes() -> None:
    run = population("mfcpl", {"classes": 3}, labels=())
    assert prototype_kinds(run) == {0: "text", 3: "text"}
    run.round()
    classes = run.state.tensors["pseudo_classes"]
    assert classes.shape == (3, DIM)
    assert int(run.state.tensors["pseudo_classes_sizes"].sum()) == 16
    assert not run.state.tensors[class_prototypes.VALID].any()
    assert prototype_kinds(run) == {0: "both", 3: "both"}
    run.round()
    assert torch.equal(run.state.tensors["pseudo_classes"], classes)
    assert int(run.state.tensors[class_prototypes.COUNTS][0].sum()) == 2 * 11


@pytest.mark.parametrize("labels", [LABELS, ()], ids=["labels", "pseudo-classes"])
@pytest.mark.parametrize("index", [1, 2], ids=["images alone", "captions alone"])
def test_prototypes_teach_silos_that_lack_a_modality(labels: tuple[str, ...], index: int) -> None:
    training = Training(batch_size=8, local_epochs=2, weight_decay=0.0)
    updates = []
    for name in ("fedavg", "mfcpl"):
        run = population(name, {"lambda_anc": 0.0}, labels=labels, training=training)
        for _ in range(3):
            run.round()
        (reply,) = run.replies([run.context.silos[index]])
        updates.append(payload_of(reply, Delta).buffer)
    assert not updates[0].any()
    assert updates[1].any()


def in_cohorts_of(run: SmallFederation, cohort: int) -> SmallFederation:
    run.protocol.context = dataclasses.replace(run.context, cohort=cohort)  # type: ignore[attr-defined]
    return run


def made(run: SmallFederation) -> bool:
    return bool(run.state.tensors["pseudo_classes_sizes"].any())


@pytest.mark.parametrize("cohort", [None, 4])
def test_a_full_first_cohort_defines_the_pseudo_classes_immediately(cohort: int | None) -> None:
    run = population("mfcpl", {"classes": 3}, labels=())
    if cohort is not None:
        in_cohorts_of(run, cohort)
    replies = run.replies()
    sent = [payload_of(reply, ClassPrototypes) for reply in replies if reply.silo.paired]
    points = torch.cat([torch.from_numpy(each.prototypes) for each in sent])
    sizes = torch.cat([torch.from_numpy(each.counts) for each in sent])
    there = sizes > 0
    drawn = numpy_generator(0, "mfcpl", "classes")
    centres, _ = centroids.k_means(points[there].clone(), sizes[there].clone(), 3, drawn)
    after = run.protocol.merge(run.state, replies, 0).state.tensors
    assert torch.equal(after["pseudo_classes"], centres.float())


def test_one_silos_centroids_are_not_enough_for_pseudo_classes() -> None:
    kinds = [(True, True)] * 5 + [(True, False)]
    run = in_cohorts_of(population("mfcpl", {"classes": 3}, labels=(), kinds=kinds, sizes=[6, 5, 7, 8, 9, 4]), 4)
    for index in (0, 0, 0, 3, 5):
        run.round([run.context.silos[index]])
        assert not made(run)
    run.round([run.context.silos[1]])  # the third of five paired silos, and the fourth silo of a cohort size of four
    assert int(run.state.tensors["pseudo_classes_sizes"].sum()) == 6 + 8 + 5
    classes = run.state.tensors["pseudo_classes"]
    run.round([run.context.silos[2]])
    assert torch.equal(run.state.tensors["pseudo_classes"], classes)


@pytest.mark.parametrize(("order", "cohort"), [((0, 1, 2), 7), ((5, 6, 0), 3), ((0, 5, 0, 6), 3)])
def test_half_of_the_paired_silos_or_a_rounds_number_of_silos_are_enough_for_pseudo_classes(
    order: tuple[int, ...], cohort: int
) -> None:
    kinds = [(True, True)] * 5 + [(True, False)] * 2
    run = in_cohorts_of(population("mfcpl", {"classes": 3}, labels=(), kinds=kinds, sizes=[5] * 7), cohort)
    seen = []
    for index in order:
        run.round([run.context.silos[index]])
        seen.append(made(run))
    assert seen == [False] * (len(order) - 1) + [True]


def test_centroids_of_more_samples_than_the_update_are_refused() -> None:
    run = population("mfcpl", {"classes": 3}, labels=())
    reply = next(each for each in run.replies() if each.silo.paired)
    run.protocol.check(reply.payloads)  # type: ignore[attr-defined]
    centroids = payload_of(reply, ClassPrototypes)
    samples = payload_of(reply, Delta).n_samples
    assert int(centroids.counts.sum()) == samples
    for counts, told in ((centroids.counts + 1, f"of {samples + 3} samples"), (centroids.counts * 0 + samples, "of")):
        lie = with_payload(reply, ClassPrototypes(centroids.prototypes, counts, "text"))
        with pytest.raises(RemoteWireError, match=told):
            run.protocol.check(lie.payloads)  # type: ignore[attr-defined]
