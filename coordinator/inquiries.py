"""Answer inquiries: requests for the run's status, signed with an accepted key."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

from coordinator.admission import Admission, OwnDataAdmission
from coordinator.peers import Peers
from coordinator.rounds import Phase
from fedmq.clock import Clock
from fedmq.config.scenario_digests import KeyDigests
from fedmq.federation.agreement import FormatError
from fedmq.packages import versions
from fedmq.runs.data_records import StatedFormat
from fedmq.runs.status import ERROR_CHARACTERS, CoordinatorFacts, SiloPhase, SiloStatus, StatusFile
from fedmq.text import printable
from fedmq.wire.channel import BEAT_SECONDS
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import EVALUATOR
from fedmq.wire.payloads import MAX_STATUS, RunStatus

#: Maximum length of each silo's error in a status that would otherwise be too large [characters].
_SHORT_ERROR = 40
#: Time without a message after which a silo that waits for the others is shown as lost [s].
SILENT_SECONDS = 5 * BEAT_SECONDS


class Inquiries:
    """Answers inquiries for the roster.

    Args:
        run: the run's id.
        silos: names of all silos.
        rounds: total number of rounds.
        clock: clock for the time stamp.
        log: the coordinator's message log, which notes each sender of an inquiry once.
        admission: knows what the silos stated about their data.
        scenario: the scenario as plain data, of which silos and the evaluator learn digests; None tells nothing.

    Attributes:
        latest: the last status of the rounds; None before the first.
    """

    def __init__(
        self,
        run: str,
        silos: Sequence[str],
        rounds: int,
        clock: Clock,
        log: MessageLog,
        admission: Admission | None = None,
        scenario: Mapping[str, object] | None = None,
    ) -> None:
        self._admission, self._scenario = admission, scenario
        self._run, self._silos, self._rounds, self._clock, self._log = run, tuple(silos), rounds, clock, log
        self._asked: set[str] = set()
        self.latest: Callable[[], StatusFile | None] = lambda: None

    def answer(self, name: str, peers: Peers) -> RunStatus:
        """The answer to an inquiry.

        Args:
            name: name of the key that the sender has proven to hold.
            peers: the run's peers, whose state is the status before the rounds begin.
        """
        if name not in self._asked:
            self._asked.add(name)
            self._log.note(LogEvent.STATUS_REQUESTED, peer=name)
        facts = self._facts(name)
        status = (self.latest() or self._before(peers)).model_copy(update={"coordinator": facts})
        text = status.model_dump_json()
        if len(text.encode()) > MAX_STATUS:
            short = {
                silo: each.model_copy(update={"error": each.error[:_SHORT_ERROR]})
                for silo, each in status.silos.items()
            }
            facts = facts.model_copy(update={"format": None})
            text = status.model_copy(update={"silos": short, "coordinator": facts}).model_dump_json()
        return RunStatus(text)

    def tells_scenario(self, name: str) -> bool:
        """Whether the sender of an inquiry, a silo of the run or the evaluator, learns digests of the scenario."""
        return self._scenario is not None and name in (*self._silos, EVALUATOR)

    def _facts(self, name: str) -> CoordinatorFacts:
        """Facts about this process; only silos and the evaluator learn the format of the run's data."""
        here, scenario = versions(), None
        if self._scenario is not None and self.tells_scenario(name):
            scenario = KeyDigests.of(self._scenario, secrets.token_bytes(16))
        if not isinstance(self._admission, OwnDataAdmission) or name not in (*self._silos, EVALUATOR):
            return CoordinatorFacts(versions=here, scenario=scenario)
        try:
            held = self._admission.likely
        except FormatError:  # the data stated so far do not fit together, or one modality is in none of them
            held = None
        agreed = None if held is None else StatedFormat.of(held)
        settled = self._admission.agreed is not None
        return CoordinatorFacts(versions=here, format=agreed, settled=settled, scenario=scenario)

    def _before(self, peers: Peers) -> StatusFile:
        heard = {**peers.heard(), **peers.joining()}
        silos = {name: self._before_rounds(name, peers, heard.get(name)) for name in self._silos}
        return StatusFile(
            run=self._run,
            written=self._clock.utc(),
            phase=Phase.GATHERING.value,
            round=0,
            rounds=self._rounds,
            loss=None,
            metrics={},
            up=0,
            down=0,
            now=self._clock.now(),
            elapsed=0.0,
            refused=dict(peers.refused),
            last_refused=printable(peers.refusal)[:ERROR_CHARACTERS],
            last_refused_at=self._clock.utc(peers.refused_at) if peers.refusal else None,
            silos=silos,
        )

    def _before_rounds(self, name: str, peers: Peers, heard: float | None) -> SiloStatus:
        """The status of a silo that was heard last at a stopwatch's time [s]; None if it has no session."""
        error = peers.failures.get(name, "")
        if heard is None:
            away = SiloPhase.LOST if error else SiloPhase.ABSENT
            return SiloStatus(phase=SiloPhase.WAITING if peers.online(name) else away, error=error)
        silent = self._clock.stopwatch() - heard > SILENT_SECONDS
        phase = SiloPhase.LOST if silent else SiloPhase.WAITING
        return SiloStatus(phase=phase, heard=self._clock.utc(heard), error=error)
