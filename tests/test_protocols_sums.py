"""Secure sums of each method: what is merged is the plain merge, and class rows that would show a silo stay hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import protocols
from coordinator.round_events import Stage
from fedmq.config.scenario import Objective, ProtocolChoice
from fedmq.errors import RemoteWireError, RunError
from fedmq.federation.protocol import defines_sum
from fedmq.wire import secure_sum
from fedmq.wire.payloads import ClassPrototypes, ModalityPrototypes, SumWeights
from protocols.parts import class_prototypes
from tests.secure_round import KINDS, NAMES, SIZES, Round, begin
from tests.small_federation import population

#: Options of methods whose defaults need more than a sum.
OPTIONS: Mapping[str, Mapping[str, object]] = {
    "fedcafe": {"memory": "class_mean", "weighted_agg": False},
    "fedhap": {"hysteresis": 0.0},
}
ALL = [name for name in protocols.names() if defines_sum(protocols.load(name)) and name != "central"]
#: The coordinator has no tables of the rows of single silos.
ROWS = ("fedhap", "fedcafe", "mfcpl")
STEPS = (Stage.SHARE, Stage.MASK, Stage.REVEAL)


def test_the_methods_with_a_sum() -> None:
    assert set(ALL) >= {
        "fedavg",
        "rcsr",
        "fedhap",
        "fedcafe",
        "fedscmr",
        "fedcmr",
        "fedper",
        "pfedmma",
        "mfcpl",
        "moon",
    }
    assert not {"fedproto", "fedbridge", "plfedcmh", "local"} & set(ALL)


def why_no_sum(name: str, options: Mapping[str, object]) -> str:
    """Known from the options, or else from the run's context."""
    choice = ProtocolChoice.model_validate({"name": name, **options})
    return protocols.method_facts(choice, Objective()).no_sum or population(name, options).protocol.no_sum()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, OPTIONS.get(name)) for name in ALL),
        ("rcsr", {"router": False}),
        ("rcsr", {"router": "uniform"}),
        ("rcsr", {"router_at": "silos"}),
    ],
)
def test_a_sum_is_the_plain_merge_but_for_fixed_point(
    tiny: Path, tmp_path: Path, name: str, options: Mapping[str, object] | None
) -> None:
    federation = population(name, options, kinds=KINDS, sizes=SIZES)
    federation.round()
    replies = {silo.name: federation.train(silo).payloads for silo in federation.eligible}
    anyone = "privacy.secure_aggregation={max_weight: 1.0, min_contributors: 1.0}"
    start = begin(tiny, tmp_path, federation, replies, anyone)
    assert not why_no_sum(name, options or {})
    start.reported(*replies)
    for step in STEPS:
        start.step(step, *replies)
    mine, plain = start.merged(*replies), start.plain(*replies)
    assert not torch.equal(mine.theta, start.state.theta)
    assert torch.allclose(mine.theta, plain.theta, rtol=0, atol=1e-6)
    assert mine.values == plain.values and mine.tensors.keys() == plain.tensors.keys()
    for tensor, expected in plain.tensors.items():
        if (name not in ROWS and not options) or not tensor.startswith("table_"):
            assert torch.allclose(mine.tensors[tensor], expected, rtol=0, atol=1e-6), tensor
    sent = {type(payload) for update in start.updates.values() for payload in update.payloads}
    assert not sent & start.layout.kinds
    # The router of RCSR reads the prototypes; everything else only averages them.
    assert (ModalityPrototypes in sent) is (name == "rcsr" and not options)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("fedavg", {"branch_renorm": "conflict_free"}, "conflict_free compares the silos' updates"),
        ("moon", {"branch_renorm": "conflict_free"}, "conflict_free compares the silos' updates"),
        ("rcsr", {"anchor": "multi"}, "anchor multi needs single centroids"),
        ("fedcafe", {}, "weighted_agg true compares each silo's memory with the global one; allowed: false"),
        ("fedcafe", {"weighted_agg": False}, "memory kmeans_seeded clusters the silos' memories; allowed: class_mean"),
        ("central", {}, "one silo trains on all data"),
        ("fedproto", {}, "its merge is more than a weighted sum of the updates"),
    ],
)
def test_what_needs_single_updates_or_rows_is_refused_by_name(
    name: str, options: Mapping[str, object], why: str
) -> None:
    assert why in why_no_sum(name, options)


def test_pseudo_classes_are_no_sum() -> None:
    assert "without labels it clusters" in population("mfcpl", labels=()).protocol.no_sum()


@pytest.fixture
def hap(tiny: Path, tmp_path: Path) -> Round:
    """FedHAP, whose silos hold four classes in part."""
    federation = population("fedhap", OPTIONS["fedhap"], kinds=KINDS, sizes=SIZES)
    held = {"silo-00": (0, 1), "silo-01": (0, 2, 3), "silo-02": (0, 3), "silo-03": (1,), "silo-04": (3,)}
    replies = {}
    for silo in federation.eligible:
        counts = np.array([5 * (row in held[silo.name]) for row in range(4)])
        replies[silo.name] = tuple(
            replace(each, counts=counts) if isinstance(each, ClassPrototypes) else each
            for each in federation.train(silo).payloads
        )
    return begin(tiny, tmp_path, federation, replies, "privacy.secure_aggregation={threshold: 0.5}")


def test_a_class_row_with_too_few_silos_is_left_alone_by_name(hap: Round) -> None:
    """Class 2 has one silo, class 1 loses one before the masked updates; a silo that is lost later changes nothing."""
    alive, last = NAMES[:3] + NAMES[4:], NAMES[:3]
    hap.reported(*NAMES)
    hap.step(Stage.SHARE, *NAMES)
    masked = hap.step(Stage.MASK, *alive)
    hap.step(Stage.REVEAL, *last)
    names, sections = list(hap.layout.sizes), hap.coordinator._sections
    assert sections is not None
    found = {names[place]: values for place, values in sections.items()}
    common = ["image", "text", "discriminator_delta", "modality_prototypes.0", "modality_prototypes.1"]
    assert list(found) == [*common, "class_prototypes.0", "class_prototypes.3"]
    for name, expected in hap.fixed_point_sums(*alive).items():
        assert name not in found or np.array_equal(found[name], expected)
    log = (hap.folder / "coordinator.jsonl").read_text()
    assert '"rows":"class_prototypes.1, class_prototypes.2"' in log
    merged = hap.merged(*alive)
    mean = np.mean([hap.silos[name]._kept.values["class_prototypes.3"] for name in NAMES[1:3] + NAMES[4:]], axis=0)  # type: ignore[union-attr]
    assert np.allclose(merged.tensors[class_prototypes.GLOBAL][3], mean, atol=1e-6)
    assert not merged.tensors[class_prototypes.GLOBAL][1:3].any()
    assert merged.tensors[class_prototypes.VALID].tolist() == [True, False, False, True]
    # All that the coordinator opens does not show the row in which a single silo is left.
    agreed, place = hap.coordinator._sum, names.index("class_prototypes.1")
    assert agreed is not None
    values = np.array(masked["silo-00"].buffer[agreed.sections("silo-00")[place]])  # type: ignore[attr-defined]
    secrets = {name: hap.silos[name]._own(2) for name in NAMES}
    opened = [agreed.own_mask("silo-00", secrets["silo-00"].own_seed, sign=-1)]
    opened += [agreed.pair_mask(secrets["silo-03"].mask_key, "silo-00", "silo-03", sign=-1)]
    secure_sum.add_masks(values, {place: slice(0, len(values))}, opened)
    assert np.abs(values.view(np.int32)).max() > 2.0**30


def test_a_silo_refuses_a_weight_where_it_has_nothing_to_add(hap: Round) -> None:
    hap.reported(*NAMES)
    hap.step(Stage.SHARE, *NAMES)
    keys, weights = hap.coordinator.request(Stage.MASK, "silo-00")
    assert isinstance(weights, SumWeights)
    changed = weights.weights.copy()
    changed[weights.branches.index("class_prototypes.2")] = 0.2
    with pytest.raises(RemoteWireError, match=r"the sum of class_prototypes\.2, to which this silo has nothing to add"):
        hap.answer("silo-00", (keys, replace(weights, weights=changed)))


def test_a_row_longer_than_the_method_allows_is_refused_at_the_silo(hap: Round) -> None:
    long = tuple(
        replace(each, prototypes=each.prototypes * 100) if isinstance(each, ClassPrototypes) else each
        for each in hap.replies["silo-00"]
    )
    with pytest.raises(RunError, match=r"a row class_prototypes\.[01] with .*, allowed: at most"):
        hap.silos["silo-00"].withhold(2, long, hap.layout, hap.context.context.silos[0], hap.privacy)
