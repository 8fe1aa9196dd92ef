"""Transforms of a silo's update before it is sealed: clipping, then Gaussian noise."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedmq import seeds
from fedmq.messages import Delta, DiscriminatorDelta, PartialDelta
from fedmq.scenario import Privacy

F32 = npt.NDArray[np.float32]
#: Payloads that are updates, which the scenario's transforms apply to.
TRANSFORMED = (Delta, PartialDelta, DiscriminatorDelta)


def clip(update: F32, norm: float) -> F32:
    """Scale an update [P] down to an L2 norm of at most ``norm``; a smaller one is returned as it is."""
    length = float(np.linalg.norm(update.astype(np.float64)))
    return update if length <= norm else (update * np.float32(norm / length))


def transform(update: F32, privacy: Privacy, seed: int, path: tuple[str | int, ...]) -> F32:
    """Clip, then add noise of standard deviation ``noise_multiplier * clip_norm`` (DP-FedAvg, McMahan et al. 2018).

    An update of zeros stays one: the silo stood idle by the method's rule, which tells nothing of its data, and with
    noise it would count as one that trained.

    Args:
        update: float32 [P].
        privacy: the scenario's choice; the same array comes back when it asks for nothing.
        seed: the scenario's seed. Noise that can be derived again hides nothing from whoever knows the seed: use a
            seed of your own, kept secret, where the noise must protect.
        path: silo, base version, sequence: what the noise is drawn for.
    """
    if privacy.clip_norm is None or not update.any():
        return update
    clipped = clip(update, privacy.clip_norm)
    if privacy.noise_multiplier == 0:
        return clipped
    noise = seeds.numpy_generator(seed, "privacy", *path).standard_normal(update.size, dtype=np.float32)
    return clipped + noise * np.float32(privacy.noise_multiplier * privacy.clip_norm)
