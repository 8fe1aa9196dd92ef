"""A merge's arithmetic around the method's own: what a reply is worth, which are kept, how far the model goes along.

Nothing here waits, sends or writes; the loop does that before and after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator.run_context import RunContext
from fedmq.errors import RunError
from fedmq.federation.protocol import MergeResult, Reply, SiloFacts, State
from fedmq.federation.staleness import damping, mixed, rarity
from fedmq.runs.run_records import MergeLine
from fedmq.wire.fields import all_finite
from fedmq.wire.messages import Loss, Message
from protocols._missing_branch import completed
from protocols._robust import robust_replies


def reply_of(
    run_context: RunContext,
    message: Message,
    silo: SiloFacts,
    states: Mapping[int, State],
    version: int,
    merged: Mapping[str, int],
) -> Reply:
    """A checked reply as the method merges it.

    Args:
        run_context: of the run.
        message: the reply.
        silo: who sent it, as it was when it was asked.
        states: by version; the reply's base version is among them.
        version: that it is merged into.
        merged: how many replies of each silo were merged so far.
    """
    sequence, base = message.header.reply_to, message.header.base_version
    assert sequence is not None  # noqa: S101 - a reply that answers no task is refused where it arrives
    aggregation, age = run_context.scenario.aggregation, version - base
    factor = damping(aggregation.staleness, age)
    # As the method made them: branches that the silo lacks are filled in again.
    payloads = tuple(
        completed(payload, run_context.context.layout, run_context.traits.shared_layers, silo)
        for payload in message.payloads
    )
    return Reply(silo, sequence, base, age, factor, payloads, _rarity(run_context, silo.name, merged), states[base])


def _rarity(run_context: RunContext, silo: str, merged: Mapping[str, int]) -> float:
    """How much more a silo counts that is merged rarely; 1 where the scenario does not ask for it."""
    aggregation, asked = run_context.scenario.aggregation, run_context.plan.eligible
    if aggregation.mode == "sync" or aggregation.balance is None:
        return 1.0
    return rarity(merged[silo], sum(merged[name] for name in asked) / len(asked), aggregation.balance)


def losses_of(replies: Sequence[Reply]) -> dict[str, float]:
    """What silos said their loss was, by name."""
    return {
        reply.silo.name: payload.value for reply in replies for payload in reply.payloads if isinstance(payload, Loss)
    }


def merged_state(
    run_context: RunContext, state: State, replies: Sequence[Reply], round_: int
) -> tuple[MergeResult, tuple[str, ...]]:
    """The method's state after a merge, and the silos that the scenario's robust rule left out.

    Raises:
        RunError: the merged model is not finite.
    """
    kept = robust_replies(replies, run_context.scenario.aggregation.robust, run_context.context.layout)
    left_out = tuple(sorted({reply.silo.name for reply in replies} - {reply.silo.name for reply in kept}))
    merged = run_context.protocol.merge(state, kept, round_)
    aggregation = run_context.scenario.aggregation
    # A lone reply's factor has no other reply to weigh against; it, too, can only act on the step.
    rate = aggregation.rate * (replies[0].factor if aggregation.mode == "async" else 1.0)
    rate = min(rate, 1.0)
    after = replace(merged.state, theta=mixed(state.theta, merged.state.theta, rate))
    if rate < 1.0:
        after = run_context.protocol.followed(state, after, rate)
    if not all(all_finite(each.numpy()) for each in (after.theta, *after.tensors.values())):
        raise RunError(f"round {round_}: the merged model is no longer finite; lower training.learning_rate")
    return MergeResult(after, merged.log), left_out


def merge_line(
    version: int, now: float, replies: Sequence[Reply], losses: Mapping[str, float], log: Mapping[str, float]
) -> MergeLine:
    """A merge's line of the metrics file."""
    line = MergeLine(
        kind="merge",
        version=version,
        now=now,
        replies=[reply.silo.name for reply in replies],
        staleness=[reply.staleness for reply in replies],
        loss=sum(losses.values()) / len(losses) if losses else None,
        losses=dict(losses),
    )
    return line.model_copy(update=dict(log))
