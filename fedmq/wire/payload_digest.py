"""Digests of payloads, by which logs and the audit identify them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from blake3 import blake3

from fedmq.wire.fields import Field, FloatMap, NestedFloatMap, Real
from fedmq.wire.payloads import Payload

#: Digests of live payloads, so that a model sent to many silos is hashed once.
_DIGESTS: WeakKeyDictionary[Payload, str] = WeakKeyDictionary()


def digest(payload: Payload) -> str:
    """BLAKE3 (hex) over a payload's kind and all its fields; equal digests mean bit-identical payloads.

    SHA-256 is four times slower on one core; it took a third of the time from receiving an update to aggregating it.
    """
    known = _DIGESTS.get(payload)
    if known is None:
        known = _DIGESTS[payload] = _digest(payload)
    return known


def _digest(payload: Payload) -> str:
    total = blake3(payload.KIND.encode())
    for name, spec in payload.FIELDS.items():
        value = getattr(payload, name)
        if isinstance(value, np.ndarray):
            total.update(f"\0{name}\0{value.dtype.name}{value.shape}\0".encode())
            total.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        else:
            total.update(f"\0{name}\0{_as_decoded(spec, value)!r}".encode())
    return total.hexdigest()


def _as_decoded(spec: Field, value: Any) -> Any:
    """A field's value as the receiver decodes it, so that both ends log the same digest."""
    match spec:
        case Real():
            return None if value is None else float(value)
        case FloatMap():
            return {each: float(number) for each, number in sorted(value.items())}
        case NestedFloatMap():
            return {each: {name: float(x) for name, x in inner.items()} for each, inner in sorted(value.items())}
        case _:
            return value
