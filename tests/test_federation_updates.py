"""Clipping and noise as silos apply them in a whole run: noise has the configured scale and never repeats."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from fedmq.config.privacy import Privacy
from fedmq.federation.noise import transform
from fedmq.federation.protocol import Task
from fedmq.wire.payloads import Delta, DiscriminatorDelta, Payload
from silos.tasks import Silo
from tests import in_process_run
from tests.threaded_run import resolved, run

CLIP, MULTIPLIER = 0.25, 3.0
SILOS = ("silos.count=2", "missing_modality={}", "participation=1.0", "rounds=2", "evaluation.every=0")
NOISY = f"privacy={{clip_norm: {CLIP}, noise_multiplier: {MULTIPLIER}}}"

Key = tuple[str, int, str]
F32 = npt.NDArray[np.float32]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[Key, tuple[F32, F32]]:
    """Updates before and after the transform by silo, task and kind; the run itself is unchanged."""
    real, seen = Silo.transform, dict[Key, tuple[F32, F32]]()

    def watched(silo: Silo, payload: Payload, task: Task, *, idle: bool = False) -> Payload:
        after = real(silo, payload, task, idle=idle)
        if isinstance(payload, Delta | DiscriminatorDelta):
            before, now = (np.array(each.buffer) for each in (payload, after))  # type: ignore[attr-defined]
            assert (silo.facts.name, task.sequence, payload.KIND) not in seen
            seen[silo.facts.name, task.sequence, payload.KIND] = before, now
        return after

    monkeypatch.setattr(Silo, "transform", watched)
    return seen


def clipped(update: F32, norm: float = CLIP) -> F32:
    return (update * min(1.0, norm / float(np.linalg.norm(update)))).astype(np.float32)


def test_every_update_of_a_run_has_independent_noise_of_the_configured_scale(
    tiny: Path, tmp_path: Path, sent: dict[Key, tuple[F32, F32]]
) -> None:
    hashing = ("protocol=fedhap", "objective={base: dcmh, bits: 8, hidden: 16}", "training.learning_rate=0.05")
    in_process_run.run(resolved(tiny, *SILOS, *hashing, NOISY), tmp_path)
    trained = {key: pair for key, pair in sent.items() if pair[0].any()}
    # Both silos' updates of both rounds, and of the second, where there are prototypes, their discriminators'.
    assert sorted(key[2] for key in trained) == ["delta"] * 4 + ["discriminator_delta"] * 2
    assert max(float(np.linalg.norm(before)) for before, _ in trained.values()) > CLIP
    noise = {key: after - clipped(before) for key, (before, after) in trained.items()}
    for key, vector in noise.items():
        deviation = float(vector.std())
        assert deviation == pytest.approx(CLIP * MULTIPLIER, rel=5 / np.sqrt(2 * vector.size)), key
        assert abs(float(vector.mean())) < 5 * deviation / np.sqrt(vector.size), key
    shortest = min(map(len, noise.values()))
    for (one, a), (two, b) in itertools.combinations(noise.items(), 2):
        # Two unrelated vectors of n numbers have a correlation of about 1 / sqrt(n).
        assert abs(np.corrcoef(a[:shortest], b[:shortest])[0, 1]) < 6 / np.sqrt(shortest), (one, two)


@pytest.mark.slow
def test_without_noise_a_long_update_is_clipped_and_a_short_one_is_unchanged(
    tiny: Path, tmp_path: Path, sent: dict[Key, tuple[F32, F32]]
) -> None:
    in_process_run.run(resolved(tiny, *SILOS, "protocol=fedavg", "privacy.clip_norm=0.01"), tmp_path / "clipped")
    assert len(sent) == 4
    for before, after in sent.values():
        assert float(np.linalg.norm(before)) > 0.01
        np.testing.assert_allclose(after, clipped(before, 0.01), rtol=1e-5)
    sent.clear()
    in_process_run.run(resolved(tiny, *SILOS, "protocol=fedavg", "privacy.clip_norm=1e6"), tmp_path / "whole")
    assert all(np.array_equal(before, after) for before, after in sent.values())
    assert len(sent) == 4


SECRET = bytes(range(32))


def test_an_update_of_zeros_gets_noise_like_any_other() -> None:
    still = np.zeros(9, np.float32)
    for source, noise_from in ((0, "seed"), (SECRET, "key")):
        privacy = Privacy(clip_norm=1.0, noise_multiplier=2.0, noise_from=noise_from)
        assert transform(still, privacy, source, ("silo-00", 0, 1)).all()
    assert transform(still, Privacy(clip_norm=1.0), 0, ("silo-00", 0, 1)) is still, "without noise it stays zero"


def noise_of(secret: bytes, update: F32, path: tuple[str | int, ...] = ("silo-00", 0, 1)) -> F32:
    privacy = Privacy(clip_norm=1.0, noise_multiplier=2.0, noise_from="key")
    return (transform(update, privacy, secret, path) - clipped(update, 1.0)) / np.float32(2.0)


def test_secret_noise_is_normal_and_reproducible_only_with_the_same_secret_task_and_update() -> None:
    from scipy import stats

    size = 100_001
    update = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    noise = noise_of(SECRET, update)
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    np.testing.assert_array_equal(noise, noise_of(SECRET, update))
    nearly = update.copy()
    nearly[7] = np.nextafter(nearly[7], np.float32(9.0))
    others = (
        noise_of(bytes(32), update),
        noise_of(SECRET, nearly),
        noise_of(SECRET, update, ("silo-01", 0, 1)),
        noise_of(SECRET, update, ("silo-00", 0, 2)),
        np.roll(noise, 1),
        np.roll(noise, size // 2),  # the two halves of the Box-Muller pairs
    )
    for other in others:
        assert abs(np.corrcoef(noise, other)[0, 1]) < 6 / np.sqrt(size)


@pytest.mark.slow
def test_noise_from_keys_is_the_same_with_the_same_keys_and_differs_with_other_keys(tiny: Path, tmp_path: Path) -> None:
    def model(out: str, noise_from: str, keys: str | None = None) -> str:
        folder = tmp_path / out
        if keys:
            shutil.copytree(tmp_path / keys / "keys", folder / "keys")
        secret = f"privacy={{clip_norm: {CLIP}, noise_multiplier: {MULTIPLIER}, noise_from: {noise_from}}}"
        outcome = run(resolved(tiny, *SILOS, "protocol=fedavg", secret), folder)
        digest: str = outcome.summary.model_digest
        return digest

    assert model("one", "key") != model("two", "key")
    assert model("again", "key", "one") == model("twice", "key", "one")
    # A new run with an old run's keys: noise from the seed is the same with any keys, noise from keys is not.
    assert model("three", "seed") == model("four", "seed", "one") != model("five", "key", "one")
