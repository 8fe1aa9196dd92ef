"""Noise and adaptive clipping under secure sums, and the epsilon of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import protocols
from coordinator.round_events import Stage
from fedmq.audit.dp_accounting import account
from fedmq.audit.log_checks import audit_run
from fedmq.config.privacy import AdaptiveClip, Privacy
from fedmq.config.resolve import read, resolve
from fedmq.errors import InputError
from fedmq.federation.noise import epsilon_of, next_norm
from fedmq.federation.sums import Scales, scales
from fedmq.runs.captured_payloads import read_captured
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import MergeLine
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.payloads import Delta, Payload
from protocols.parts import aggregation
from tests.secure_round import KINDS, NAMES, SIZES, Round, begin
from tests.small_federation import population
from tests.threaded_run import resolved, run

CLIP, NOISE = 0.25, 0.5
SUMS = "secure_aggregation: true"
NOISY = f"{SUMS}, clip_norm: {CLIP}, noise_multiplier: {NOISE}"


def noisy(tiny: Path, folder: Path, settings: str = NOISY) -> Round:
    """A round of FedAvg whose updates are as long as the clipping norm."""
    federation = population("fedavg", {"single_modality": "idle"}, kinds=KINDS, sizes=SIZES)
    generator, layout = np.random.default_rng(0), federation.model.layout
    replies = dict[str, tuple[Payload, ...]]()
    for silo in federation.context.silos:
        change = generator.standard_normal(layout.size).astype(np.float32)
        for branch, part in aggregation.branch_slices(layout).items():
            change[part] *= aggregation.owns(silo, branch)
        replies[silo.name] = (Delta(layout.digest, change * np.float32(CLIP / np.linalg.norm(change)), 5),)
    return begin(tiny, folder, federation, replies, "protocol=fedavg", f"privacy={{{settings}}}")


def without_noise(start: Round, alive: Sequence[str]) -> dict[str, np.ndarray]:
    """The weighted sums of these silos' updates."""
    agreed, found = start.coordinator._sum, dict[str, np.ndarray]()
    assert agreed is not None
    for name in alive:
        kept = start.silos[name]._kept
        assert kept is not None
        for place in agreed.places(name):
            section = agreed.weights.branches[place]
            weighted = kept.values[section].astype(np.float64) * agreed.row(name)[place]
            found[section] = found.get(section, 0.0) + weighted
    return found


@pytest.mark.parametrize("gone", [(), ("silo-03",)])
@pytest.mark.parametrize("source", ["seed", "key"])
def test_a_sum_has_at_least_the_noise_that_was_asked_for_whoever_drops_out(
    tiny: Path, tmp_path: Path, gone: Sequence[str], source: str
) -> None:
    start, alive = noisy(tiny, tmp_path, f"{NOISY}, noise_from: {source}"), [name for name in NAMES if name not in gone]
    start.reported(*NAMES)
    start.step(Stage.SHARE, *NAMES)
    start.step(Stage.MASK, *alive)
    start.step(Stage.REVEAL, *alive)
    agreed, sections = start.coordinator._sum, start.coordinator._sections
    assert agreed is not None and sections is not None
    for name, expected in without_noise(start, alive).items():
        place = agreed.weights.branches.index(name)
        row = agreed.weights.weights[place]
        # Of the silos of a branch, at least all but one are left: four of five silos are needed in each step.
        held, left = int((row > 0).sum()), int((row > 0).sum()) - 1
        added = sum(row[NAMES.index(each)] > 0 for each in alive)
        asked = NOISE * CLIP * row.max()
        noise = sections[place] - expected
        assert noise.std() == pytest.approx(asked * math.sqrt(added / left), rel=5 / math.sqrt(2 * noise.size))
        assert abs(noise.mean()) < 5 * noise.std() / math.sqrt(noise.size)
        assert added >= left and held == 4


def test_each_silo_s_share_is_its_own_and_a_repeated_step_has_the_same_one(tiny: Path, tmp_path: Path) -> None:
    start = noisy(tiny, tmp_path, f"{NOISY}, noise_from: key")
    start.reported(*NAMES)
    start.step(Stage.SHARE, *NAMES)
    request = start.coordinator.request(Stage.MASK, "silo-00")
    first, again = (start.answer("silo-00", request).buffer for _ in range(2))  # type: ignore[attr-defined]
    assert np.array_equal(first, again)


def test_rounding_makes_no_payload_longer_than_its_clip_norm(tiny: Path, tmp_path: Path) -> None:
    """In steps of the sums, all sections together; with few steps, so that rounding matters."""
    start = noisy(tiny, tmp_path)
    start.reported(*NAMES)
    start.step(Stage.SHARE, *NAMES)
    _, weights = start.coordinator.request(Stage.MASK, "silo-00")
    layout, privacy = start.layout, start.privacy.model_copy(update={"noise_multiplier": 2.0**22})
    found = scales(layout, privacy, weights.weights, 4)  # type: ignore[attr-defined]
    kept, square, longer = start.silos["silo-00"]._kept, 0.0, 0.0
    assert kept is not None
    for place, section in enumerate(layout.sizes):
        row = weights.weights[place]  # type: ignore[attr-defined]
        if not row[0]:
            continue
        step = found.bounds[place] / 2**30
        scaled = kept.values[section].astype(np.float64) * row[0] / step
        square += float((np.rint(scaled * found.factors[place]) ** 2).sum()) * (step / row.max()) ** 2
        longer += float((np.rint(scaled) ** 2).sum()) * (step / row.max()) ** 2
    assert square <= CLIP**2 < longer


def test_a_row_has_all_of_its_noise_since_it_is_opened_with_all_of_its_silos_only() -> None:
    federation = population("fedhap", {"hysteresis": 0.0}, kinds=KINDS, sizes=SIZES)
    layout = federation.protocol.sum_layout()
    statistics = {"class_prototypes": {"clip_norm": 2.0, "noise_multiplier": 1.0}}
    privacy = Privacy.model_validate({"secure_aggregation": True, "statistics": statistics})
    weights = np.zeros((len(layout.sizes), 5))
    weights[:, :4] = 0.25
    found: Scales = scales(layout, privacy, weights, 4)
    rows = found.shares[layout.first_row :]
    assert rows and all(share * math.sqrt(4) == pytest.approx(2.0 * 0.25) for share in rows)
    assert not any(found.shares[: layout.first_row]), "updates have no noise here"


def test_the_clip_norm_follows_the_quantile() -> None:
    """Andrew et al. 2021, algorithm 1, with norms that are known: it settles at their quantile."""
    norms, options, norm = np.linspace(0.0, 2.0, 1001), AdaptiveClip(quantile=0.8, rate=0.2), 0.01
    for _ in range(200):
        norm = next_norm(norm, float((norms <= norm).mean()), options)
    assert norm == pytest.approx(1.6, rel=0.01)


ADAPTIVE = (
    f"privacy={{{NOISY}, adaptive_clip: {{quantile: 0.5, rate: 1.0, noise_multiplier: 2.0}}, "
    "statistics: {loss: {clip_norm: 1.0, noise_multiplier: 3.0},"
    " modality_prototypes: {clip_norm: 2.0, noise_multiplier: 5.0}}}"
)
RUN = ("participation=1.0", "evaluation.every=0", "rounds=3", "protocol=fedavg", "silos.count=4")


def test_epsilon_is_the_accountants_for_the_same_events_and_the_clip_norm_moves(tiny: Path, tmp_path: Path) -> None:
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    (tmp_path / "scenario.yaml").write_text((scenario := resolved(tiny, *RUN, ADAPTIVE)).dump())
    run(scenario, tmp_path)
    audit = audit_run(tmp_path)
    assert not audit.findings
    found = account(tmp_path, audit, 1e-5)
    # Updates and bits together are one Gaussian mechanism (Andrew et al. 2021, theorem 1, with sigma_b = 2 / 2).
    combined = (NOISE**-2 + (2 * 1.0) ** -2) ** -0.5
    accountant = RdpAccountant()
    for _ in range(3):
        for multiplier in (combined, 3.0, 5.0):
            accountant.compose(GaussianDpEvent(multiplier))
    for silo in found.silos.values():
        assert silo.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
        assert silo.updates == 3 and "loss" not in silo.beside and "update_report" in silo.beside
    lines = [line for line in read_metrics(RunFolder(tmp_path)) if isinstance(line, MergeLine)]
    norms = [CLIP, *(float(line.model_extra["clip_norm"]) for line in lines)]  # type: ignore[index]
    assert len(norms) == 4
    assert all(0 < abs(math.log(after / before)) < 5 for before, after in pairwise(norms))


def test_concentrated_privacy_gives_an_upper_bound_of_the_gaussian_s_epsilon() -> None:
    for spent in (0.01, 1.0, 30.0):
        exact, bound = epsilon_of(spent, 1e-5), epsilon_of(spent, 1e-5, sums=True)
        assert exact < bound < 1.35 * exact + 0.05
    assert epsilon_of(0.0, 1e-5, sums=True) == 0.0


@pytest.mark.parametrize(
    ("privacy", "why"),
    [
        ("{clip_norm: 1.0, adaptive_clip: {}}", "adaptive_clip needs privacy.clip_norm and privacy.secure_aggregation"),
        ("{secure_aggregation: true, adaptive_clip: {}}", "adaptive_clip needs privacy.clip_norm and"),
        (f"{{{NOISY}, adaptive_clip: {{}}, budget: {{epsilon: 9}}}}", "both above 0 or both 0"),
    ],
)
def test_adaptive_clipping_needs_a_sum_and_counts_in_a_budget(tiny: Path, privacy: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        resolved(tiny, f"privacy={privacy}")


KEPT = {"update_report", "loss"}
ANYONE = "secure_aggregation: {max_weight: 1.0, min_contributors: 1.0}"  # RCSR's weights may choose one of four silos


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ("fedavg", KEPT),
        ("rcsr", KEPT | {"modality_prototypes", "geometry"}),
        ("{name: rcsr, router: false}", KEPT | {"geometry"}),
    ],
)
def test_what_a_coordinator_of_sums_can_keep_is_the_statistics_with_their_noise(
    tiny: Path, tmp_path: Path, method: str, kept: set[str]
) -> None:
    losses = {}
    for noise in ("", ", statistics: {loss: {clip_norm: 1.0, noise_multiplier: 0.5}}"):
        folder = tmp_path / f"run-{len(losses)}"
        settings = (*RUN, f"protocol={method}", "rounds=1", f"privacy={{{ANYONE}, capture: true{noise}}}")
        run(resolved(tiny, *settings), folder)
        (captured,) = read_captured(RunFolder(folder))
        assert all(set(payloads) == kept for payloads in captured.silos.values())
        losses[noise] = [float(payloads["loss"]["value"]) for payloads in captured.silos.values()]
        assert not audit_run(folder).findings
    plain, noisy_ones = losses.values()
    assert torch.tensor(noisy_ones).ne(torch.tensor(plain)).all()


def test_a_warning_says_that_captured_payloads_of_an_inline_run_cannot_be_attacked(tiny: Path) -> None:
    for launcher, lines in (("inline", 1), ("local", 0)):
        source = read(tiny, ("privacy.capture=true", f"launcher={launcher}"))
        assert sum("privacy.capture" in line for line in resolve(source, protocols).warnings) == lines
