"""What happens to an update besides the method: clipping, noise, and the weights of stale and rare replies.

Damping h(s) of the staleness s and the weight of rarely replying silos multiply a reply's weight before weights are
normalised, so they have an effect only among the replies of one merge. In a merge of a single reply, FedAsync's mixing
rate scales the step instead.
"""

from __future__ import annotations

import warnings
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from fedmq import seeds
from fedmq.config.sections import Privacy, Staleness
from fedmq.wire.payloads import Delta, DiscriminatorDelta, PartialDelta

F32 = npt.NDArray[np.float32]
#: Payload types to which the transforms apply: all updates.
TRANSFORMED = (Delta, PartialDelta, DiscriminatorDelta)


def clip(update: F32, norm: float) -> F32:
    """Scale an update [P] down to an L2 norm of at most ``norm``; return it unchanged if its norm is smaller."""
    length = float(np.linalg.norm(update.astype(np.float64)))
    return update if length <= norm else (update * np.float32(norm / length))


def transform(update: F32, privacy: Privacy, source: int | bytes, path: tuple[str | int, ...]) -> F32:
    """Clip, then add noise of standard deviation ``noise_multiplier * clip_norm`` (DP-FedAvg, McMahan et al. 2018).

    An update of zeros gets the same noise: a coordinator that could send a model from which it results, e.g. by a
    rate at which each step underflows, would learn from the missing noise.

    Args:
        update: float32 [P].
        privacy: the scenario's options; without clipping the same array is returned.
        source: source of the noise: a secret of 32 bytes, or the scenario's seed, which gives no privacy against a
            party that knows the seed.
        path: silo, base version and sequence, which name the draw.
    """
    if privacy.clip_norm is None:
        return update
    clipped = clip(update, privacy.clip_norm)
    if privacy.noise_multiplier == 0:
        return clipped
    if isinstance(source, int):
        noise = seeds.numpy_generator(source, "privacy", *path).standard_normal(update.size, dtype=np.float32)
    else:
        noise = _secret_noise(source, path, clipped)
    return clipped + noise * np.float32(privacy.noise_multiplier * privacy.clip_norm)


def _secret_noise(secret: bytes, path: tuple[str | int, ...], update: F32) -> F32:
    """Standard normal noise [P] that is pseudorandom to anyone without the secret.

    It is keyed by the update as well: a repeated task gets the same noise, so that two replies do not average it out; a
    different update, in another run with the same keys, gets other noise, so that their difference does not cancel it.
    """
    content = blake3(seeds.derive(0, "noise", *path).to_bytes(8, "big"), key=secret)
    content.update(np.ascontiguousarray(update).view(np.uint8).data)
    stream = Cipher(algorithms.AES256(content.digest()), modes.CTR(bytes(16))).encryptor()
    words = np.frombuffer(stream.update(bytes(16 * ((update.size + 1) // 2))), np.uint64)
    # Box and Muller 1958, from 53-bit uniform numbers in (0, 1].
    uniform = ((words >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
    first, second = np.split(uniform, 2)
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: update.size].astype(np.float32)


def polynomial(staleness: float, exponent: float) -> float:
    """h(s) = (1 + s)^-a (Xie et al. 2019, section 5.2)."""
    return float((1.0 + staleness) ** -exponent)


def hinge(staleness: float, slope: float, grace: float) -> float:
    """h(s) = 1 up to s = b, then 1 / (a (s - b) + 1) (Xie et al. 2019, section 5.2)."""
    return 1.0 if staleness <= grace else 1.0 / (slope * (staleness - grace) + 1.0)


def damping(function: Staleness, staleness: int) -> float:
    """The scenario's h(s); every function is 1 for a fresh reply, s = 0."""
    match function.kind:
        case "constant":
            return 1.0
        case "polynomial":
            return polynomial(staleness, function.exponent)
        case "hinge":
            return hinge(staleness, function.slope, function.grace)
        case _:
            assert_never(function.kind)


def participation_weight(replies: int, mean: float, cap: float) -> float:
    """Weight factor of a rarely replying silo: (mean + 1) / (replies + 1), limited to [1/cap, cap].

    Without rounds, a silo that is ten times slower is merged a tenth as often, and the model forgets its data. A weight
    proportional to the interval between a silo's replies compensates for this, as in FedAU (Wang and Ji, ICLR 2024).
    As there, it is capped, since one update of a silo cannot replace arbitrarily many.

    Args:
        replies: number of the silo's merged replies.
        mean: mean of that number over all eligible silos.
        cap: largest factor, at least 1; the smallest is 1/cap.
    """
    return min(cap, max(1.0 / cap, (mean + 1.0) / (replies + 1.0)))


def mixed(old: Tensor, merged: Tensor, rate: float) -> Tensor:
    """Scale a merge's step: theta + a (theta' - theta) (FedAsync, Xie et al. 2019, algorithm 1).

    Args:
        old: [P] parameters before the merge.
        merged: [P] parameters after it.
        rate: a = mixing * h(s), in [0, 1]; 1 returns ``merged`` itself.
    """
    return merged if rate == 1.0 else (old.double() + rate * (merged.double() - old.double())).to(merged.dtype)


def read_only(array: npt.NDArray[Any]) -> Tensor:
    """View a received array as a tensor without copying; use it in element-wise sums only.

    Its alignment is arbitrary, and a matrix product depends on that of its operands.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns about read-only arrays; this one is never written
        return torch.from_numpy(array)
