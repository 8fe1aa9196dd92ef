"""Ask the coordinator which keys of its scenario differ from ours; see docs/reference/wire.md, inquire."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from fedmq.config.run_id import MOST_NAMED, KeyDigests, named
from fedmq.errors import FedmqError
from fedmq.storage.json_files import Stored
from fedmq.wire.handshake import Accepted, HelloRefusedError
from fedmq.wire.inquiry import ask_status
from fedmq.wire.keys import Identity
from fedmq.wire.messages import Reason
from fedmq.wire.payloads import Error

#: Code of the error with which a silo or the evaluator names the keys that differ.
OTHER_SCENARIO = "other_scenario"
#: Time to wait for the answer [s].
_PATIENCE_SECONDS = 5.0
#: Maximum number of inquiries about a run: a coordinator that does not tell would be asked again and again.
_MOST_ASKED = 3


class _Coordinator(Stored):
    scenario: KeyDigests | None = None


class _Answer(Stored):
    coordinator: _Coordinator | None = None


def differing_keys(answer: str, scenario: Mapping[str, object]) -> tuple[str, ...]:
    """Keys of which the coordinator has another value; none if it does not tell.

    Args:
        answer: the JSON of its status.
        scenario: this side's scenario as plain data.
    """
    try:
        facts = _Answer.model_validate_json(answer).coordinator
    except ValidationError:
        return ()
    return () if facts is None or facts.scenario is None else facts.scenario.differing(scenario)


class ScenarioComparison:
    """Finds the keys that differ from a coordinator's scenario and tells it, so that both operators know.

    Args:
        uri: URI at which it listens.
        identity: this process, a silo of its run or the evaluator.
        accepted: accepted public keys, with that of the coordinator.
        scenario: this side's scenario as plain data.
        tells: tell the coordinator.
    """

    def __init__(
        self,
        uri: str,
        identity: Identity,
        accepted: Accepted,
        scenario: Mapping[str, object],
        *,
        tells: bool = True,
    ) -> None:
        self._uri, self._identity, self._accepted, self._scenario = uri, identity, accepted, scenario
        self._tells = tells
        self._found, self._times_asked = ("", ""), 0

    def keys(self, refusal: HelloRefusedError) -> str:
        """The keys in one line; empty if the refusal has another reason, or the coordinator does not tell.

        It waits some seconds for the coordinator's answer, for each run that the coordinator names: until there is an
        answer, but a few times at most.
        """
        if refusal.reason != Reason.WRONG_RUN:
            return ""
        run, keys = self._found
        if run != refusal.detail:
            keys, self._times_asked = "", 0
        if not keys and self._times_asked < _MOST_ASKED:
            self._times_asked += 1
            keys = named(self._asked())
        self._found = refusal.detail, keys
        return self._found[1]

    def _asked(self) -> tuple[str, ...]:
        found: tuple[str, ...] = ()

        def report(answer: str) -> Error | None:
            nonlocal found
            found = differing_keys(answer, self._scenario)
            return Error(OTHER_SCENARIO, "\n".join(found[:MOST_NAMED])) if found and self._tells else None

        try:
            ask_status(self._uri, self._identity, self._accepted, _PATIENCE_SECONDS, report)
        except FedmqError:
            return ()
        return found
