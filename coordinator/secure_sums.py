"""The coordinator's part in secure sums: what it sends in each step of a round, and the sum of the masked updates.

The rounds machine decides who takes part in each step; :class:`SecureSums` keeps what the silos sent in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from coordinator.faults import FaultInjector
from coordinator.round_events import Collect, PendingTask, Send, Stage
from coordinator.run_context import CLIP_NORM, RunContext, clip_norm
from coordinator.updates import weighted
from fedmq.errors import RemoteWireError
from fedmq.federation.faults import FailureReason, TaskOutcome
from fedmq.federation.noise import CLIP_BIT, next_norm
from fedmq.federation.protocol import Added, MergeResult, State, Update, WeightedSum
from fedmq.federation.sums import scales, with_bit
from fedmq.profiling import span
from fedmq.wire import secure_sum
from fedmq.wire.codec import digest as content_of
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Message, Reason
from fedmq.wire.payloads import (
    F64,
    MaskedUpdate,
    Payload,
    RevealedShares,
    SealedShares,
    SumKeys,
    SumWeights,
    Survivors,
    UpdateReport,
)
from fedmq.wire.secure_sum import Mask, Sum, singles_out

_ANSWERS: Mapping[type[Payload], Stage] = {
    SealedShares: Stage.SHARE,
    MaskedUpdate: Stage.MASK,
    RevealedShares: Stage.REVEAL,
}


@dataclass(frozen=True)
class Answer:
    """A silo's checked answer in a step of a secure sum."""

    sequence: int
    payload: SealedShares | MaskedUpdate | RevealedShares
    loss: None = None  # as of an update


class SecureSums:
    """The secure sum of the present round.

    Raises:
        InputError: the key of a silo is not accepted.
    """

    def __init__(
        self, run_context: RunContext, accepted: Mapping[str, Ed25519PublicKey], run: str, log: MessageLog
    ) -> None:
        options = run_context.scenario.privacy.secure_aggregation
        assert options is not None  # noqa: S101 - made only for runs with secure aggregation
        self._options, self._run_context, self._run, self._log = options, run_context, run, log
        keys = str(run_context.folder.root)
        self._roster = secure_sum.roster_digest(keys, accepted, run_context.scenario.silo_names)
        self._accepted = accepted
        self._privacy = run_context.scenario.privacy
        self._layout = with_bit(run_context.protocol.sum_layout(), self._privacy)
        self._version_of: dict[str, int] = {}  # of each masked update so far, by its digest
        self._begin()

    def _begin(self) -> None:
        self._updates: dict[str, Update] = {}
        self._keys: SumKeys | None = None
        self._shares: dict[str, SealedShares] = {}
        self._masked: dict[str, MaskedUpdate] = {}
        self._summed: frozenset[str] = frozenset()  # the silos whose masked updates are in the sum
        self._sum: Sum | None = None
        self._weighted: WeightedSum | None = None
        self._sections: Mapping[int, F64] | None = None  # sums by the index of their section, once they are known
        self._branches_left: list[str] = []
        self._rows_left = 0
        self.ends: str = ""  # why the round ends without a merge although enough silos answered

    # ------------------------------------------------------------------------------------------- what silos send
    def repeats(self, message: Message, task: PendingTask | None) -> bool:
        """Whether a silo's reply is of another step than its pending task, as one to a request that was sent again."""
        found = next((_ANSWERS[type(each)] for each in message.payloads if type(each) in _ANSWERS), Stage.TRAIN)
        if task is None or task.sequence != message.header.reply_to:
            return found is not Stage.TRAIN
        return found is not task.stage

    def checked(self, message: Message, task: PendingTask | None) -> Answer | None:
        """A silo's answer in a step, if it fits what the silo was asked; None for a reply to a task, whose report fits.

        Raises:
            RemoteWireError: it has other payloads or sizes.
        """
        name = message.header.sender
        if task is None or task.stage is Stage.TRAIN:
            self._check_report(message)
            return None
        assert self._keys is not None  # noqa: S101 - the silo has a step's task
        if len(message.payloads) != 1:
            raise RemoteWireError(Reason.UNEXPECTED, "an answer in a secure sum with other payloads")
        (payload,) = message.payloads
        match payload:
            case SealedShares(sealed=rows) if len(rows) == len(self._keys.silos):
                return Answer(task.sequence, payload)
            case MaskedUpdate(buffer=values) if self._sum is not None and name in self._sum.weights.silos:
                digest = self._run_context.context.layout.digest
                if (payload.layout_digest, values.size) == (digest, self._sum.size(name)):
                    version = self._version_of.setdefault(content_of(payload), message.header.base_version)
                    if version != message.header.base_version:
                        raise secure_sum.refused(f"the masked update of version {version} again")
                    return Answer(task.sequence, payload)
            case RevealedShares(shares=rows) if self._sum is not None and len(rows) == len(self._sum.weights.silos):
                return Answer(task.sequence, payload)
            case _:
                pass
        raise RemoteWireError(Reason.LAYOUT, f"a {payload.KIND} of another size than this round's")

    def _check_report(self, message: Message) -> None:
        """Check the signature of a silo's report, and that it accepts the same silos and keys.

        Raises:
            RemoteWireError: it is not signed for this round, or the silo accepts others.
        """
        version, name = message.header.base_version, message.header.sender
        for report in message.payloads:
            if not isinstance(report, UpdateReport):
                continue
            if report.roster != self._roster:
                detail = f"{name} accepts other silos or keys than the coordinator: compare `fedmq keys show` of both"
                raise secure_sum.refused(detail)
            if strange := set(report.trained) - set(self._layout.branches):
                raise RemoteWireError(Reason.MALFORMED, f"an update of branch {min(strange)}, which the model lacks")
            rows = len(self._layout.sizes) - self._layout.first_held
            if (found := len(report.support)) != rows:
                raise RemoteWireError(Reason.LAYOUT, f"the support of {found} rows, expected {rows}")
            parts = (report.keys, report.commitment, report.signature)
            secure_sum.check_signature(self._accepted[name], self._run, version, name, self._roster, *parts)

    # ------------------------------------------------------------------------------------------- steps of a round
    def outcome(self, task: Send, fault_injector: FaultInjector) -> TaskOutcome:
        """The outcome of a step, which takes a round trip: the upload of the update counts with the training."""
        outcome = fault_injector.step_outcome(task, self._run_context.cost.cost.latency)
        if task.stage is Stage.REVEAL and self.ends:
            outcome = replace(outcome, fails=FailureReason.WEIGHTS, sent=False)
        return outcome

    def collect(
        self,
        action: Collect,
        answers: Mapping[str, Update | Answer],
        states: Mapping[int, State],
        merged: Mapping[str, int],
    ) -> None:
        """Continue with what silos sent in a stage, in the fixed order of silos; nothing of it ends the sum.

        ``states`` are those that are kept, by version, ``merged`` the numbers of each silo's replies that were merged
        before.
        """
        stage, version = action.stage, action.round
        if stage is Stage.TRAIN:
            self._begin()
            self._updates = {name: each for name, each in answers.items() if isinstance(each, Update)}
            self._keys = self._signed_keys()
        payloads = {name: each.payload for name, each in answers.items() if isinstance(each, Answer)}
        if stage is Stage.SHARE:
            self._shares = {name: each for name, each in payloads.items() if isinstance(each, SealedShares)}
            updates = [self._updates[name] for name in self._shares]
            replies = [weighted(self._run_context, each, states, version, merged) for each in updates]
            self._weighted = self._run_context.protocol.weigh(states[version], replies, version)
            self._sum = self._agreed(action, self._weighted, states[version])
        elif stage is Stage.MASK:
            self._masked = {name: each for name, each in payloads.items() if isinstance(each, MaskedUpdate)}
            self.ends = self._unsafe()
        elif stage is Stage.REVEAL:
            revealed = {name: each for name, each in payloads.items() if isinstance(each, RevealedShares)}
            self._end(revealed, action)
            self._summed, self._masked = frozenset(self._masked), {}  # memory for the next round

    def _signed_keys(self) -> SumKeys:
        reports = [update.report for update in self._updates.values()]
        found = [report for report in reports if report is not None]
        keys, committed, signatures = (
            np.stack([getattr(report, field) for report in found]) for field in ("keys", "commitment", "signature")
        )
        return SumKeys(tuple(self._updates), keys, committed, signatures)

    def _agreed(self, action: Collect, weighted: WeightedSum, state: State) -> Sum:
        """The sum that the silos are to agree on, without sections whose weights would single a silo out."""
        assert self._keys is not None  # noqa: S101 - the silos have reported
        version, layout, privacy, found = action.round, self._layout, self._privacy, dict(weighted.rows)
        if layout.bit:
            reports = [self._updates[name].report for name in self._shares]
            trained = torch.tensor([float(report is not None and bool(report.trained)) for report in reports])
            found[CLIP_BIT] = trained.double() / max(1.0, float(trained.sum()))
            privacy = privacy.model_copy(update={"clip_norm": clip_norm(state, privacy)})
        rows = np.stack([found[name].numpy() for name in layout.sizes])
        for place, name in enumerate(layout.sizes):
            if (wrong := singles_out(rows[place], self._options, layout.ratios[place])) is None:
                continue
            rows[place] = 0.0
            if place < layout.first_row:
                self._branches_left.append(name)
                self._log.note(
                    LogEvent.BRANCH_LEFT_ALONE, version=version, branch=name, why=wrong, caused_by=action.cause
                )
        weights = SumWeights(layout.layout.digest, tuple(self._shares), tuple(layout.sizes), rows)
        least = secure_sum.needed(len(self._keys.silos), self._options.threshold)
        sizes, bounds = tuple(layout.sizes.values()), scales(layout, privacy, rows, least).bounds
        return Sum(self._run, version, self._roster, self._keys, weights, sizes, bounds, layout.first_row)

    def _unsafe(self) -> str:
        """Why the silos left would refuse to reveal what removes the masks; empty if they do not."""
        assert self._sum is not None  # noqa: S101 - the weights are known
        left = Survivors(tuple(self._masked))
        try:
            layout = self._layout
            secure_sum.check_policy(self._sum.weights, self._options, 1, layout.first_row, layout.ratios, left)
        except RemoteWireError as error:
            return error.detail
        return ""

    def request(self, stage: Stage, silo: str) -> tuple[Payload, ...]:
        """What a silo is sent in a step."""
        assert self._keys is not None  # noqa: S101 - the silos have reported
        if stage is Stage.SHARE or self._sum is None:
            return (self._keys,)
        if stage is Stage.MASK:
            return self._keys, self._sum.weights
        place = self._keys.silos.index(silo)
        sealed = np.zeros((len(self._keys.silos), 60), np.uint8)
        for sender, shares in self._shares.items():
            sealed[self._keys.silos.index(sender)] = shares.sealed[place]
        return self._keys, self._sum.weights, Survivors(tuple(self._masked)), SealedShares(sealed)

    def _end(self, revealed: Mapping[str, RevealedShares], action: Collect) -> None:
        if revealed and self._sum is not None:
            try:
                self._sections = self._unmasked(self._sum, revealed)
                self._note_rows(self._sum, action)
                return
            except RemoteWireError as error:
                self.ends = error.detail
        why = self.ends or "too few silos answered"
        self._log.note(LogEvent.SUM_ENDED, version=action.round, why=why, caused_by=action.cause)

    def _note_rows(self, agreed: Sum, action: Collect) -> None:
        """Name the rows that silos reported, but that are left as they are."""
        left = [name for name, place in self._rows_reported(agreed) if place not in (self._sections or {})]
        if left:
            rows = ", ".join(left)
            self._log.note(LogEvent.ROWS_LEFT_ALONE, version=agreed.version, rows=rows, caused_by=action.cause)
        self._rows_left = len(left)

    def _rows_reported(self, agreed: Sum) -> Iterator[tuple[str, int]]:
        reports = [self._updates[name].report for name in agreed.weights.silos]
        support = np.stack([report.support for report in reports if report is not None])
        for row in np.flatnonzero(support.any(axis=0)):
            place = self._layout.first_held + int(row)
            yield agreed.weights.branches[place], place

    # ------------------------------------------------------------------------------------------- the sum
    @property
    def complete(self) -> bool:
        """Whether the sum is known."""
        return self._sections is not None

    @span("merge")
    def _unmasked(self, agreed: Sum, revealed: Mapping[str, RevealedShares]) -> Mapping[int, F64]:
        """The sums of the masked updates by section, each over the silos that take part in it.

        Rows of silos that dropped out are left out.

        Raises:
            RemoteWireError: shares do not give the secrets that silos committed to, or the sum is out of range.
        """
        seeds = self._seeds(agreed, revealed)
        known = (*range(agreed.first_row), *agreed.whole_rows(self._masked))
        whole = {place: agreed.whole[place] for place in known}
        total = np.zeros(sum(agreed.sizes), np.uint32)
        dropped = {name: secure_sum.mask_key(seeds[name]) for name in agreed.weights.silos if name not in self._masked}
        masks = list[Mask]()
        for name, masked in self._masked.items():
            for place, where in agreed.sections(name).items():
                if place in whole:
                    total[whole[place]] += masked.buffer[where]
            masks.append(agreed.own_mask(name, seeds[name], sign=-1))
            masks += [agreed.pair_mask(key, name, other, sign=-1) for other, key in dropped.items()]
        secure_sum.add_masks(total, whole, masks)
        return {place: secure_sum.decoded(total[where], agreed.bounds[place]) for place, where in whole.items()}

    def _seeds(self, agreed: Sum, revealed: Mapping[str, RevealedShares]) -> dict[str, bytes]:
        """The secrets that remove the masks: of silos in the sum the own seed, of the others that of their key."""
        keys, seeds = agreed.keys, dict[str, bytes]()
        helpers = sorted(revealed, key=keys.silos.index)[: secure_sum.needed(len(keys.silos), self._options.threshold)]
        for row, name in enumerate(agreed.weights.silos):
            shares = {keys.silos.index(each): revealed[each].shares[row].tobytes() for each in helpers}
            seed, place = secure_sum.combined(shares), keys.silos.index(name)
            if name in self._masked:
                fits = secure_sum.commitment(seed) == keys.commitments[place].tobytes()
            else:
                public = secure_sum.mask_key(seed).public_key().public_bytes_raw()
                fits = public == keys.keys[place, 0].tobytes()
            if not fits:
                raise secure_sum.refused(f"the shares of {name} from {', '.join(helpers)} do not give its secret")
            seeds[name] = seed
        return seeds

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Merge the sums: each is divided by the weights that arrived."""
        weighted, agreed, sections = self._weighted, self._sum, self._sections
        assert weighted is not None and agreed is not None and sections is not None  # noqa: S101 - the sum is complete
        here = torch.tensor([name in self._summed for name in agreed.weights.silos])
        weights, means = weighted.weights[here], dict[str, torch.Tensor]()
        step = torch.zeros(sum(part.stop - part.start for part in self._layout.branches.values()), dtype=torch.float64)
        for place, values in sections.items():
            name, row = agreed.weights.branches[place], torch.from_numpy(agreed.weights.weights[place])
            part = self._layout.branches.get(name)
            arrived = float(row[here].sum() if weighted.renormalised or part is None else weights.sum())
            if arrived:
                means[name] = torch.from_numpy(values).div_(arrived)
            if part is not None and arrived:
                step[part] = means.pop(name)
        weights = weights / weights.sum() if float(weights.sum()) else weights
        bit = means.pop(CLIP_BIT, None)
        merged = weighted.finish(Added(step, replies, weights, means))
        if (adaptive := self._privacy.adaptive_clip) is not None:
            norm = clip_norm(state, self._privacy)
            norm = norm if bit is None else next_norm(norm, 0.5 + float(bit), adaptive)
            kept = replace(merged.state, values={**merged.state.values, CLIP_NORM: norm})
            merged = replace(merged, state=kept, log={**merged.log, CLIP_NORM: norm})
        counts = {"branches_left_alone": len(self._branches_left), "rows_left_alone": self._rows_left}
        return replace(merged, log={**merged.log, **{name: float(count) for name, count in counts.items() if count}})

    def update(self, silo: str) -> Update:
        """A silo's reply to its task."""
        return self._updates[silo]
