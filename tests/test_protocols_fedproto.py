"""FedProto, and the tables, means and clusters shared by methods with class prototypes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedmq.wire.payloads import ClassPrototypes
from protocols import fedproto
from protocols.parts import centroids, class_prototypes
from protocols.parts.personal_model import OWN
from tests.replies import payload_of, with_payload
from tests.small_federation import LABELS, MIXED, population


def test_fedproto_without_its_term_equals_local_training() -> None:
    alone, run = population("local"), population("fedproto", {"weight": 0.0})
    for _ in range(3):
        alone.round()
        run.round()
    assert all(torch.equal(alone.personal[i][OWN], run.personal[i][OWN]) for i in range(len(MIXED)))


@pytest.mark.parametrize("name", ["fedproto", "plfedcmh"])
def test_rows_of_a_modality_that_a_silo_lacks_are_never_used(name: str) -> None:
    run = population(name)
    replies = run.replies()
    honest = run.protocol.merge(run.state, replies, 0).state
    found = payload_of(replies[1], ClassPrototypes)
    half = len(LABELS)
    rows, counts = found.prototypes.copy(), found.counts.copy()
    rows[half:], counts[half:] = 100.0, 5
    lie = ClassPrototypes(rows, counts, "both")
    replies[1] = with_payload(replies[1], lie)
    spoilt = run.protocol.merge(run.state, replies, 0).state
    for kept in (class_prototypes.GLOBAL, class_prototypes.VALID):
        assert torch.equal(honest.tensors[kept], spoilt.tensors[kept])


def test_fused_prototypes_use_the_available_modality() -> None:
    image, text = torch.tensor([[1.0, 3.0], [5.0, 5.0], [2.0, 4.0], [9.0, 9.0]]), torch.full((4, 2), 7.0)
    there = torch.tensor([True, False, True, False]), torch.tensor([False, True, True, False])
    found = fedproto.fused(class_prototypes.Shared(image, text, *there))
    wanted = torch.tensor([[1.0, 3.0], [7.0, 7.0], [4.5, 5.5], [0.0, 0.0]])
    for rows, valid in ((found.image, found.image_valid), (found.text, found.text_valid)):
        assert torch.equal(rows, wanted)
        assert valid.tolist() == [True, True, True, False]


def test_silos_of_one_modality_learn_from_each_others_fused_prototypes() -> None:
    alone, run = (
        population(name, options, kinds=((True, False), (False, True)), sizes=(8, 8))
        for name, options in (("fedproto", {"weight": 0.0}), ("fedproto", {"proto_modal": "fused"}))
    )
    for _ in range(2):
        alone.round()
        run.round()
    assert all(not torch.equal(run.personal[i][OWN], alone.personal[i][OWN]) for i in range(2))


def test_the_table_drops_a_silo_past_the_age_limit_and_ignores_older_reports() -> None:
    run = population("fedproto", kinds=((True, True),) * 2, sizes=(8, 8))
    tensors = run.state.tensors
    first, second = [(reply, payload_of(reply, ClassPrototypes)) for reply in run.replies()]
    tensors = class_prototypes.updated(tensors, [first, second], 0, max_age=2, weighted=False)
    both = tensors[class_prototypes.GLOBAL]
    later = dataclasses.replace(second[0], base_version=3), second[1]
    tensors = class_prototypes.updated(tensors, [later], 3, max_age=2, weighted=False)
    assert not torch.equal(tensors[class_prototypes.GLOBAL], both)
    torch.testing.assert_close(tensors[class_prototypes.GLOBAL], torch.from_numpy(second[1].prototypes))
    again = class_prototypes.updated(tensors, [second], 3, max_age=None, weighted=False)
    assert int(again[class_prototypes.VERSIONS][1]) == 3


def test_k_means_finds_separated_groups_whatever_their_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    points = (centres[:, None] + 0.1 * torch.randn(3, 7, 2, generator=generator)).flatten(0, 1)
    weights = torch.arange(1.0, 22.0)
    found, held = centroids.k_means(points, weights, 3, np.random.default_rng(1))
    order = centroids.nearest(centres, found)
    assert sorted(order.tolist()) == [0, 1, 2]
    torch.testing.assert_close(found[order].float(), centres, atol=0.2, rtol=0)
    assert held[order].tolist() == [28.0, 77.0, 126.0]
