"""The arithmetic of a silo with default options of rcsr or fedavg, from docs/reference/silo_training.md alone.

Float64 NumPy, without automatic differentiation. It takes the items of a batch in their own order, and one caption
each, so that tests with one batch and one caption per item can compare it with other silos.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Parameters = dict[str, Array]


def unit(rows: Array) -> Array:
    """Vectors [..., d] scaled to length 1."""
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def _normal(a: Array) -> Array:
    """The normal distribution function."""
    values: Array = 0.5 * (1 + np.vectorize(math.erf)(a / math.sqrt(2)))
    return values


@dataclass
class Tower:
    """One tower with one adapter."""

    parameters: Parameters  # all parameters by name
    prefix: str  # ``visual.`` or ``text.``
    _kept: dict[str, Array] = field(default_factory=dict)

    def _of(self, name: str) -> Array:
        return self.parameters[self.prefix + name]

    def _linear(self, name: str, x: Array) -> Array:
        return x @ self._of(f"{name}.weight").T + self._of(f"{name}.bias")

    def forward(self, x: Array) -> Array:
        """Embeddings [B, d] of features [B, d]."""
        inner = self._linear("adapters.00.down", x)
        gelu = inner * _normal(inner)
        adapted = x + self._linear("adapters.00.up", gelu)
        before = self._linear("head.0", adapted)
        out = adapted + self._linear("head.1", np.maximum(before, 0))
        self._kept = {"x": x, "inner": inner, "gelu": gelu, "adapted": adapted, "before": before, "out": out}
        return unit(out)

    def backward(self, dz: Array) -> Parameters:
        """Gradient by parameter name, from the gradient [B, d] of the embeddings of the last forward pass."""
        kept, found = self._kept, Parameters()

        def linear(name: str, dy: Array, x: Array) -> Array:
            found[f"{self.prefix}{name}.weight"], found[f"{self.prefix}{name}.bias"] = dy.T @ x, dy.sum(0)
            product: Array = dy @ self._of(f"{name}.weight")
            return product

        length, z = np.linalg.norm(kept["out"], axis=1, keepdims=True), unit(kept["out"])
        dout = (dz - (dz * z).sum(1, keepdims=True) * z) / length
        dbefore = linear("head.1", dout, np.maximum(kept["before"], 0)) * (kept["before"] > 0)
        dadapted = dout + linear("head.0", dbefore, kept["adapted"])
        inner = kept["inner"]
        density = np.exp(-0.5 * inner**2) / math.sqrt(2 * math.pi)
        dinner = linear("adapters.00.up", dadapted, kept["gelu"]) * (_normal(inner) + inner * density)
        linear("adapters.00.down", dinner, kept["x"])
        return found


def _softmax(scores: Array, axis: int) -> Array:
    raised = np.exp(scores - scores.max(axis, keepdims=True))
    share: Array = raised / raised.sum(axis, keepdims=True)
    return share


def _log_sum(scores: Array, axis: int) -> Array:
    most = scores.max(axis)
    total: Array = most + np.log(np.exp(scores - np.expand_dims(most, axis)).sum(axis))
    return total


@dataclass(frozen=True)
class Options:
    """Keys of a scenario, with fedmq's defaults; 0 for ``lambda_a`` and ``lambda_s`` gives fedavg."""

    tau: float = 0.07
    lambda_anc: float = 1.0
    lambda_a: float = 0.1
    lambda_s: float = 0.01
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epochs: int = 1


def _batch(z: Mapping[str, Array], known: Mapping[str, Array], options: Options) -> tuple[float, dict[str, Array]]:
    """Loss of a batch without its proximal term, and the gradient of the embeddings, by tower.

    Args:
        z: embeddings [B, d] of the towers that the silo trains.
        known: the prototypes [d] that the task marks as known, by tower.
        options: weights.
    """
    value, gradient = 0.0, {name: np.zeros_like(rows) for name, rows in z.items()}
    size = len(next(iter(z.values())))
    if len(z) == 2:
        image, text = z["visual."], z["text."]
        scores = image @ text.T / options.tau
        value += float((0.5 * (_log_sum(scores, 1) + _log_sum(scores, 0)) - scores.diagonal()).mean())
        slope = (0.5 * (_softmax(scores, 1) + _softmax(scores, 0)) - np.eye(size)) / (size * options.tau)
        gradient["visual."] += slope @ text
        gradient["text."] += slope.T @ image
    else:
        (name,) = z
        missing = known.get("text." if name == "visual." else "visual.")
        if missing is not None:
            value += options.lambda_anc * (1 - float((z[name] @ unit(missing)).mean()))
            gradient[name] -= options.lambda_anc * unit(missing) / size
    for name, rows in z.items():
        if name in known and options.lambda_a:
            mean, shared = rows.mean(0), unit(known[name])
            cosine = float(unit(mean) @ shared)
            value += 0.5 * options.lambda_a * (1 - cosine)
            slope = (shared - cosine * unit(mean)) / np.linalg.norm(mean)
            gradient[name] -= 0.5 * options.lambda_a * slope / size
    return value, gradient


def trains(towers: Mapping[str, Array], known: Mapping[str, Array], options: Options) -> bool:
    """Whether a silo has anything to minimise."""
    anchored = any(other in known for other in ("visual.", "text.") if other not in towers)
    return len(towers) == 2 or anchored or bool(options.lambda_a and known.keys() & towers.keys())


def reply(
    model: Parameters, items: Mapping[str, Array], known: Mapping[str, Array], options: Options
) -> tuple[Parameters, dict[str, Array], float]:
    """One task: the update by parameter name, the prototypes by tower, and the loss.

    Args:
        model: the parameters of the task's model.
        items: features [n, d] of the silo's items, by the tower that takes them; one batch.
        known: the prototypes [d] that the task marks as known, by tower.
        options: the scenario's.
    """
    theta = {name: value.copy() for name, value in model.items() if name.startswith(tuple(items))}
    first, second = ({name: np.zeros_like(value) for name, value in theta.items()} for _ in range(2))
    towers, losses = {name: Tower(theta, name) for name in items}, []
    for step in range(1, options.epochs + 1) if trains(items, known, options) else ():
        value, slopes = _batch({name: towers[name].forward(x) for name, x in items.items()}, known, options)
        drift = {name: theta[name] - model[name] for name in theta}
        losses.append(value + options.lambda_s * sum(float((part**2).sum()) for part in drift.values()))
        gradient = {key: part for name, dz in slopes.items() for key, part in towers[name].backward(dz).items()}
        for name, part in gradient.items():
            g, (low, high) = part + 2 * options.lambda_s * drift[name], options.betas
            first[name] = low * first[name] + (1 - low) * g
            second[name] = high * second[name] + (1 - high) * g**2
            change = first[name] / (1 - low**step) / (np.sqrt(second[name] / (1 - high**step)) + 1e-8)
            theta[name] *= 1 - options.learning_rate * options.weight_decay
            theta[name] -= options.learning_rate * change
    prototypes = {name: unit(towers[name].forward(x).mean(0)) for name, x in items.items()}
    return {name: theta[name] - model[name] for name in theta}, prototypes, float(np.mean(losses or [0.0]))


def geometry(update: Parameters, before: Parameters | None, samples: int) -> Array:
    """The four numbers of rcsr about an update and the one before it."""

    def length(*prefixes: str) -> float:
        return math.sqrt(sum(float((part**2).sum()) for name, part in update.items() if name.startswith(prefixes)))

    whole, turn = length(""), 0.0
    if before is not None:
        product = sum(float((part * before[name]).sum()) for name, part in update.items())
        turn = product / max(1e-12, whole) / max(1e-12, math.sqrt(sum(float((p**2).sum()) for p in before.values())))
    return np.array([whole, length("visual.") / (length("text.") + 1e-8), turn, whole / (math.sqrt(samples) + 1e-8)])
