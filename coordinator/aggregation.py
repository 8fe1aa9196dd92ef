"""Aggregation steps common to all methods: weights of replies, robust selection, and the server step.

Pure computation; the loop does all waiting, sending and writing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from coordinator.rounds import PendingTask
from coordinator.run_context import RunContext
from fedmq.errors import RunError
from fedmq.federation.protocol import MergeResult, State, Update
from fedmq.federation.updates import damping, mixed, participation_weight
from fedmq.runs.run_records import MergeLine
from fedmq.wire.fields import all_finite
from protocols.parts.missing_branch import completed
from protocols.parts.robust import robust_replies


def weighted(
    run_context: RunContext, update: Update, states: Mapping[int, State], version: int, merged: Mapping[str, int]
) -> Update:
    """A validated update with its weights in a merge, and with the branches that its silo lacks filled in.

    Args:
        run_context: fixed facts of the run.
        update: the update.
        states: method states by version, including the update's base version.
        version: the version that the update is merged into.
        merged: number of merged replies by silo, so far.
    """
    age, context = version - update.base_version, run_context.context
    layers = run_context.traits.shared_layers
    return replace(
        update,
        staleness=age,
        damping=damping(run_context.scenario.aggregation.staleness, age),
        payloads=tuple(completed(payload, context.layout, layers, update.silo) for payload in update.payloads),
        participation_weight=_participation_weight(run_context, update.silo.name, merged),
        base=states[update.base_version],
    )


def _participation_weight(run_context: RunContext, silo: str, merged: Mapping[str, int]) -> float:
    """Weight of a rarely merged silo's reply; 1 unless the scenario sets ``aggregation.balance``."""
    aggregation, eligible = run_context.scenario.aggregation, run_context.plan.eligible
    if aggregation.mode == "sync" or aggregation.balance is None:
        return 1.0
    return participation_weight(
        merged[silo], sum(merged[name] for name in eligible) / len(eligible), aggregation.balance
    )


def merged_state(
    run_context: RunContext, state: State, replies: Sequence[Update], round_: int
) -> tuple[MergeResult, tuple[str, ...]]:
    """Aggregate replies into the method's next state.

    Args:
        run_context: fixed facts of the run.
        state: the method's current state.
        replies: replies, at least one.
        round_: number of the round.

    Returns:
        The new state with the method's log values, and the silos excluded by the scenario's robust rule. If the rule
        left modules as they are because too few silos trained them, ``robust_left`` in the log is their number.

    Raises:
        RunError: the merged model is not finite.
    """
    unprotected: list[str] = []
    robust = run_context.scenario.aggregation.robust
    kept = robust_replies(replies, robust, run_context.context.layout, unprotected.append)
    left_out = tuple(sorted({reply.silo.name for reply in replies} - {reply.silo.name for reply in kept}))
    merged = run_context.protocol.merge(state, kept, round_)
    aggregation = run_context.scenario.aggregation
    # In async mode a merge has one reply, so its damping factor cannot act as a relative weight; it scales the step.
    rate = aggregation.rate * (replies[0].factor if aggregation.mode == "async" else 1.0)
    rate = min(rate, 1.0)
    after = replace(merged.state, theta=mixed(state.theta, merged.state.theta, rate))
    if rate < 1.0:
        after = run_context.protocol.mix_state(state, after, rate)
    if not all(all_finite(each.numpy()) for each in (after.theta, *after.tensors.values())):
        raise RunError(f"round {round_}: the merged model is no longer finite; lower training.learning_rate")
    log = {**merged.log, "robust_left": float(len(unprotected))} if unprotected else merged.log
    return MergeResult(after, log), left_out


def merge_line(version: int, now: float, replies: Sequence[Update], log: Mapping[str, float]) -> MergeLine:
    """The line of ``metrics.jsonl`` that records a merge."""
    losses = {reply.silo.name: reply.loss for reply in replies if reply.loss is not None}
    line = MergeLine(
        kind="merge",
        version=version,
        now=now,
        replies=[reply.silo.name for reply in replies],
        staleness=[reply.staleness for reply in replies],
        loss=sum(losses.values()) / len(losses) if losses else None,
        losses=losses,
    )
    # JSON has no NaN, e.g. of a loss that overflowed.
    return line.model_copy(update={name: value if math.isfinite(value) else None for name, value in log.items()})


def states_in_use(
    states: Mapping[int, State], needed: Set[int], pending: Mapping[str, PendingTask]
) -> dict[int, State]:
    """The states that are still needed: those of given versions, and those that pending tasks are based on."""
    kept = {*needed, *(task.base_version for task in pending.values())}
    return {version: state for version, state in states.items() if version in kept}
