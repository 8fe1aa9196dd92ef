"""Bounds on the payloads of a reply: what no honest silo can send fails its task, never the run."""

from __future__ import annotations

import dataclasses
import math
import types
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coordinator.round_events import Phase
from coordinator.run_context import largest_body
from coordinator.updates import LONGEST, check_reply
from fedmq.config.scenario import Objective
from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import Update
from fedmq.storage.run_folder import RunFolder
from fedmq.wire import codec
from fedmq.wire.fields import FieldError
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import RefusedRecord, read_log
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import (
    ClassPrototypes,
    Delta,
    LabelCount,
    Loss,
    Memory,
    ModalityPrototypes,
    Payload,
    Representations,
)
from protocols import creamfl_public
from protocols.parts import prototypes
from protocols.parts.aggregation import shortened
from protocols.parts.losses import unit
from silos.tasks import Silo
from tests import in_process_run
from tests.in_process_run import lines, notes
from tests.replies import with_payload
from tests.small_federation import DIM, SmallFederation, population
from tests.threaded_run import resolved

BITS = 8
LOOSE = 1e2 * math.sqrt(BITS)


def hashing(base: str) -> Objective:
    name, _, option = base.partition(" ")
    options = dict([option.split("=")]) if option else {}
    return Objective.model_validate({"base": name, "bits": BITS, "hidden": 16, **options})


#: Method, base objective, and the norm of the longest feature that its class prototypes average.
BOUNDS = [
    ("fedproto", "info_nce", 1.0),
    ("mfcpl", "info_nce", 1.0),
    ("fedbridge", "info_nce", 1.0),
    ("fedhap", "info_nce", 1.0),
    ("fedproto", "shdch", math.sqrt(BITS)),
    ("mfcpl", "dgcpn", math.sqrt(BITS)),
    ("fedhap", "shdch", math.sqrt(BITS)),
    ("fedhap", "shdch tanh=text", LOOSE),
    ("fedproto", "dscmr", LOOSE),
    ("mfcpl", "dcmh", LOOSE),
    ("fedhap", "triplet", LOOSE),
    ("plfedcmh", "shdch", LOOSE),
]
every_bound = pytest.mark.parametrize(("name", "base", "longest"), BOUNDS, ids=[f"{n}-{b}" for n, b, _ in BOUNDS])


def make_population(name: str, base: str, **more: Any) -> SmallFederation:
    return population(name, objective=Objective() if base == "info_nce" else hashing(base), **more)


def check(run: SmallFederation, *payloads: Payload) -> None:
    run.protocol.check(payloads)


def payload_of(reply: Update, kind: type[Any]) -> Any:
    (found,) = [payload for payload in reply.payloads if isinstance(payload, kind)]
    return found


def with_first_norm(rows: npt.NDArray[np.float32], length: float) -> npt.NDArray[np.float32]:
    """``rows`` (n, d) with the first one replaced by a vector of norm ``length``."""
    changed = rows.copy()
    changed[0] = length / math.sqrt(rows.shape[1])
    return changed


def refusals(out: Path) -> list[tuple[str, str, str]]:
    records = [record for _, record in read_log(RunFolder(out).messages("coordinator"))]
    return [(each.peer, each.reason, each.detail) for each in records if isinstance(each, RefusedRecord)]


# --------------------------------------------------------------------------- class prototypes
@pytest.mark.parametrize("name", ["fedproto", "mfcpl"])
def test_huge_prototypes_of_one_silo_do_not_end_the_run(name: str, tiny: Path, tmp_path: Path) -> None:
    poison = "faults=[{kind: prototype_poisoning, silos: [silo-00], scale: 1.0e+30}]"
    outcome = in_process_run.run(resolved(tiny, f"protocol={{name: {name}}}", poison, "participation=1.0"), tmp_path)
    assert outcome.phase is Phase.DONE
    assert [line["replies"] for line in lines(tmp_path, "merge")] == [["silo-01", "silo-02", "silo-03"]] * 4
    assert {(note["silo"], note["reason"]) for note in notes(tmp_path, LogEvent.TASK_FAILED)} == {
        ("silo-00", "malformed")
    }
    assert {(peer, reason) for peer, reason, _ in refusals(tmp_path)} == {("silo-00", "malformed")}
    assert all(detail.endswith("allowed: at most 1.001") for _, _, detail in refusals(tmp_path))


@every_bound
def test_a_class_prototype_above_the_norm_bound_is_refused_and_the_error_names_the_bound(
    name: str, base: str, longest: float
) -> None:
    run = make_population(name, base)
    run.round()
    for reply in (replies := run.replies()):
        if ClassPrototypes not in map(type, reply.payloads):
            continue
        found = payload_of(reply, ClassPrototypes)
        longest_allowed = dataclasses.replace(found, prototypes=with_first_norm(found.prototypes, longest))
        check(run, *with_payload(reply, longest_allowed).payloads)
        for length in (1.002 * longest, 1e30, 3e38):
            lie = dataclasses.replace(found, prototypes=with_first_norm(found.prototypes, length))
            with pytest.raises(RemoteWireError, match=f"at most {longest * 1.001:.4g}") as caught:
                check(run, *with_payload(reply, lie).payloads)
            assert caught.value.reason == "malformed"
    assert replies


def test_class_counts_whose_sum_overflows_int64_are_refused() -> None:
    run = population("mfcpl", {"classes": 3}, labels=())
    replies = run.replies()
    lie = dataclasses.replace(payload_of(replies[0], ClassPrototypes), counts=np.full(3, (1 << 63) - 1))
    with pytest.raises(FieldError):  # without the check the sum overflows to negative counts, which cannot be sent
        merged = run.protocol.merge(run.state, [with_payload(each, lie) for each in (replies[0], replies[3])], 0)
        run.protocol.task(merged.state, run.eligible[0])
    with pytest.raises(RemoteWireError, match="samples") as caught:
        check(run, *with_payload(replies[0], lie).payloads)
    assert caught.value.reason == "malformed"


# --------------------------------------------------------------------------- one prototype per modality
ANCHORED = ["fedavg", "creamfl", "rcsr"]


@pytest.mark.parametrize("name", ANCHORED)
@pytest.mark.parametrize("length", [3e37, 1e-6])
def test_only_the_direction_of_a_modality_prototype_counts(name: str, length: float) -> None:
    run = population(name)
    run.round()
    replies = run.replies()

    def merged(scale: float) -> torch.Tensor:
        found = payload_of(replies[0], ModalityPrototypes)
        factor = np.float32(-scale)
        lie = dataclasses.replace(found, image=factor * found.image, text=factor * found.text)
        lying = [with_payload(replies[0], lie), *replies[1:]]
        return run.protocol.merge(run.state, lying, 1).state.tensors[prototypes.PROTOTYPES]

    torch.testing.assert_close(merged(length), merged(1.0))
    honest = run.protocol.merge(run.state, replies, 1).state.tensors[prototypes.PROTOTYPES]
    assert ((honest * merged(length)).sum(1) > 0).all()


# --------------------------------------------------------------------------- public representations
@pytest.mark.parametrize(("length", "dtype"), [(1e20, np.float32), (3e38, np.float32), (6e4, np.float16),
                                               (1.01, np.float16), (0.98, np.float32)])  # fmt: skip
def test_a_public_representation_that_is_not_of_unit_length_is_refused(length: float, dtype: Any) -> None:
    run = population("creamfl_public")
    for reply in run.replies():
        found = payload_of(reply, Representations)
        lie = dataclasses.replace(found, values=with_first_norm(found.values.astype(np.float32), length).astype(dtype))
        with pytest.raises(RemoteWireError, match="here 1 within") as caught:
            check(run, *with_payload(reply, lie).payloads)
        assert caught.value.reason == "malformed"


@pytest.mark.parametrize("length", [0.0, 1.0])
def test_unit_and_zero_vectors_pass_as_float16_and_float32(length: float) -> None:
    generator = np.random.default_rng(0)
    run = population("creamfl_public")
    for reply in run.replies():
        check(run, *reply.payloads)
        found = payload_of(reply, Representations)
        values = generator.standard_normal(found.values.shape) ** 3  # entries of many magnitudes
        values /= np.linalg.norm(values, axis=1, keepdims=True)
        values[0] *= length
        for dtype in (np.float16, np.float32):
            check(run, *with_payload(reply, dataclasses.replace(found, values=values.astype(dtype))).payloads)


@pytest.fixture(scope="module")
def public(features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny feature set with 20 of its items in the public split."""
    with np.load(features) as given:
        arrays = dict(given)
    arrays["split"] = arrays["split"].astype("U8")
    arrays["split"][:20] = "public"
    path = tmp_path_factory.mktemp("public") / "public.npz"
    np.savez(path, **arrays)
    return path


# --------------------------------------------------------------------------- many public items
def weights_without_blocks(representations: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Item weights (silos, items) computed from all scores at once."""
    return (representations @ other.T).log_softmax(2).diagonal(dim1=1, dim2=2).softmax(0)


def representations(silos: int, items: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(silos)
    drawn = torch.randn(silos + 1, items, 16, generator=generator)
    return 4 * unit(drawn[1:]), unit(drawn[0])


@pytest.mark.parametrize("most", [1, 3 * 37 * 5])
def test_weights_computed_in_blocks_equal_those_computed_at_once(most: int) -> None:
    given = representations(3, 37)
    found = creamfl_public.item_weights(*given, most)
    torch.testing.assert_close(found, weights_without_blocks(*given))
    torch.testing.assert_close(found.sum(0), torch.ones(37))


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("most", [1 << 14])
def test_no_more_scores_are_held_at_once_than_allowed(most: int) -> None:
    given = representations(5, 1000)
    with Largest() as largest:
        creamfl_public.item_weights(*given, most)
    assert largest.elements <= max(most, given[0].numel())


def test_a_reply_about_many_public_items_is_not_oversized(monkeypatch: pytest.MonkeyPatch) -> None:
    run, items = population("creamfl_public"), 200_000
    layout = types.SimpleNamespace(nbytes=0)
    public = run.protocol.public  # type: ignore[attr-defined]
    many = dataclasses.replace(public.dataset, rows=torch.arange(items))
    monkeypatch.setattr(run.protocol, "public", dataclasses.replace(public, dataset=many))
    run_context: Any = types.SimpleNamespace(traits=run.protocol.traits(), context=types.SimpleNamespace(layout=layout))
    reply = Representations(np.full((2 * items, DIM), DIM**-0.5, np.float32), "both")
    check(run, reply)
    header = Header(run="run", kind=Kind.REPLY, sender="silo-00", receiver="coordinator", sequence=1, sent_at=0.0,
                    reply_to=1, base_version=0)  # fmt: skip
    size = codec.body_size(codec.encode_body(Message(header, (reply,))))
    assert size <= largest_body(run_context, least=0) < 2 * size


# --------------------------------------------------------------------------- updates, losses and counts
def refused(run: SmallFederation, reply: Update, **more: Any) -> str | None:
    """The reason why the coordinator refuses a reply of a silo with 20 samples; None if it accepts it."""
    header = Header(
        run="run-0",
        kind=Kind.REPLY,
        sender=reply.silo.name,
        receiver="coordinator",
        sequence=1,
        reply_to=1,
        sent_at=0.0,
    )
    uploads = run.protocol.uploads(reply.silo)
    layers = run.protocol.traits().shared_layers
    sent = tuple(shortened(each, run.context.layout, reply.silo) for each in reply.payloads)
    try:
        check_reply(Message(header, sent), uploads, run.context, reply.silo, layers, samples=20, **more)
    except RemoteWireError as error:
        return error.reason
    return None


@pytest.mark.parametrize("theta_length", [0.01, 30.0])
def test_an_update_with_an_implausible_norm_is_refused(theta_length: float) -> None:
    run = make_population("fedavg", "info_nce")
    run.round()
    (reply, *_) = run.replies()
    theta = run.state.theta * theta_length / run.state.theta.norm()
    delta = payload_of(reply, Delta)
    most = LONGEST * max(1.0, theta_length)
    for length, reason in ((0.99 * most, None), (1.01 * most, "malformed"), (9e14, "malformed")):
        buffer = np.zeros_like(delta.buffer)
        buffer[0] = length
        lie = with_payload(reply, dataclasses.replace(delta, buffer=buffer))
        assert refused(run, lie, theta=theta) == reason, length


def test_an_implausible_loss_is_refused_and_a_run_with_two_such_silos_completes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_population("fedavg", "info_nce")
    run.round()
    (reply, *_) = run.replies()
    for value, reason in ((2e7, None), (-2e7, None), (2.1e7, "malformed"), (-1.7e308, "malformed")):
        assert refused(run, with_payload(reply, Loss(value))) == reason
    respond = Silo.respond

    def answer(silo: Silo, message: Message) -> tuple[Payload, ...]:
        found = respond(silo, message)
        lies = silo.facts.name in ("silo-00", "silo-01")
        return tuple(Loss(1.7e308) if lies and isinstance(each, Loss) else each for each in found)

    monkeypatch.setattr(Silo, "respond", answer)
    outcome = in_process_run.run(resolved(tiny, "protocol={name: rcsr}", "participation=1.0"), tmp_path)
    assert outcome.phase is Phase.DONE
    assert {(peer, reason) for peer, reason, _ in refusals(tmp_path)} == {
        ("silo-00", "malformed"),
        ("silo-01", "malformed"),
    }


@pytest.mark.parametrize("name", ["fedscmr", "fedcmr"])
def test_a_silo_cannot_report_more_label_categories_than_exist(name: str) -> None:
    objective = Objective.model_validate({"base": "dscmr", "bits": BITS, "enhance": True})
    run = population(name, objective=objective)
    run.round()
    classes = len(run.context.label_names)
    for reply in run.replies():
        assert refused(run, reply) is None
        assert refused(run, with_payload(reply, LabelCount(classes))) is None
        assert refused(run, with_payload(reply, LabelCount(classes + 1))) == "malformed"


@pytest.mark.parametrize(
    ("name", "base", "options", "twice"),
    [
        ("fedproto", "info_nce", {}, False),
        ("mfcpl", "info_nce", {}, False),
        ("plfedcmh", "shdch", {}, False),
        ("fedhap", "shdch", {}, True),
        ("fedcafe", "dcmh", {}, False),
        ("fedcafe", "dcmh", {"memory": "kmeans_two_stage"}, True),
    ],
)
def test_a_prototype_row_cannot_count_more_samples_than_its_silo_has(
    name: str, base: str, options: dict[str, Any], *, twice: bool
) -> None:
    run = make_population(name, base, options=options) if options else make_population(name, base)
    run.round()
    assert run.protocol.traits().counts_items_twice is twice
    tried = 0
    for reply in run.replies():
        counted = 2 if twice and reply.silo.paired else 1
        for kind, field in ((ClassPrototypes, "counts"), (Memory, "support")):
            for payload in (each for each in reply.payloads if isinstance(each, kind)):
                assert refused(run, reply, counted=counted) is None
                counts = getattr(payload, field).copy()
                for most, reason in ((20 * counted, None), (20 * counted + 1, "malformed")):
                    counts[0] = most
                    lie = with_payload(reply, dataclasses.replace(payload, **{field: counts}))
                    assert refused(run, lie, counted=counted) == reason
                tried += 1
    assert tried
