"""Limits of the size of messages that the coordinator accepts."""

from __future__ import annotations

from coordinator.run_context import RunContext
from fedmq.config.scenario import Scenario
from fedmq.wire.codec import MAX_BODY, MAX_BODY_HEADER

#: Lower bound of the largest accepted message body [bytes]; see :func:`largest_body`.
LEAST_BODY = 1 << 26
#: Maximum accepted body of a run whose silos have their own data, before the model is known [bytes].
_OWN_BODY = 1 << 28


def own_largest_body(scenario: Scenario) -> int:
    """Largest accepted message body [bytes] of a run whose model depends on what the silos state."""
    return MAX_BODY if scenario.backbone.end_to_end or scenario.backbone.adapter_site == "blocks" else _OWN_BODY


def largest_body(run_context: RunContext, least: int = LEAST_BODY) -> int:
    """Largest accepted message body [bytes]: four times the model, or the method's declared reply size if larger.

    Methods declare it where replies grow with something other than the model, e.g. representations with the public set.
    """
    tensors = run_context.traits.reply_bytes
    return max(least, 4 * run_context.context.layout.nbytes, tensors + MAX_BODY_HEADER)
