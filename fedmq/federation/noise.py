"""Clipping and noise of what a silo sends, and the epsilon of all of it together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedmq import seeds
from fedmq.config.privacy import AdaptiveClip, Noise, Privacy, Statistic
from fedmq.config.scenario import Scenario, Training
from fedmq.errors import InputError
from fedmq.wire.fields import Real, Tensor
from fedmq.wire.payloads import ClassPrototypes, ClipNorm, Delta, DiscriminatorDelta, Memory, PartialDelta, Payload

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
#: Payload types that are updates: ``privacy.clip_norm`` and compression apply to them.
UPDATES = (Delta, PartialDelta, DiscriminatorDelta)
#: What a silo reports for adaptive clipping: 1/2 if its update is no longer than the clipping norm, otherwise -1/2.
CLIP_BIT = "clip_bit"


def clip(values: F32, norm: float) -> F32:
    """Scale values [P] down to an L2 norm of at most ``norm``; return them unchanged if their norm is smaller."""
    length = float(np.linalg.norm(values.astype(np.float64)))
    return values if length <= norm else (values * np.float32(norm / length))


def transform(values: F32, noise: Noise, source: int | bytes, path: tuple[str | int, ...]) -> F32:
    """Clip, then add noise of standard deviation ``noise_multiplier * clip_norm`` (DP-FedAvg, McMahan et al. 2018).

    An update of zeros gets the same noise: a coordinator that could send a model from which it results, e.g. by a
    rate at which each step underflows, would learn from the missing noise.

    Args:
        values: float32 [P].
        noise: clipping and noise.
        source: source of the noise: a secret of 32 bytes, or the scenario's seed, which gives no privacy against a
            party that knows the seed.
        path: silo, base version and sequence, which name the draw.
    """
    clipped = clip(values, noise.clip_norm)
    if noise.noise_multiplier == 0:
        return clipped
    if isinstance(source, int):
        drawn = seeds.numpy_generator(source, "privacy", *path).standard_normal(values.size, dtype=np.float32)
    else:
        drawn = _secret_noise(source, path, clipped).astype(np.float32)
    return clipped + drawn * np.float32(noise.noise_multiplier * noise.clip_norm)


def normal(source: int | bytes, path: tuple[str | int, ...], values: npt.NDArray[Any]) -> F64:
    """Standard normal numbers, float64 [n], for a silo's share of the noise of a secure sum, or for a local step.

    Args:
        source: source of the noise, see :func:`transform`.
        path: name of the draw.
        values: what the noise is added to [n].
    """
    if isinstance(source, int):
        return seeds.numpy_generator(source, "privacy", *path).standard_normal(values.size)
    return _secret_noise(source, path, values)


def uniform(source: int | bytes, path: tuple[str | int, ...], values: npt.NDArray[Any], count: int) -> F64:
    """Uniform numbers in (0, 1], float64 [count].

    The draw has a name, and is for some values: a secret source, see :func:`transform`, gives others for other values.
    """
    if isinstance(source, int):
        return 1.0 - seeds.numpy_generator(source, "privacy", *path).random(count)
    return _secret_uniform(source, path, values, count)


def _secret_noise(secret: bytes, path: tuple[str | int, ...], values: npt.NDArray[Any]) -> F64:
    """Standard normal noise [P] that is pseudorandom to anyone without the secret.

    It is keyed by the values as well: a repeated task gets the same noise, so that two replies do not average it out;
    a different update, in another run with the same keys, gets other noise, so that their difference does not cancel
    it.
    """
    # Box and Muller 1958.
    first, second = np.split(_secret_uniform(secret, path, values, 2 * ((values.size + 1) // 2)), 2)
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: values.size]


def _secret_uniform(secret: bytes, path: tuple[str | int, ...], values: npt.NDArray[Any], count: int) -> F64:
    """53-bit uniform numbers in (0, 1] [count], keyed as :func:`_secret_noise`."""
    content = blake3(seeds.derive(0, "noise", *path).to_bytes(8, "big"), key=secret)
    content.update(np.ascontiguousarray(values).view(np.uint8).data)
    stream = Cipher(algorithms.AES256(content.digest()), modes.CTR(bytes(16))).encryptor()
    words = np.frombuffer(stream.update(bytes(8 * count)), np.uint64)
    return ((words >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53


def at_norm(privacy: Privacy, task: Iterable[Payload]) -> Privacy:
    """The scenario's options with the present clipping norm, which a task carries if clipping is adaptive."""
    norm = next((payload.value for payload in task if isinstance(payload, ClipNorm)), None)
    return privacy if norm is None or privacy.adaptive_clip is None else privacy.model_copy(update={"clip_norm": norm})


def next_norm(norm: float, unclipped: float, options: AdaptiveClip) -> float:
    """The clipping norm after a round (Andrew et al. 2021, algorithm 1): C exp(-eta (b - gamma)), from 1e-6 to 1e6.

    Args:
        norm: C.
        unclipped: b, the fraction of the round's updates that were no longer than C, with noise.
        options: gamma and eta.
    """
    change = min(max(-options.rate * (unclipped - options.quantile), -100.0), 100.0)
    return min(max(norm * math.exp(change), 1e-6), 1e6)


def noise_of(kind: str, privacy: Privacy) -> Noise | None:
    """Clipping and noise of a kind of payload; None if it is sent as it is."""
    if kind == CLIP_BIT:
        adaptive = privacy.adaptive_clip
        return None if adaptive is None else Noise(clip_norm=0.5, noise_multiplier=adaptive.noise_multiplier)
    if kind not in {update.KIND for update in UPDATES}:
        return {str(name): noise for name, noise in privacy.statistics.items()}.get(kind)
    if privacy.clip_norm is None:
        return None
    return Noise(clip_norm=privacy.clip_norm, noise_multiplier=privacy.noise_multiplier)


def protected(
    payload: Payload,
    privacy: Privacy,
    source: int | bytes,
    path: tuple[str | int, ...],
    *,
    idle: bool,
    summed: bool = False,
) -> Payload:
    """A payload as it is sent: without rows of too few samples, clipped and noised as the scenario says.

    Args:
        payload: as the method made it.
        privacy: the scenario's options.
        source: source of the noise, see :func:`transform`.
        path: silo, base version and sequence.
        idle: the method left the silo without training, whatever its data are: its update of zeros gets no noise.
        summed: it is only clipped, since a secure sum adds the noise (:func:`fedmq.federation.sums.scales`).
    """
    if isinstance(payload, ClassPrototypes | Memory) and privacy.least_support > 1:
        payload = _without_rare_rows(payload, privacy.least_support)
    noise = noise_of(payload.KIND, privacy)
    update = isinstance(payload, UPDATES)
    if noise is None or (update and idle):
        return payload
    noise = Noise(clip_norm=noise.clip_norm) if summed else noise
    # Each payload of a reply needs its own noise.
    path = path if isinstance(payload, Delta | PartialDelta) else (*path, payload.KIND)
    fields = {
        name: np.asarray(getattr(payload, name))
        for name, spec in payload.FIELDS.items()
        if isinstance(spec, Real) or (isinstance(spec, Tensor) and "float32" in spec.dtypes)
    }
    flat = np.concatenate([np.ravel(value).astype(np.float32, copy=False) for value in fields.values()])
    sent = transform(flat, noise, source, path)
    if sent is flat:
        return payload
    changed = dict[str, float | npt.NDArray[np.floating]]()
    ends = np.cumsum([value.size for value in fields.values()])
    for (name, value), part in zip(fields.items(), np.split(sent, ends[:-1]), strict=True):
        spec = payload.FIELDS[name]
        if isinstance(spec, Real):
            changed[name] = float(np.clip(part[0], spec.low, spec.high))
        else:
            limit = np.finfo(value.dtype).max
            changed[name] = np.ascontiguousarray(np.clip(part, -limit, limit).astype(value.dtype).reshape(value.shape))
    return cast(Payload, replace(cast(Any, payload), **changed))


def _without_rare_rows(payload: ClassPrototypes | Memory, least: int) -> Payload:
    """A payload whose rows of fewer than ``least`` samples are zero, and marked as absent."""
    both = (
        (payload.prototypes, payload.counts)
        if isinstance(payload, ClassPrototypes)
        else (payload.centroids, payload.support)
    )
    rare = both[1] < least
    rows, counts = np.where(rare[:, None], np.float32(0), both[0]), np.where(rare, 0, both[1])
    if isinstance(payload, ClassPrototypes):
        return replace(payload, prototypes=rows, counts=counts)
    return replace(payload, centroids=rows, support=counts)


# ---------------------------------------------------------------------------------------------------------- epsilon
def spent(kinds: Iterable[str], privacy: Privacy) -> float:
    """Sum of 1 / z^2 over the noise multipliers z of payloads of these kinds; those without noise do not count."""
    found = (noise_of(kind, privacy) for kind in kinds)
    return float(sum(noise.noise_multiplier**-2 for noise in found if noise is not None and noise.noise_multiplier))


def epsilon_of(spent: float, delta: float, *, sums: bool = False) -> float:
    """Epsilon of Gaussian mechanisms together, at ``delta``; 0 of none.

    Each is one payload of a silo, against zeros in its place before the noise. The adaptive composition of those with
    noise multipliers z_i is one Gaussian mechanism with multiplier z, 1 / z^2 = sum_i 1 / z_i^2 (Dong et al. 2022,
    Corollary 3.3), whose epsilon is exact (Balle and Wang 2018, Theorem 8).

    Args:
        spent: sum of 1 / z_i^2, :func:`spent`.
        delta: in (0, 1).
        sums: some of them are secure sums. Their discrete noise satisfies zero-concentrated differential privacy with
            the Gaussian's rho, spent / 2 of all together (Bun and Steinke 2016); the epsilon that follows from rho is
            an upper bound of the Gaussian's.
    """
    import dp_accounting  # noqa: PLC0415 - takes a second; most runs do without

    if not spent:
        return 0.0
    if sums:
        event = dp_accounting.ZCDpEvent(spent / 2)
        return float(dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(delta))
    return float(dp_accounting.get_epsilon_gaussian(spent**-0.5, delta))


def step_sampling(training: Training, items: int) -> tuple[float, int]:
    """With ``privacy.items`` and n training items: the probability that a step takes a group, and a task's steps."""
    return min(1.0, training.batch_size / items), training.local_epochs * -(-items // training.batch_size)


def spent_by_items(kinds: Iterable[str], privacy: Privacy) -> float:
    """As :func:`spent`, of payloads besides updates; 0 in a run with secure sums, whose noise is not a silo's own."""
    updates = {update.KIND for update in UPDATES}
    return 0.0 if privacy.secure_aggregation else spent((kind for kind in kinds if kind not in updates), privacy)


def item_epsilon(scenario: Scenario, items: int, tasks: int, other: float, delta: float) -> float:
    """Epsilon of one training item of a silo: of its local steps, and of what it sends with noise besides updates.

    Two neighbouring data sets differ in one item, which is replaced by another. A step adds the clipped gradients of
    Poisson-sampled groups, of which the item's goes from one vector of norm at most C to another. The pair
    (1 - q) N(0, z²) + q N(±1, z²) dominates such a step: E max(0, P - a Q) falls with the covariance of the two
    likelihood ratios and grows with the vectors' norms, so opposite vectors of norm C are the worst. dp-accounting
    composes the privacy losses of this pair (Koskela et al. 2020; Zhu et al. 2022), which are rounded up to multiples
    of a thousandth of the largest event's epsilon.

    Args:
        scenario: with noise in local steps.
        items: number of the silo's training items.
        tasks: number of tasks that it answered.
        other: what its payloads spent, :func:`spent_by_items`: an item changes each of them from one of norm at most
            clip_norm to another as well.
        delta: in (0, 1).
    """
    options, (rate, steps) = scenario.privacy.items, step_sampling(scenario.training, items)
    assert options is not None  # noqa: S101 - only such runs have epsilon of items
    return _of_steps(rate, steps * tasks, options.noise_multiplier, other, delta)


@lru_cache(maxsize=4096)  # takes 20 ms; a run's start asks for the same more than once
def _of_steps(rate: float, steps: int, noise_multiplier: float, other: float, delta: float) -> float:
    import dp_accounting  # noqa: PLC0415 - takes a second; most runs do without
    from dp_accounting import pld  # noqa: PLC0415

    gaussian = dp_accounting.GaussianDpEvent
    rest = other**-0.5 if other else math.inf
    interval = 1e-3 * max(0.1, dp_accounting.get_epsilon_gaussian(min(noise_multiplier, rest) / 2, delta))
    replaced = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = pld.PLDAccountant(replaced, value_discretization_interval=interval)
    if steps:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian(noise_multiplier)), steps)
    if other:
        accountant.compose(gaussian(rest))
    return float(accountant.get_epsilon(delta))


def spent_by_task(privacy: Privacy, uploads: Iterable[frozenset[type[Payload]]]) -> float:
    """What the reply to a task spends, :func:`spent`; all kinds that any silo uploads count for every silo."""
    return spent({kind.KIND for one in uploads for kind in one} | {CLIP_BIT}, privacy)


def epsilon_of_tasks(
    scenario: Scenario, uploads: Iterable[frozenset[type[Payload]]], items: int, tasks: int, delta: float
) -> float:
    """Epsilon of a silo, with ``privacy.items`` of each of its items, after some tasks; ``privacy.budget`` limits it.

    Args:
        scenario: the scenario.
        uploads: payload kinds that each silo sends; all of them count for every silo.
        items: number of the silo's training items.
        tasks: number of tasks that it answered.
        delta: in (0, 1).
    """
    privacy = scenario.privacy
    if privacy.items is None:
        sums = privacy.secure_aggregation is not None
        return epsilon_of(tasks * spent_by_task(privacy, uploads), delta, sums=sums)
    kinds = {kind.KIND for one in uploads for kind in one}
    return item_epsilon(scenario, items, tasks, tasks * spent_by_items(kinds, privacy), delta)


def affordable_tasks(
    scenario: Scenario, uploads: Iterable[frozenset[type[Payload]]], items: Iterable[int], most: int
) -> dict[int, int] | None:
    """Numbers of tasks, up to ``most``, that silos may answer within ``privacy.budget``; None without a budget.

    All of the uploaded kinds count for every silo. The keys of the result are numbers of training items.
    """
    if (budget := scenario.privacy.budget) is None:
        return None
    kinds, found, near = tuple(uploads), dict[int, int](), 1

    def largest(n: int, low: int, high: int) -> int:
        """The largest number from ``low``, which is known to be within the budget, to ``high``."""
        above, tasks, step = high + 1, max(near, low + 1), 1
        while above - low > 1:
            tasks = tasks if low < tasks < above else (low + above) // 2
            if epsilon_of_tasks(scenario, kinds, n, tasks, budget.delta) <= budget.epsilon:
                low, tasks = tasks, tasks + step
            else:
                above, tasks = tasks, tasks - step
            step *= 2
        return low

    def fill(sizes: Sequence[int], low: int, high: int) -> None:
        if low == high or not sizes:
            found.update(dict.fromkeys(sizes, low))
            return
        middle = len(sizes) // 2
        found[sizes[middle]] = tasks = largest(sizes[middle], low, high)
        fill(sizes[:middle], low, tasks)
        fill(sizes[middle + 1 :], tasks, high)

    for sizes in _by_steps(scenario, items):
        near = largest(sizes[0], 0, most)
        fill(sizes, near, largest(sizes[-1], near, most))
    return found


def _by_steps(scenario: Scenario, items: Iterable[int]) -> list[list[int]]:
    """Numbers of items, ascending, by the number of steps of a task.

    With as many steps, epsilon falls as the number of items grows: a step takes an item with a lower probability.
    dp-accounting's bound of it falls, too, since it connects points of the privacy curve at the same epsilons. Without
    noise in local steps, epsilon does not depend on the number of items.
    """
    groups = dict[int, list[int]]()
    for n in sorted({*items}):
        steps = 0 if scenario.privacy.items is None else step_sampling(scenario.training, n)[1]
        groups.setdefault(steps, []).append(n)
    return [*groups.values()]


def most_exposed(scenario: Scenario, items: Iterable[int]) -> list[int]:
    """Of numbers of items, those with the largest epsilon among numbers with as many steps of a task."""
    return [sizes[0] for sizes in _by_steps(scenario, items)]


def check_privacy(scenario: Scenario, uploads: Iterable[frozenset[type[Payload]]], samples: Sequence[int]) -> None:
    """Refuse options that a method's payloads cannot keep.

    Args:
        scenario: the scenario.
        uploads: payload kinds of each eligible silo.
        samples: number of training items of each eligible silo.

    Raises:
        InputError: no silo sends a kind that ``privacy.statistics`` has; a kind has no noise under a budget; the budget
            allows no task; or a silo has too few items for a prototype.
    """
    privacy, label = scenario.privacy, scenario.protocol.label
    kinds = {kind.KIND: kind for one in uploads for kind in one}
    for statistic in privacy.statistics:
        if statistic not in kinds:
            able = ", ".join(sorted(kinds))
            raise InputError("privacy.statistics", statistic, f"kinds that silos of {label} send, which are {able}")
    if privacy.budget is not None:
        _check_budget(scenario, kinds, samples)
    if privacy.least_support > 1 and kinds.keys() & {"modality_prototypes", "router_sums"}:
        fewest = min(samples)
        if fewest < privacy.least_support:
            allowed = f"at most {fewest}, the training items of the smallest silo, whose prototype is a mean of so many"
            raise InputError("privacy.least_support", privacy.least_support, allowed)


def _check_budget(scenario: Scenario, kinds: Mapping[str, type[Payload]], samples: Iterable[int]) -> None:
    privacy, label = scenario.privacy, scenario.protocol.label
    assert privacy.budget is not None  # noqa: S101 - see check_privacy
    updates = {kind for kind in kinds if kinds[kind] in UPDATES}
    covered = updates if privacy.items is not None else set()  # by the noise in local steps
    bare = [kind for kind in sorted(kinds.keys() - covered) if not spent((kind,), privacy)]
    if never := [kind for kind in bare if kind not in updates and kind not in get_args(Statistic)]:
        found = f"with {label}, whose silos send {', '.join(never)}, to which no noise can be added"
        raise InputError("privacy.budget", found, "null, or another method or other options of it, without these")
    if bare:
        keys = [f"statistics.{kind}.noise_multiplier" for kind in bare if kind not in updates]
        keys[:0] = ["noise_multiplier"] * bool(updates & {*bare})
        also = f"; likewise {', '.join(keys[1:])}" if keys[1:] else ""
        allowed = f"above 0 with privacy.budget, as silos of {label} send {', '.join(bare)} in each reply{also}"
        raise InputError(f"privacy.{keys[0]}", 0, allowed)
    uploads, budget = [frozenset(kinds.values())], privacy.budget
    of_one_reply = [
        (epsilon_of_tasks(scenario, uploads, n, 1, budget.delta), n) for n in most_exposed(scenario, samples)
    ]
    least, n = max(of_one_reply)
    if least > budget.epsilon:
        whose = "" if privacy.items is None else f" of a silo with {n} training items"
        raise InputError(
            "privacy.budget.epsilon",
            budget.epsilon,
            f"at least {least:.3g}, which one reply{whose} spends; or more noise",
        )
