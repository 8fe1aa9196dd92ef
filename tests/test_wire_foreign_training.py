"""Silos that train as docs/reference/silo_training.md describes reply with what fedmq's silos reply with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedmq.config.scenario import Training
from fedmq.federation.protocol import SiloFacts, Trained, take
from fedmq.wire.payloads import Delta, Geometry, Loss, ModalityPrototypes
from tests.foreign import training as foreign
from tests.small_federation import SmallFederation, population, share

TOWERS = {"visual.": "image", "text.": "text"}
EPOCHS, RATE = 3, 1e-2


def parameters(run: SmallFederation, flat: np.ndarray[Any, Any]) -> foreign.Parameters:
    """A flat buffer [P] by parameter name."""
    found, at = foreign.Parameters(), 0
    for entry in run.context.layout.entries:
        found[entry.name] = flat[at : at + entry.size].reshape(entry.shape).astype(np.float64)
        at += entry.size
    return found


def items(run: SmallFederation, silo: SiloFacts) -> dict[str, foreign.Array]:
    held = run.shares[silo.index]
    rows = {} if held.image is None else {"visual.": held.image.numpy().astype(np.float64)}
    if held.text is not None:
        rows["text."] = held.text[torch.arange(12), torch.zeros(12, dtype=torch.int64)].numpy().astype(np.float64)
    return rows


def compare(run: SmallFederation, silo: SiloFacts, trained: Trained, options: foreign.Options) -> foreign.Parameters:
    """Compare a silo's reply with that of the silo written from the document; returns the latter's update."""
    sent = run.protocol.task(run.state, silo)
    down = take(sent, ModalityPrototypes)
    known = {name: getattr(down, TOWERS[name]) for bit, name in ((1, "visual."), (2, "text.")) if down.mask & bit}
    known = {name: value.astype(np.float64) for name, value in known.items()}
    model = parameters(run, run.state.theta.numpy())
    update, prototypes, loss = foreign.reply(model, items(run, silo), known, options)
    delta = parameters(run, take(trained.payloads, Delta).buffer)
    assert not any(part.any() for name, part in delta.items() if name not in update)
    for name, part in update.items():
        np.testing.assert_allclose(delta[name], part, rtol=0, atol=0.02 * RATE, err_msg=name)
    assert take(trained.payloads, Loss).value == pytest.approx(loss, abs=1e-4)
    up = take(trained.payloads, ModalityPrototypes)
    for name, value in prototypes.items():
        np.testing.assert_allclose(getattr(up, TOWERS[name]), value, atol=1e-4)
    return update


@pytest.mark.parametrize("method", ["rcsr", "fedavg"])
def test_a_silo_written_from_the_document_replies_as_fedmqs_silos_do(method: str) -> None:
    kinds = ((True, True), (True, False), (False, True))
    run = population(method, kinds=kinds, training=Training(batch_size=64, local_epochs=EPOCHS))
    run.shares = {silo.index: share(silo, 12, captions=1) for silo in run.context.silos}
    default: Any = run.protocol.options  # type: ignore[attr-defined]
    weights = {name: getattr(default, name, 0.0) for name in ("tau", "lambda_anc", "lambda_a", "lambda_s")}
    options = foreign.Options(**weights, epochs=EPOCHS, learning_rate=RATE)
    before: dict[str, foreign.Parameters] = {}
    for _ in range(2):  # before the first merge no prototype is known
        replies = []
        for silo in run.context.silos:
            trained = run.train(silo, RATE)
            update = compare(run, silo, trained, options)
            if method == "rcsr":
                expected = foreign.geometry(update, before.get(silo.name), 12)
                np.testing.assert_allclose(take(trained.payloads, Geometry).values, expected, rtol=0.02, atol=1e-3)
            before[silo.name] = update
            replies.append(run.reply(silo, trained))
        run.state = run.protocol.merge(run.state, replies, run.version).state
        run.version += 1
