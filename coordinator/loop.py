"""The coordinator's loop: receives events, feeds the rounds machine, and carries out its actions. All I/O, no rules.

Replies are handled in the order of the timeline, not of their arrival: under a virtual clock the loop takes the
earliest due reply and waits for exactly that message, so that the run does not depend on real speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from coordinator import round_events as events
from coordinator.checkpoints import Checkpointing
from coordinator.counters import Counters, TaskErrors, nothing_merged
from coordinator.evaluation import EvaluationRequests
from coordinator.faults import FaultInjector
from coordinator.liveness import Absences, ReconnectThrottle, await_silos
from coordinator.peers import Inbox, Peers, Ready, Unusable
from coordinator.rounds import Rounds
from coordinator.run_context import RunContext
from coordinator.secure_sums import Answer, SecureSums
from coordinator.status import StatusReport
from coordinator.timeline import EntryKind, Outcomes, Timeline, drawn_outcome, event_of, note_event
from coordinator.updates import merge_line, merged_state, reason_of, states_in_use, text_of, validated, weighted
from fedmq.clock import Clock
from fedmq.errors import RemoteWireError, RunError
from fedmq.federation.faults import FailureReason
from fedmq.federation.protocol import MergeResult, SiloFacts, State, Update
from fedmq.profiling import span
from fedmq.runs.results import append_metrics
from fedmq.runs.status import ERROR_CHARACTERS
from fedmq.wire.channel import BEAT_SECONDS, LOST_BEATS
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import EVALUATOR, Header, Kind, Message

_POLL_SECONDS = 0.2


@dataclass
class Loop:
    """One run of a coordinator."""

    run_context: RunContext
    rounds: Rounds
    states: dict[int, State]
    clock: Clock
    roster: Peers
    log: MessageLog
    counters: Counters
    fault_injector: FaultInjector
    due: dict[str, float]
    evaluation: EvaluationRequests
    status: StatusReport
    stop_wanted: Callable[[], bool]
    stop_silos: bool = False
    checkpoint_seconds: float = 0.0
    late_silos: Callable[[], bool] = lambda: False
    sums: SecureSums | None = None  # of a run with secure aggregation

    def __post_init__(self) -> None:
        self._timeline = Timeline()
        self._facts: dict[str, SiloFacts] = {silo.name: silo for silo in self.run_context.context.silos}
        self._seen, self._expelled, self.stopping_for_late_silos = set[str](), set[str](), False
        self._limits, self._absences = self.status.limits, Absences()
        self.phase_cause: int | None = None
        self._errors, self._reconnects = TaskErrors(self.counters.errors, self.counters.unusable), ReconnectThrottle()
        self._inbox = Inbox(self.roster, self.log, self.clock, self.fault_injector)
        self._began = self._checked = self._inbox.caught_up
        self._patience = self.run_context.scenario.aggregation.lost_after
        run_context, injector, committed = self.run_context, self.fault_injector, self.rounds.committed
        self.saving = Checkpointing(
            run_context, self.clock, self.log, self.counters, self.roster, injector, committed, self.checkpoint_seconds
        )
        self._outcomes = Outcomes(self._facts, self.due, self.clock, self._timeline, injector, self.log, self.counters)
        self._outcomes.schedule_saved(self.rounds.pending)
        if off := self._timeline.begin(self.run_context.trace, self.clock.now(), self._facts):
            record = self.log.note(LogEvent.OFF_AT_START, silos=", ".join(off))
            for name in off:
                self._handle(events.Switched(name, on=False), record)

    def run(self, *, continues: bool = False) -> events.Phase:
        """Run until all rounds are merged and evaluated, a stop is requested, or late silos are to be included.

        With ``continues`` the silos are connected already, to an earlier loop of this process.

        Raises:
            RunError: no silo can train, or the evaluator stays away.
        """
        self._expel_unaccepted()
        for version in sorted(self.states):
            self.evaluation.evaluate_if_due(version, self.states[version])
        if continues:
            here = tuple(name for name in self._facts if self.roster.online(name))
            self._seen.update(here)
            self._start_on(events.StillConnected(here), self.log.note(LogEvent.STILL_CONNECTED, silos=", ".join(here)))
        self.status.update(self.rounds, self._seen)  # the file exists even if the run fails at once
        try:
            while self.rounds.phase not in (events.Phase.DONE, events.Phase.STOPPED):
                self._step()
        finally:
            self.saving.write()
        waiting = self.clock.stopwatch()
        if self.rounds.phase is events.Phase.DONE:
            if not self.counters.participations.total():
                raise nothing_merged(self._errors, self.counters, self.rounds.version)
            if not self._measure_personal(self.rounds.version, self.saving.committed, final=True):
                self._handle(events.EvaluationAborted(), self.log.note(LogEvent.EVALUATION_ABORTED))
        self.counters.add_seconds("evaluation", self.clock.stopwatch() - waiting)
        if self.rounds.phase is events.Phase.DONE and self.roster.wired and not self.stop_silos:
            await_silos(self._unheard, self.clock, self.roster.online, self._poll, self.stop_wanted, self.log.logger)
        self.roster.note_unlogged()
        self.status.update(self.rounds, self._seen, force=True)
        return self.rounds.phase

    def _measure_personal(self, version: int, committed: Mapping[str, int], *, final: bool) -> bool:
        """Have the silos evaluate their personal models, if any; false if a stop is requested meanwhile."""
        # Faults that make silos leave apply to tasks only: all silos take part in an evaluation.
        self.fault_injector.restart_stopped()
        self.evaluation.ask_silos(self.rounds.gone, version, self.states[version], committed)
        for name in self.evaluation.requested:
            if name in self._reconnects.waiting or not self.evaluation.ask(name):
                self._absences.begin(name, self.clock.stopwatch())
        if not self.evaluation.wait(self._poll, self.stop_wanted, final=final):
            return False
        self.evaluation.record_saved(version)
        return True

    def _unheard(self, since: float) -> list[str]:
        heard, now, patience = self.roster.heard(), self.clock.stopwatch(), self._patience
        names = (name for name in sorted(self._seen - self.rounds.gone) if heard.get(name, since) <= since)
        return [name for name in names if self._absences.seconds(name, now) <= patience]

    def _poll(self) -> None:
        self._receive(_POLL_SECONDS)
        self._check_peers()

    def _step(self) -> None:
        idle = self.rounds.phase is events.Phase.GATHERING or not self.rounds.pending
        self.stopping_for_late_silos = idle and self.late_silos() and not self.stop_wanted()
        if self.stopping_for_late_silos or self.stop_wanted():
            self._stop()
            return
        entry, trace = self._timeline.peek(self.rounds.version), self.run_context.trace
        if entry is None and self.rounds.stalled:
            raise RunError("no eligible silo becomes available again; correct participation.trace")
        # The time of a resumed run stands still until all silos have joined; pending tasks are due afterwards.
        gathering = self.rounds.phase is events.Phase.GATHERING
        if entry is not None and not gathering and self._outcomes.allow(entry):
            self._timeline.pop()
            self.clock.advance_to(max(entry.at, self.clock.now()))
            if entry.kind is EntryKind.SWITCH:
                self._timeline.next_switch(trace, self.clock.now(), entry.index, entry.silo)
            event = event_of(entry, self._outcomes.get(entry.silo, entry.sequence), trace)
            number = self.counters.events = self.counters.events + 1
            record = note_event(self.log, entry, event, self.rounds.version, number, self._outcomes.cause_of(entry))
            self._handle(event, record)
            self.fault_injector.after_event(self.rounds.version, number, record)
        else:
            wait = _POLL_SECONDS
            if entry is not None and not gathering and not self.clock.virtual:
                wait = min(wait, max(0.0, entry.at - self.clock.now()))
            self._receive(wait)
        self._check_peers()

    def _stop(self) -> None:
        """Stop the rounds, as the operator requested or to include late silos."""
        self._handle(
            events.Stop(),
            self.log.note(LogEvent.LATE_SILOS if self.stopping_for_late_silos else LogEvent.STOP_REQUESTED),
        )

    def _handle(self, event: events.Event, record: int | None) -> None:
        """Pass an event to the rounds machine and carry out its actions; ``record`` is the log record of its cause."""
        if isinstance(event, events.Failed):
            self._outcomes.fail(event, record)
            self._errors.task_failed(event.silo)
            if event.reason not in (FailureReason.ERROR, FailureReason.POLICY):
                self.status.failed(event.silo, f"task {event.sequence}: {event.reason}")
        before = self.rounds.phase
        self.rounds, actions = self.rounds.handle(event, record)
        if self.rounds.phase is not before:
            self.phase_cause = record
        for action in self.run_context.longest_first(actions):
            self._perform(action)

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.Send():
                self._send(action)
            case events.SetDeadline(round_, after):
                self._timeline.deadline(self.clock.now() + after, round_, action.cause)
            case events.Collect():
                assert self.sums is not None  # noqa: S101 - only its runs have further stages
                found = self._outcomes.taken(action.replies)
                self.sums.collect(action, found, self.states, self.counters.participations)
            case events.Merge():
                self._merge(action)
            case events.Discard():
                self._outcomes.discard(action)
            case events.Finish(cause=cause):
                self.log.note(LogEvent.ALL_MERGED, version=self.rounds.version, caused_by=cause)
            case _:
                assert_never(action)

    def _receive(self, wait: float) -> None:
        """Handle what the peers send; wait at most ``wait`` [s] for the first message."""
        for received, record in self._inbox.receive(wait):
            match received:
                case events.Failed(silo=silo):
                    self._limits.forget(silo)
                    self._fail(received)
                case Ready():
                    self._on_ready(received, record)
                case Unusable():
                    self._on_unusable(received, record)
                case Message():
                    self._on_message(received, record)

    def _note_answer(self, header: Header, record: int | None) -> None:
        """Note that a silo answered a task, even if its answer is unusable; an overdue silo can be selected again."""
        number, now = header.reply_to, self.clock.stopwatch()
        if header.sender in self._facts and number is not None and self._limits.replied(header.sender, number, now):
            self._join(header.sender, record)

    def _on_unusable(self, unusable: Unusable, record: int | None) -> None:
        """Fail the task of an unreadable reply or error; a resend would be unreadable, too."""
        header = unusable.header
        self._note_answer(header, record)
        answers = header.kind in (Kind.REPLY, Kind.ERROR) and header.sender in self._facts
        if not self.evaluation.unreadable(header) and answers and header.reply_to is not None:
            self._on_refused(
                events.Failed(header.sender, header.reply_to, unusable.reason, cause=record), unusable.detail
            )

    def _on_refused(self, failed: events.Failed, detail: RemoteWireError | str) -> None:
        """Fail the task of a refused reply."""
        if self._outcomes.is_open(self.rounds.pending, failed.silo, failed.sequence):
            self._errors.refused(failed.silo, detail, scripted=self.fault_injector.attacked(failed.silo))
        self._fail(failed)

    def _on_ready(self, ready: Ready, record: int | None) -> None:
        name, now = ready.name, self.clock.stopwatch()
        if ready.returned and name != EVALUATOR:
            self._limits.lost(name, now)
            record = self.log.note(LogEvent.RETURNED, peer=name, caused_by=record)
            self._handle(events.Lost(name), record)
        if self._reconnects.must_wait(name, now, BEAT_SECONDS):
            self._absences.begin(name, now)
            return
        self._absences.end(name, now, self.rounds.pending)
        self.roster.send(name, Message(self.roster.header(name, Kind.LAYOUT), layout=self.run_context.context.layout))
        if name == EVALUATOR:
            self.evaluation.rejoined(self.states)
            return
        if name in self.evaluation.requested:
            self.evaluation.ask(name, again=True)
        self._seen.add(name)
        self._join(name, record)

    def _join(self, name: str, cause: int | None) -> None:
        """A silo is ready for tasks; the run starts once enough silos are."""
        self._limits.forget(name)
        self._start_on(events.Joined(name), self.log.note(LogEvent.JOINED, peer=name, caused_by=cause))

    def _start_on(self, event: events.Joined | events.StillConnected | events.WaitEnded, record: int) -> None:
        """Handle an event after which the rounds may start."""
        gathering = self.rounds.phase is events.Phase.GATHERING
        self._handle(event, record)
        if not gathering or self.rounds.phase is events.Phase.GATHERING:
            return
        self.status.update(self.rounds, self._seen, force=True)  # the command measures its start-up time by it
        now = self.clock.stopwatch()
        if "startup" not in self.counters.seconds:
            self.counters.add_seconds("startup", now - self._began + self.counters.seconds.pop("gathering", 0.0))
        for absent in self.rounds.pending.keys() - self.rounds.online:
            self._absences.begin(absent, now)

    def _on_message(self, message: Message, record: int | None) -> None:
        header, outstanding = message.header, self.evaluation.outstanding
        self._note_answer(header, record)
        if header.kind is Kind.REPLY and header.sender == EVALUATOR:
            self.evaluation.evaluated(message, self.states)
        elif header.kind is Kind.REPLY and header.reply_to is not None and not self.evaluation.requested_of(header):
            self.counters.add_traffic("up", header.sender, message.payloads)
            self.status.received(header.sender)
            try:
                self._on_reply(message, record)
            except RemoteWireError as error:
                record = self.roster.refuse(header.sender, error, 0)
                self._on_refused(events.Failed(header.sender, header.reply_to, error.reason, cause=record), error)
        elif self.evaluation.measured(message):
            if self.evaluation.outstanding < outstanding:
                self._limits.evaluated(self.clock.stopwatch())
        elif header.kind is Kind.ERROR:
            self._on_error(message, record)
        else:
            self.roster.refuse(header.sender, RemoteWireError("unexpected", f"a {header.kind} from {header.sender}"), 0)

    def _on_reply(self, message: Message, record: int | None) -> None:
        """Store what a silo answers, if it fits what the silo was asked."""
        header, pending = message.header, self.rounds.pending
        silo, task = header.sender, pending.get(header.sender)
        if self.sums is not None and self.sums.repeats(message, task):
            self._outcomes.repeated(silo, header.reply_to, record)
            return
        outcome: Update | Answer | None = None if self.sums is None else self.sums.checked(message, task)
        if outcome is None:
            facts, base = self.run_context.facts_at(silo, header.base_version), self.states.get(header.base_version)
            outcome = validated(message, self.run_context, facts, task, base)
        self._outcomes.put(pending, silo, outcome.sequence, outcome, cause=record)

    def _on_error(self, message: Message, record: int | None) -> None:
        """Handle a peer's report of an error or its refusal: of a task, or of the peer itself."""
        silo, number, text = message.header.sender, message.header.reply_to, text_of(message)
        record = self.log.note(LogEvent.ERROR_REPORTED, peer=silo, error=text[:ERROR_CHARACTERS], caused_by=record)
        self.status.failed(silo, text)
        if number is not None and silo in self._facts:
            if self._outcomes.is_open(self.rounds.pending, silo, number):
                self._errors.reported(silo, text, message.payloads[0])
            self._fail(events.Failed(silo, number, reason_of(message), cause=record))
        elif silo == EVALUATOR:
            raise RunError(f"{silo}: {text}")
        elif silo in self._facts:
            # A silo that cannot continue is handled like any silo that stays away.
            self._errors.silo_failed(silo, text)
            self._on_peer_lost(silo, record)

    def _fail(self, failed: events.Failed, after: float | None = None) -> None:
        """Store a failure as the outcome of its task, unless the task has one; ``after`` as for Outcomes.put."""
        self._outcomes.put(self.rounds.pending, failed.silo, failed.sequence, failed, after, cause=failed.cause)

    def _check_peers(self) -> None:
        """Handle silent, lost and absent peers, and report the status."""
        now = self.clock.stopwatch()
        if now - self._checked < _POLL_SECONDS:
            return
        self._checked = now
        self._expel_unaccepted()
        for name in filter(self.roster.online, self._reconnects.expired(now, BEAT_SECONDS)):
            self._on_ready(Ready(name, returned=False), None)
        # A session also ends when a message cannot be delivered; such a peer is never reported as silent.
        for name in sorted(self.rounds.online):
            if not self.roster.online(name):
                self._on_peer_lost(name, self.roster.undelivered.pop(name, None))
        # Silence is judged as of the last time the queue was empty: after a long merge messages may be unread.
        for name in self.roster.silent(BEAT_SECONDS * LOST_BEATS, self._inbox.caught_up):
            self._on_peer_lost(name)
        patience = self._patience
        for name in [name for name in self.evaluation.requested if self._absences.seconds(name, now) > patience]:
            self.evaluation.give_up(name)
        self._fail_overdue()
        if self.rounds.awaited and now - self._began > patience:
            self._start_on(events.WaitEnded(), self.log.note(LogEvent.REJOIN_TIMEOUT))
        given_up = self._absences.give_up(patience, now, self.rounds.pending) if self.run_context.gives_up else {}
        for name, sequence in given_up.items():
            record = self.log.note(LogEvent.SILO_ABSENT, peer=name)
            self._fail(events.Failed(name, sequence, FailureReason.STAYED_AWAY, gone=True, cause=record))
        self.status.update(self.rounds, self._seen)

    def _fail_overdue(self) -> None:
        """Fail overdue tasks of connected silos; these silos are not selected until they reply."""
        if self.rounds.phase in (events.Phase.GATHERING, events.Phase.MERGING):
            return
        for task in self._limits.exceed(self._inbox.caught_up):  # judged as of then, as replies may be unread
            record = self.log.note(LogEvent.TASK_OVERDUE, peer=task.silo, sequence=task.sequence)
            self._handle(events.Lost(task.silo), record)
            self._fail(events.Failed(task.silo, task.sequence, FailureReason.OVERDUE, gone=True, cause=record))

    def _on_peer_lost(self, name: str, cause: int | None = None) -> None:
        """End a peer's session; ``cause`` is the number of the log record of why."""
        self.roster.drop(name)
        record = self.log.note(LogEvent.PEER_LOST, peer=name, caused_by=cause)
        if name in self._facts:
            self._absences.begin(name, self.clock.stopwatch())
            self._limits.lost(name, self.clock.stopwatch())
            self._handle(events.Lost(name), record)

    def _expel_unaccepted(self) -> None:
        """Continue without the peers whose keys are not or no longer accepted."""
        unaccepted = self.roster.unaccepted
        self._expelled &= unaccepted.keys()
        for name, record in list(unaccepted.items()):
            if name not in self._expelled:
                self._expelled.add(name)
                self._expel(name, record)

    def _expel(self, name: str, record: int) -> None:
        """Continue without a peer that the roster has expelled; a silo's pending task fails."""
        if name in self.rounds.online or name == EVALUATOR:
            self._on_peer_lost(name, record)
        if name in self._facts:
            self._handle(events.Expelled(name), record)
        task = self.rounds.pending.get(name)
        if task is not None and self._outcomes.is_open(self.rounds.pending, name, task.sequence):
            self._fail(events.Failed(name, task.sequence, FailureReason.EXPELLED, gone=True, cause=record))

    def _send(self, action: events.Send) -> None:
        silo = self.run_context.facts_at(action.silo, action.base_version)
        outcome = drawn_outcome(self.run_context, self.fault_injector, action, silo, self.sums)
        due = self._outcomes.expect(silo.name, action.sequence, self.run_context.outcome_at(silo.name, outcome))
        off = self.clock.virtual and not self.run_context.trace.on(silo.name, due)
        if off or not outcome.sent:
            # The task is known to fail, so it is not sent. While silos join or evaluate, none is stopped.
            if self.rounds.phase is events.Phase.COLLECTING:
                self.fault_injector.withhold(silo.name, outcome)
            if self._outcomes.get(silo.name, action.sequence) is None:
                failed = events.Failed(
                    silo.name, action.sequence, outcome.fails or FailureReason.WENT_OFF, cause=action.cause
                )
                self._fail(failed, max(0.0, outcome.due - self.clock.now()))
            return
        self.fault_injector.restart(silo.name)
        if not self.roster.online(silo.name) or silo.name in self._reconnects.waiting:
            self._absences.begin(silo.name, self.clock.stopwatch())
            return
        kind, info = Kind.SUM, None
        if self.sums is None or action.stage is events.Stage.TRAIN:
            kind, payloads = Kind.TASK, self.run_context.task(self.states[action.base_version], silo)
            info = self.run_context.task_info(action.round, self.saving.durably_committed(silo.name))
        else:
            payloads = self.sums.request(action.stage, silo.name)
        header = self.roster.header(silo.name, kind, sequence=action.sequence, base_version=action.base_version)
        # Stamped with the time of its first issue, so that a resent task is identical.
        message = Message(replace(header, sent_at=outcome.issued_at), payloads, info)
        if self.roster.send(silo.name, message):
            self.counters.add_traffic("down", silo.name, payloads)
            self._limits.sent(silo.name, action.sequence, self.clock.stopwatch())
            if action.stage is events.Stage.TRAIN:
                self.fault_injector.after_sending(silo.name, action.sequence, action.cause)

    @span("merge")
    def _merge(self, action: events.Merge) -> None:
        """Merge, write a checkpoint and notify the rounds machine; a crash leaves all of this done or none of it."""
        began, round_, arrived, cause = self.clock.stopwatch(), action.round, action.replies, action.cause
        now, merges = self.rounds.version, self.counters.participations
        merge = None if self.sums is None else self.sums.merge
        if self.sums is None:
            updates = [self._outcomes.update(reply.silo, reply.sequence) for reply in arrived]
        else:
            arrived = arrived if self.sums.complete else ()
            updates = [self.sums.update(reply.silo) for reply in arrived]
        replies = [weighted(self.run_context, update, self.states, now, merges) for update in updates]
        if not replies and (error := self._errors.of_all(self.run_context.plan.eligible)) is not None:
            raise self._errors.failure(f"no silo could train by round {round_}; the first error was {error}")
        merged = MergeResult(self.states[self.rounds.version], {})
        if replies:
            merged, left_out = merged_state(self.run_context, merged.state, replies, round_, merge)
            self.run_context.own_attributes.warn_of_changes(self.log.logger)
            for name in left_out:
                self.log.note(LogEvent.REPLY_LEFT_OUT, silo=name, version=self.rounds.version, caused_by=cause)
            self._errors.clear()
        for item in arrived:
            self._outcomes.remove(item.silo, item.sequence)
            self.counters.participations[item.silo] += 1
        version = self.rounds.version + 1
        self.states[version] = merged.state
        self.evaluation.evaluate_if_due(version, merged.state)
        waiting = self.clock.stopwatch()
        # The checkpoint depends on these evaluations; a stop may be requested meanwhile.
        if self.evaluation.personal_due(version):
            measured = self._measure_personal(version, self.rounds.committed, final=False)
        else:
            waits = self.evaluation.crowded or self.evaluation.decides
            measured = not waits or self.evaluation.wait(self._poll, self.stop_wanted, final=False)
        if not measured:
            self._stop()  # without a checkpoint: a resumed run repeats the merge and the evaluation
            return
        waited = self.clock.stopwatch() - waiting
        self.counters.add_seconds("evaluation", waited)
        self.states = states_in_use(self.states, {version, *self.evaluation.versions}, self.rounds.pending)
        line = merge_line(version, self.clock.now(), replies, merged.log)
        self.status.merged(line)
        # Written before the checkpoint: a resume from the previous one drops it; written after, it could be lost.
        append_metrics(self.run_context.folder, line, self.clock)
        last = self.rounds.plan.spent(self.rounds.sequences, self.rounds.pending) or self.evaluation.ends_after(version)
        self.saving.save(self.rounds.after_merge(last=last), self.states, self._outcomes.due, cause)
        self.counters.add_seconds("merge", self.clock.stopwatch() - began - waited)
        over = last or version >= self.rounds.plan.rounds
        self.stopping_for_late_silos = not over and self.late_silos() and not self.stop_wanted()
        if self.stopping_for_late_silos:
            self._stop()
        else:
            self._handle(events.Merged(version, last=last), cause)
