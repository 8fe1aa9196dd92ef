"""Measurements: asked of the evaluator for the global model, and at the end of silos with models of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from coordinator.inline import Inline
from coordinator.roster import Roster
from coordinator.setting import Setting
from fedmq.audit import MessageLog
from fedmq.errors import RemoteWireError
from fedmq.messages import EVALUATOR, Error, Header, Kind, Message, Metrics, Payload
from fedmq.outcomes import read_metrics
from fedmq.protocol import Personalised, Releasing, SiloFacts, State
from fedmq.runfolder import append_line

#: What a summary cannot be made without.
_NEEDED = "mean_r1"
#: Largest median rank taken of a silo, as many as the items that a run may measure by; all other figures are shares.
_LARGEST_RANK = 2.0**32
#: By how much a sum of shares may miss 1.
_ROUNDING = 1e-6


def _complete(measured: Metrics, silos: Iterable[str]) -> bool:
    """Whether a measurement has what the summary needs, of the whole and of each of these silos."""
    return _NEEDED in measured.values and all(_NEEDED in measured.per_silo.get(name, {}) for name in silos)


def _wrong(said: Payload | None, name: str, like: Metrics) -> str | None:
    """What is wrong with a silo's measurement of its own model; None if nothing is.

    Summaries are means and spreads over silos of figures that all have: one silo's names or numbers are everybody's.

    Args:
        said: the silo's answer.
        name: of the silo.
        like: an evaluation, which has the figures of the whole and of each silo's share that a silo measures, too.
    """
    if not isinstance(said, Metrics):
        return "no measurement"
    if said.per_silo.keys() != {name}:
        return "a measurement without its own share, or with another's"
    for found, wanted in ((said.values, like.values), (said.per_silo[name], like.per_silo[name])):
        if found.keys() != wanted.keys():
            odd = ", ".join(sorted(found.keys() ^ wanted.keys())[:3])
            return f"a measurement with other figures than an evaluation has: {odd}"
        for key, value in found.items():
            most = _LARGEST_RANK if key.endswith("_medr") else 1.0 + _ROUNDING
            if not 0.0 <= value <= most:
                return f"a measurement with {key} {value:.4g}, allowed: 0 to {most:.4g}"
    return None


class Measuring:
    """What has been asked, and what came back.

    Args:
        setting: of the run.
        roster: whom to ask.
        log: the coordinator's message log.
        evaluated: versions whose evaluation is on file already.

    Attributes:
        pending: versions the evaluator has not answered for.
        unusable: those of them whose answer was refused.
        metrics: of the last version evaluated.
        asked: silos whose own models are being measured.
        personal: what they answered.
    """

    def __init__(self, setting: Setting, roster: Roster | Inline, log: MessageLog, evaluated: Iterable[int]) -> None:
        self._setting, self._roster, self._log = setting, roster, log
        self._evaluated = set(evaluated)
        self._requests: dict[str, tuple[int, int, tuple[Payload, ...]]] = {}
        self.pending: list[int] = []
        self.unusable: set[int] = set()
        self.metrics: Mapping[str, float] = {}
        self.personal: dict[str, Metrics] = {}
        self._like: Metrics | None = None
        self._early: dict[str, Payload | None] = {}

    @property
    def asked(self) -> tuple[str, ...]:
        """Silos that owe a measurement of their own models."""
        return tuple(self._requests)

    def evaluate_if_due(self, version: int, state: State) -> None:
        """Ask the evaluator about a version, if the scenario wants it measured and it was not before."""
        every, last = self._setting.scenario.evaluation.every, self._setting.scenario.rounds
        if version in self.pending or version in self._evaluated:
            return
        if version in (0, last) or (every and version % every == 0):
            self.pending.append(version)
            self.evaluate(version, state)

    def evaluate(self, version: int, state: State) -> None:
        """Ask the evaluator, or ask it again."""
        protocol = self._setting.protocol
        more = protocol.release(state) if isinstance(protocol, Releasing) else ()
        header = self._roster.header(EVALUATOR, Kind.EVALUATE, sequence=version, base_version=version)
        model = state.model(self._setting.context.layout)
        self._roster.send(EVALUATOR, Message(header, (model, *more)))

    def evaluated(self, message: Message) -> None:
        """Take the evaluator's answer and put it on file."""
        version, payload = message.header.base_version, message.payloads[0] if message.payloads else None
        if version not in self.pending:
            return
        if not isinstance(payload, Metrics) or not _complete(payload, [s.name for s in self._setting.context.silos]):
            detail = f"version {version}: an evaluation without {_NEEDED} of the whole and of every silo"
            self._roster.refuse(EVALUATOR, RemoteWireError("unexpected", detail), 0)
            self.unusable.add(version)
            return
        self.pending.remove(version)
        self.unusable.discard(version)
        self._evaluated.add(version)
        self.metrics = dict(payload.values)
        per_silo = {name: dict(own) for name, own in payload.per_silo.items()}
        line = {"kind": "evaluation", "version": version, "metrics": self.metrics, "per_silo": per_silo}
        append_line(self._setting.folder.metrics, line)
        self._like = payload
        for name in list(self._early):
            self._judge(name, self._early.pop(name), payload)

    def ask_silos(
        self,
        names: Iterable[str],
        version: int,
        state: State,
        settled: Mapping[str, int],
        facts: Callable[[str, int], SiloFacts],
    ) -> None:
        """Ask the silos of a personalised method how their own models do; each measures its own, where it is.

        Args:
            names: whom.
            version: of the final model.
            state: the final one.
            settled: number of each silo's last merged task, whose state it measures.
            facts: of a silo at a version.
        """
        protocol = self._setting.protocol
        if isinstance(protocol, Personalised) and protocol.personalised:
            before = [line for line in read_metrics(self._setting.folder) if line["kind"] == "evaluation"]
            if before:
                self._like = Metrics(before[-1]["metrics"], before[-1]["per_silo"])
            for name in sorted(names):
                self._requests[name] = settled.get(name, 0), version, protocol.task(state, facts(name, version))

    def ask(self, name: str) -> bool:
        """Send a silo what it owes an answer to; returns whether it is on the line."""
        sequence, version, payloads = self._requests[name]
        header = self._roster.header(name, Kind.EVALUATE, sequence=sequence, base_version=version)
        return bool(self._roster.send(name, Message(header, payloads)))

    def give_up(self, name: str) -> None:
        """A silo stayed away: its own model is not measured."""
        self._log.note("peer stayed away: its own model is not measured", peer=name)
        del self._requests[name]

    def _owed(self, header: Header) -> bool:
        """Whether a message answers what a silo was asked; its last task's reply has the same number, said again."""
        request = self._requests.get(header.sender)
        return request is not None and (header.reply_to, header.base_version) == request[:2]

    def measured(self, message: Message) -> bool:
        """Take a silo's measurement of its own model, or its failure to make one; whether the message was that."""
        if not self._owed(message.header):
            return False
        name, payload = message.header.sender, message.payloads[0] if message.payloads else None
        if isinstance(payload, Error):
            self._log.note("error reported", peer=name, error=payload.text[:300])
        elif self._like is None:  # the evaluator is slower with its first evaluation
            self._early[name] = payload
        else:
            self._judge(name, payload, self._like)
        del self._requests[name]
        return True

    def _judge(self, name: str, payload: Payload | None, like: Metrics) -> None:
        """Keep a silo's measurement, or refuse it."""
        if (wrong := _wrong(payload, name, like)) is not None:
            self._roster.refuse(name, RemoteWireError("unexpected", wrong), 0)
        elif isinstance(payload, Metrics):
            self.personal[name] = payload

    def unreadable(self, header: Header) -> bool:
        """An answer cannot be read, which asking again would not change; whether it was one to a measurement."""
        if header.kind not in (Kind.REPLY, Kind.ERROR):
            return False
        if header.sender == EVALUATOR and header.base_version in self.pending:
            self.unusable.add(header.base_version)
        elif self._owed(header):
            del self._requests[header.sender]
        else:
            return False
        return True
