"""Write the results of a finished run: the released model, its card, what the silos agreed on, and the summary."""

from __future__ import annotations

import torch

from coordinator import release
from coordinator.admission import Admission
from coordinator.build_run_context import sent_kinds
from coordinator.loop import Loop
from coordinator.summary import summary_of
from fedmq.clock import Clock
from fedmq.errors import RunError
from fedmq.federation import updates
from fedmq.federation.agreement import RunData
from fedmq.runs.results import result_digests
from fedmq.runs.run_records import RunSummary
from fedmq.storage.run_folder import write_json
from fedmq.wire.log_records import NoteKind


def finish(loop: Loop, data: RunData, clock: Clock, initial: torch.Tensor, admission: Admission | None) -> RunSummary:
    """Write the released model and the summary.

    Args:
        loop: the finished loop.
        data: the run's data, with the numbers of items.
        clock: the run's clock.
        initial: initial parameters, float32 [P].
        admission: what the processes stated about their data; None without messages.

    Raises:
        RunError: the method shares a model, and no silo's update changed it.
    """
    run_context, folder = loop.run_context, loop.run_context.folder
    state, protocol = loop.states[loop.rounds.version], run_context.protocol
    shared = any(kinds & set(updates.TRANSFORMED) for kinds in sent_kinds(run_context))
    if shared and torch.equal(state.theta, initial):
        raise RunError(
            "no silo trained: the model is identical to the initial one after all rounds. Silos that lack what the "
            "method trains on send zeros, as do silos with learning rate 0; see `loss` in metrics.jsonl"
        )
    config = release.write_model(run_context, state.theta, protocol.release(state), data)
    # Logged before the summary is written, so that a run with a summary always has this record.
    released = {"model_digest": config.model_digest, "data_digest": data.content}
    loop.log.note(NoteKind.RELEASED, caused_by=loop.phase_cause, **released, **config.released_with)
    stated = None if admission is None else admission.record()
    if stated is not None:
        write_json(folder.agreement, stated.plain())
    summary = summary_of(loop, data, clock, config, stated)
    if shared:
        # Squares of large parameters overflow in float32.
        moved, before = (torch.linalg.vector_norm(x, dtype=torch.float64) for x in (state.theta - initial, initial))
        change = float(moved / before.clamp(min=torch.finfo(initial.dtype).tiny))
        summary = summary.model_copy(update={"change": change})
    write_json(folder.summary, summary.plain())
    release.write_card(run_context, config, summary)
    loop.log.note(NoteKind.RESULTS, caused_by=loop.phase_cause, **result_digests(folder))
    return summary
