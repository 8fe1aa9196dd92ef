"""The end of a finished run: write the released model, its card, what the silos agreed on, and the summary."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping

import psutil
import torch

from coordinator import release
from coordinator.counters import Counters
from coordinator.data_admission import Admission
from coordinator.evaluation import personal_figures
from coordinator.loop import Loop
from coordinator.run_context import sent_kinds
from fedmq.clock import Clock
from fedmq.config.privacy import Privacy
from fedmq.data.splits import SPLITS
from fedmq.encoders.gpu import gpu_of
from fedmq.errors import RunError
from fedmq.evaluation.custom_metrics import described, measures_of, unmeasured
from fedmq.evaluation.recall import HEADLINE, fairness_of, means
from fedmq.federation.agreement import RunData
from fedmq.federation.noise import UPDATES, epsilon_of, item_epsilon, most_exposed, spent, spent_by_items, spent_by_task
from fedmq.federation.population import device_here
from fedmq.federation.protocol import SiloFacts
from fedmq.models.objective_registry import OBJECTIVES, network_of
from fedmq.packages import versions
from fedmq.profiling import span
from fedmq.runs.data_records import AgreementRecord
from fedmq.runs.release import ReleaseConfig, model_card
from fedmq.runs.results import read_metrics, result_digests, shared_evaluations
from fedmq.runs.run_records import (
    BelowStart,
    EvaluatedItems,
    EvaluationLine,
    MessageCounts,
    OwnHeldOut,
    OwnHeldOutLine,
    PrivacySpent,
    Processes,
    RunSummary,
    Seconds,
    SiloSummary,
    TaskCounts,
    Traffic,
)
from fedmq.storage.run_folder import write_json, write_text
from fedmq.wire.log_events import LogEvent
from fedmq.wire.messages import EVALUATOR

#: Keys of a line of ``metrics.jsonl`` that a summary does not have.
_OF_A_LINE = ("kind", "version", "wall")
#: Phases whose time is measured; the rest of the total counts as training.
_MEASURED = ("startup", "merge", "evaluation")


def summary_of(
    loop: Loop, data: RunData, clock: Clock, config: ReleaseConfig, stated: AgreementRecord | None
) -> RunSummary:
    """The summary of a run whose last version is evaluated."""
    scenario, counters = loop.run_context.scenario, loop.counters
    last = _last_evaluation(loop)
    own = _last_own_heldout(loop)
    summary = RunSummary(
        protocol=scenario.protocol.name,
        scenario=scenario.name,
        seed=scenario.seed,
        rounds=scenario.rounds,
        versions=loop.rounds.version,
        model_digest=config.model_digest,
        data_digest=config.data_digest,
        metrics=last.metrics,
        per_silo=_per_silo(loop, data, last, stated),
        per_silo_mean=means(last.per_silo) if last.per_silo else {},
        fairness=fairness_of(last.per_silo) if last.per_silo else {},
        bytes=_traffic(counters),
        messages=_messages(loop),
        tasks=TaskCounts(
            merged=counters.participations.total(), failed=counters.failed, discarded=counters.discarded.total()
        ),
        seconds=_seconds(counters, clock),
        processes=Processes(
            silos=len(data.silos), peak_pss_mb=round(psutil.Process().memory_full_info().pss / 2**20, 1)
        ),
        versions_of=_versions_of(loop),
    )
    return summary.model_copy(update=_optional_keys(loop, data, config, last, own) | _evaluated(loop, last, stated))


def _traffic(counters: Counters) -> Traffic:
    """The counted bytes; what was not compressed has no decoded sizes, nor a place for them in the file."""
    tables = {"up": counters.up, "down": counters.down}
    decoded = {"decoded_up": counters.decoded_up, "decoded_down": counters.decoded_down}
    tables |= {name: table for name, table in decoded.items() if table}
    return Traffic(**{name: dict(sorted(table.items())) for name, table in tables.items()})


def _last_evaluation(loop: Loop) -> EvaluationLine:
    """The evaluator's last evaluation; without an evaluator one without metrics."""
    lines = [line for line in read_metrics(loop.run_context.folder) if isinstance(line, EvaluationLine)]
    nothing = EvaluationLine(kind="evaluation", version=0, metrics={}, per_silo={})
    return max(reversed(lines), key=lambda line: line.version, default=nothing)


def _evaluated(loop: Loop, last: EvaluationLine, stated: AgreementRecord | None) -> dict[str, EvaluatedItems]:
    """The items of the evaluator's metrics: of a simulated partition, or as an evaluator with own data stated them."""
    if not last.metrics:
        return {}
    if loop.run_context.evaluated is not None:
        return {"evaluated": loop.run_context.evaluated}
    split = loop.run_context.scenario.evaluation.split
    said = None if stated is None else stated.stated.get(EVALUATOR)
    counts = None if said is None else said.items.get(split)
    return {} if counts is None else {"evaluated": EvaluatedItems(split=split, images=counts.paired)}


def _last_own_heldout(loop: Loop) -> OwnHeldOut | None:
    """The silos' last evaluation; None if they do not evaluate."""
    lines = [line for line in read_metrics(loop.run_context.folder) if isinstance(line, OwnHeldOutLine)]
    if not lines:
        return None
    last = max(reversed(lines), key=lambda line: line.version)
    return OwnHeldOut.model_validate({name: value for name, value in last.plain().items() if name not in _OF_A_LINE})


def _per_silo(
    loop: Loop, data: RunData, last: EvaluationLine, stated: AgreementRecord | None
) -> dict[str, SiloSummary]:
    result: dict[str, SiloSummary] = {}
    known = {"steps": loop.run_context.steps, "label_divergence": data.label_divergence}
    for silo, pairs in zip(data.silos, data.pairs(loop.run_context.scenario.evaluation.split), strict=True):
        said = None if stated is None else stated.stated.get(silo.name)
        values = {
            "modalities": [name for name, owned in (("image", silo.image), ("text", silo.text)) if owned],
            "samples": data.training_items(silo).all,
            "heldout": pairs,
            **{key: values[silo.name] for key, values in known.items() if silo.name in values},
            "participations": loop.counters.participations[silo.name],
            "tasks": loop.rounds.sequences.get(silo.name, 0),
            **({} if said is None else {"data_digest": said.data_digest, "items": said.items}),
            **_without_pair(loop, data, silo),
            **last.per_silo.get(silo.name, {}),
        }
        result[silo.name] = SiloSummary.model_validate(values)
    return result


def _without_pair(loop: Loop, data: RunData, silo: SiloFacts) -> dict[str, int]:
    """Counts of the silo's items without a pair, and of those that the method ignores, as far as there are any."""
    found = data.training_items(silo)
    ignored = found.all - data.trained(silo, loop.run_context.traits.unpaired)
    if silo.paired and found.dataset == 1:
        ignored += OBJECTIVES.find(loop.run_context.scenario.objective.base).contrasts
    counts = {"image_only": found.image_only, "text_only": found.text_only, "ignored": ignored}
    return {name: count for name, count in counts.items() if count}


def _messages(loop: Loop) -> MessageCounts:
    counters = loop.counters
    return MessageCounts(
        sent=counters.sent, received=counters.received, refused=counters.refused.total(), logged=loop.roster.wired
    )


def _seconds(counters: Counters, clock: Clock) -> Seconds:
    spent = {name: counters.seconds.get(name, 0.0) for name in _MEASURED}
    total = counters.seconds["total"]
    return Seconds(
        total=round(total, 3),
        startup=round(spent["startup"], 3),
        training=round(max(0.0, total - sum(spent.values())), 3),
        merge=round(spent["merge"], 3),
        evaluation=round(spent["evaluation"], 3),
        virtual=round(clock.now(), 6) if clock.virtual else None,
    )


def _ended_by(loop: Loop) -> str | None:
    """The key of the scenario that ended the run before its last round; None if none did."""
    rounds = loop.rounds
    if rounds.version >= loop.run_context.scenario.rounds:
        return None
    return "privacy.budget" if rounds.plan.spent(rounds.sequences, rounds.pending) else "evaluation.patience"


def _versions_of(loop: Loop) -> dict[str, str]:
    """Versions that affect rounding: a scenario gives bit-identical results where these are equal."""
    return {
        **versions(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        **gpu_of(device_here(loop.run_context.scenario.device)),
    }


def _optional_keys(
    loop: Loop, data: RunData, config: ReleaseConfig, last: EvaluationLine, own: OwnHeldOut | None
) -> dict[str, object]:
    """The keys that only some summaries have."""
    scenario, traits, evaluation = loop.run_context.scenario, loop.run_context.traits, loop.evaluation
    measures, measured = measures_of(scenario.evaluation), list(_measured(loop, last, own))
    without_pair = data.heldout_without_pair
    if own is not None:  # the evaluator's own items, if there is one, are not among the silos'
        heldout = SPLITS.index(scenario.evaluation.split)
        without_pair += sum(int(each[heldout, 1:].sum()) for each in data.counts.values())
    optional: dict[str, object] = {
        "own_heldout": own,
        "below_start": _below_start(loop),
        "released_with": config.released_with,
        "unusable_replies": dict(sorted(loop.counters.unusable.items())),
        "personal_missing": dict(sorted(evaluation.missing.items())),
        "custom_metrics": described(measures, dict.fromkeys(name for _, values, _ in measured for name in values)),
        "unmeasured": unmeasured(measures, scenario.evaluation, measured),
        "our_reading": traits.our_reading,
        "personal_only": traits.personal_only,
        "unevaluated": evaluation.unevaluated(loop.rounds.version),
        "heldout_without_pair": without_pair,
        "best": evaluation.best and evaluation.best.best,
        "ended_by": _ended_by(loop),
        "privacy": _privacy_spent(loop),
        "item_privacy": _item_privacy(loop),
    }
    found = {name: value for name, value in optional.items() if value}
    if traits.public_items is not None:
        found["public_items"] = traits.public_items
    if evaluation.personal:
        line = personal_figures(loop.rounds.version, evaluation.personal)
        found |= {name: value for name, value in line if name.startswith("personal")}
    return found


def _privacy_spent(loop: Loop) -> PrivacySpent | None:
    privacy, tasks = loop.run_context.scenario.privacy, max(loop.rounds.sequences.values(), default=0)
    uploads = sent_kinds(loop.run_context)
    if not (each := spent_by_task(privacy, uploads)):
        return None
    kinds = {kind.KIND for one in uploads for kind in one}
    plain = sorted(kind for kind in kinds if not spent((kind,), privacy))
    delta = _delta(privacy)
    epsilon = epsilon_of(tasks * each, delta, sums=privacy.secure_aggregation is not None)
    return PrivacySpent(epsilon=epsilon, delta=delta, tasks=tasks, without_noise=plain)


def _delta(privacy: Privacy) -> float:
    """Delta for which epsilon is computed: the budget's, or 1e-5."""
    return 1e-5 if privacy.budget is None else privacy.budget.delta


def _item_privacy(loop: Loop) -> PrivacySpent | None:
    """The largest epsilon of a training item over silos, with noise in local steps."""
    run_context, sequences = loop.run_context, loop.rounds.sequences
    scenario, privacy = run_context.scenario, run_context.scenario.privacy
    if privacy.items is None or not privacy.items.noise_multiplier:
        return None
    kinds, delta = {kind.KIND for one in sent_kinds(run_context) for kind in one}, _delta(privacy)
    each = spent_by_items(kinds, privacy)
    answered = defaultdict[int, set[int]](set)  # numbers of items by number of tasks
    for silo in run_context.context.silos:
        if tasks := sequences.get(silo.name):
            answered[tasks].add(run_context.samples[silo.index])
    known = ((n, tasks) for tasks, sizes in answered.items() for n in most_exposed(scenario, sizes))
    epsilon, tasks = max(
        ((item_epsilon(scenario, n, tasks, tasks * each, delta), tasks) for n, tasks in known), default=(0.0, 0)
    )
    plain = sorted(kind for kind in kinds - {update.KIND for update in UPDATES} if not spent_by_items((kind,), privacy))
    return PrivacySpent(epsilon=epsilon, delta=delta, tasks=tasks, without_noise=plain)


def _below_start(loop: Loop) -> BelowStart | None:
    """The metric by which a run ended worse than the untrained model; None if it did not, or was not evaluated.

    If the shared model is not fully trained, personal models count, by their means over silos on each silo's own items.
    """
    scenario, evaluations = loop.run_context.scenario, shared_evaluations(read_metrics(loop.run_context.folder))
    if not evaluations:
        return None
    first, last = (choose(evaluations, key=lambda line: line.version) for choose in (min, max))
    before, after = first.metrics, last.metrics
    if loop.run_context.traits.personal_only:
        found = loop.evaluation.personal.items()
        own = {name: values.per_silo[name] for name, values in found if name in values.per_silo}
        if not own:
            return None
        before, after = means({name: first.per_silo.get(name, {}) for name in own}), means(own)
    metric = "map" if network_of(scenario.objective) is not None and "map" in before else HEADLINE
    if first.version or metric not in before or metric not in after or after[metric] >= before[metric]:
        return None
    return BelowStart(metric=metric, before=before[metric], after=after[metric])


def _measured(
    loop: Loop, last: EvaluationLine, own: OwnHeldOut | None
) -> Iterator[tuple[str, Mapping[str, float], bool]]:
    """The last values: on whose items, the values, and whether the items are a whole split."""
    if last.metrics:
        yield EVALUATOR, last.metrics, True
        yield from ((name, values, False) for name, values in last.per_silo.items())
    yield from ((name, silo.figures, True) for name, silo in (own.per_silo.items() if own is not None else ()))
    for name, personal in loop.evaluation.personal.items():
        yield name, personal.per_silo[name], False


@span("disk")
def finish(loop: Loop, data: RunData, clock: Clock, initial: torch.Tensor, admission: Admission | None) -> RunSummary:
    """Write the released model and the summary.

    Raises:
        RunError: the method shares a model, and no silo's update changed it.
    """
    run_context, folder = loop.run_context, loop.run_context.folder
    state, protocol = loop.states[loop.rounds.version], run_context.protocol
    shared = any(kinds & set(UPDATES) for kinds in sent_kinds(run_context))
    if shared and torch.equal(state.theta, initial):
        sums = " Secure sums leave out what would single a silo out; see branches_left_alone in metrics.jsonl."
        raise RunError(
            "no silo trained: the model is identical to the initial one after all rounds. Silos that lack what the "
            "method trains on send zeros, as do silos with learning rate 0; see loss in metrics.jsonl."
            + (sums if run_context.scenario.privacy.secure_aggregation is not None else "")
        )
    config = release.write_model(run_context, state.theta, protocol.release(state), data)
    # Logged before the summary is written, so that a run with a summary always has this record.
    released = {"model_digest": config.model_digest, "data_digest": data.content}
    loop.log.note(LogEvent.RELEASED, caused_by=loop.phase_cause, **released, **config.released_with)
    stated = None if admission is None else admission.record()
    if stated is not None:
        write_json(folder.agreement, stated.plain())
    summary = summary_of(loop, data, clock, config, stated)
    if shared:
        # Squares of large parameters overflow in float32.
        moved, before = (torch.linalg.vector_norm(x, dtype=torch.float64) for x in (state.theta - initial, initial))
        change = float(moved / before.clamp(min=torch.finfo(initial.dtype).tiny))
        summary = summary.model_copy(update={"change": change})
    if (below := summary.below_start) is not None:
        values = {"before": below.before, "after": below.after}
        loop.log.note(LogEvent.BELOW_START, caused_by=loop.phase_cause, metric=below.metric, **values)
    write_json(folder.summary, summary.plain())
    scenario = run_context.scenario
    card = model_card(config, summary, scenario.protocol.label, scenario.evaluation.split)
    write_text(folder.model / "README.md", card)
    loop.log.note(LogEvent.RESULT_DIGESTS, caused_by=loop.phase_cause, **result_digests(folder))
    return summary
