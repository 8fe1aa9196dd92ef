"""Helpers that inspect and modify replies, and personal models."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from fedmq.federation.protocol import Local, Update
from tests.small_federation import SmallFederation


def payload_of(reply: Update, kind: type[Any]) -> Any:
    (found,) = [payload for payload in reply.payloads if isinstance(payload, kind)]
    return found


def with_payload(reply: Update, new: Any) -> Update:
    payloads = tuple(new if type(payload) is type(new) else payload for payload in reply.payloads)
    return dataclasses.replace(reply, payloads=payloads)


def weights_of(run: SmallFederation, replies: list[Update]) -> torch.Tensor:
    """The weights of a merge, recovered by giving each reply a distinct unit update."""
    delta = next(payload for payload in replies[0].payloads if hasattr(payload, "n_samples"))
    marked = []
    start = run.model.branch("image").start
    for index, reply in enumerate(replies):
        buffer = np.zeros_like(delta.buffer)
        buffer[start + index] = 1.0
        own = next(payload for payload in reply.payloads if hasattr(payload, "n_samples"))
        new = dataclasses.replace(own, buffer=buffer)
        marked.append(
            dataclasses.replace(reply, payloads=tuple(new if payload is own else payload for payload in reply.payloads))
        )
    after = run.protocol.merge(run.state, marked, run.version).state.theta.double()
    return (after - run.state.theta.double())[start : start + len(replies)]


def silo_of(run: SmallFederation, index: int) -> Local:
    return Local(run.context.silos[index], run.shares[index], run.model, run.personal.get(index, {}))


def own_embeddings(run: SmallFederation, index: int) -> torch.Tensor:
    """The first silo's images embedded with another silo's personal model."""
    payloads = run.protocol.task(run.state, run.context.silos[index])
    images = run.shares[0].image
    assert images is not None
    with torch.no_grad():
        return run.protocol.encoders(silo_of(run, index), payloads).image(images)
