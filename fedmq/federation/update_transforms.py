"""Transforms of a silo's update before it is sent: clipping, then Gaussian noise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedmq import seeds
from fedmq.config.sections import Privacy
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

    An all-zero update is returned unchanged: it means that the method left the silo idle, which reveals nothing about
    its data, and with noise it would count as a trained update.

    Args:
        update: float32 [P].
        privacy: the scenario's options; without clipping the same array is returned.
        source: source of the noise: a secret of 32 bytes, or the scenario's seed, which gives no privacy against a
            party that knows the seed.
        path: silo, base version and sequence, which name the draw.
    """
    if privacy.clip_norm is None or not update.any():
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
