"""The evaluator program: evaluates models on the held-out split in a separate process, in parallel with the rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fedmq.clock import WallClock
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.config.site import Site
from fedmq.data.item_digests import item_digests
from fedmq.data.splits import SPLITS
from fedmq.encoders.gpu import release_unused_gpu_memory
from fedmq.errors import FedmqError, InputError
from fedmq.evaluation.heldout import HeldOut, load_inference
from fedmq.federation.participant import (
    FATAL_ERRORS,
    SiteData,
    begin,
    confirm,
    end_reported,
    open_channel,
    raise_refused,
    reportable,
)
from fedmq.federation.population import Population, build_population, device_of
from fedmq.federation.protocol import encoders_of
from fedmq.profiling import span
from fedmq.storage.logs import ErrorFile, Logger, LogOptions, open_log
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.channel import Channel
from fedmq.wire.keys import Identity, load_accepted, load_identity
from fedmq.wire.layout import agree
from fedmq.wire.message_log import StartFacts
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind, Message
from fedmq.wire.payloads import Error, Metrics, Payload


@dataclass(frozen=True)
class EvaluatorArguments:
    """How the evaluator is started."""

    run: ResolvedRun  # the resolved run, the same as the coordinator's
    connect: str  # the coordinator's URI
    keys: Path  # folder of the evaluator's key and the coordinator's public key
    out: Path  # folder for its message log
    device: str | None = None  # ``auto``, ``cpu`` or ``cuda:N``; None takes the scenario's
    data: Path | None = None  # folder of the prepared data; None looks it up
    site: Site | None = None  # the evaluator's site, which has its held-out set if the silos have their own data
    logs: LogOptions | None = None  # options of the log for operators; None for no log

    @property
    def scenario(self) -> Scenario:
        """The run's scenario, as resolved."""
        return self.run.scenario


class Evaluator:
    """Evaluates shared models on the held-out split.

    Attributes:
        shares_data: it evaluates on the run's data set, not on a held-out set of its own.
        threads: number of threads that rank, each with a share of the items; None takes torch's number.
    """

    def __init__(self, scenario: Scenario, population: Population, device: str, threads: int | None = None) -> None:
        self.threads = threads
        self.model = population.build_model(scenario, device, ("image", "text"), initial=False)
        self.shares_data = bool(scenario.data)
        self.heldout = HeldOut.load(scenario, population)
        # The evaluator's own held-out set has no parts that belong to silos.
        counts = {name: len(items) for name, items in self.heldout.items.items()}
        self.names = tuple(name for name, count in counts.items() if count) if population.agreed is None else ()

    @span("evaluate")
    def evaluate(self, payloads: Sequence[Payload]) -> Metrics:
        """Evaluate a model, which comes with the other payloads that its inference needs.

        Raises:
            RemoteWireError: no model, or more than one.
        """
        load_inference(self.model, payloads)
        encoders, binary = encoders_of(self.model), self.model.binary
        return self.heldout.measured(encoders, binary=binary, names=self.names, threads=self.threads)


@dataclass(frozen=True)
class EvaluatorStart:
    """The evaluator before it joins: its data are loaded and described."""

    scenario: Scenario  # the resolved scenario, with the evaluator's device
    statement: tuple[Payload, ...]  # what it states about its data
    items: int  # number of its held-out items
    content: str  # digest of its data, which it declares in its log
    evaluator: Evaluator | None  # ready for requests; None until the silos have agreed on labels and inputs
    data: SiteData | None = None  # data of an evaluator with its own held-out set; None in a simulated partition

    @classmethod
    @span("data")
    def of(cls, arguments: EvaluatorArguments) -> EvaluatorStart:
        """Load the data.

        Raises:
            InputError: the data cannot be read, an evaluator with its own set has no site file, or this machine does
                not have the device.
        """
        scenario, run = arguments.scenario, arguments.run.id
        here = scenario.model_copy(update={"device": arguments.device or scenario.device})
        device_of(here.device)
        if scenario.data is None:
            if not scenario.evaluator:
                allowed = "shared or both, for an evaluator with its own held-out set"
                raise InputError("evaluation.heldout", scenario.evaluation.heldout or "own", allowed)
            data = SiteData.load(here, arguments.site, run, file=arguments.run.source.file)
            split = SPLITS.index(scenario.evaluation.split)
            return cls(here, data.statement, int(data.statement[0].counts[split, 0]), data.content, None, data)
        population = build_population(here, folder=arguments.data)
        evaluator = Evaluator(scenario, population, device_of(here.device), _cores())
        statement = population.statement(None, item_digests(population.prepared, scenario.dataset), run)
        return cls(here, (statement,), len(evaluator.heldout.dataset), population.prepared.content, evaluator)

    def agreed(self, message: Message) -> Evaluator:
        """The evaluator, once the silos have agreed on labels and inputs.

        Raises:
            RemoteWireError: the agreement does not fit the evaluator's data.
        """
        assert self.data is not None  # noqa: S101 - only evaluators with their own data are sent an agreement
        population = self.data.population(EVALUATOR, message.payloads)
        return Evaluator(self.scenario, population, device_of(self.scenario.device), _cores())


def _cores() -> int:
    """Ranking threads: one per core, as all idle before the first and after the last round; at most 8, for memory."""
    return min(8, len(os.sched_getaffinity(0)))


def run_evaluator(
    arguments: EvaluatorArguments,
    logger: Logger | None = None,
    *,
    measured: Callable[[], None] = lambda: None,
    identity: Identity | None = None,
) -> None:
    """Run the evaluator until the coordinator sends a stop; ``measured`` is called after each evaluation.

    Without a logger it opens that of the arguments, without an identity it loads the key from its folder.

    Raises:
        InputError: a key or the data cannot be read or is invalid.
    """
    torch.set_num_threads(1)
    device_of(arguments.device or arguments.scenario.device)  # before anything is written or sent
    identity = identity or load_identity(arguments.keys, EVALUATOR)
    accepted = load_accepted(arguments.keys, COORDINATOR)
    last_sent = {"at": 0.0}
    logger = logger or open_log(arguments.logs, EVALUATOR)
    log, link = open_channel(
        arguments.run,
        arguments.connect,
        arguments.out,
        identity,
        accepted,
        clock=WallClock(),
        now=lambda: last_sent["at"],
        logger=logger,
    )
    console = arguments.logs is not None and arguments.logs.console
    errors = ErrorFile(RunFolder(arguments.out).errors(EVALUATOR), line=not console)
    try:
        start = EvaluatorStart.of(arguments)
        evaluator = start.evaluator
        log.start(identity, accepted, StartFacts.of(arguments.run, start.content))
        link.statement = start.statement
        receive = begin(link, logger, start.data, uri=arguments.connect, items=start.items)
        while (message := receive()) is not None and message.header.kind is not Kind.STOP:
            receive = link.receive
            if message.header.kind is Kind.ERROR:
                raise_refused(message, EVALUATOR)
            with end_reported(link, EVALUATOR):
                if message.header.kind is Kind.AGREEMENT:
                    evaluator = evaluator or start.agreed(message)
                    confirm(link, message)
                if evaluator is not None and message.header.kind is Kind.LAYOUT:
                    agree(message.layout, evaluator.model.layout)
            if evaluator is not None and message.header.kind is Kind.EVALUATE:
                last_sent["at"] = message.header.sent_at
                with end_reported(link, EVALUATOR):
                    _answer(link, evaluator, message, logger, errors)
                measured()
    finally:
        link.close()
    logger.info("head of the message log", records=log.records, head=log.head)


def _answer(link: Channel, evaluator: Evaluator, message: Message, logger: Logger, errors: ErrorFile) -> None:
    """Evaluate a model and send the result; any failure is reported to the coordinator, which ends the run.

    Raises:
        Exception: an error after which the process cannot continue.
    """
    header, version = message.header, message.header.base_version
    numbers = {"sequence": header.sequence, "reply_to": header.sequence, "base_version": version}
    try:
        result = evaluator.evaluate(message.payloads)
    except FATAL_ERRORS:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        known = isinstance(error, FedmqError)
        place = "" if known else errors.add(error, EVALUATOR, f"evaluation of version {version}")
        logger.warning("evaluation failed", version=version, error=text, **({"traceback": place} if place else {}))
        # With its own held-out set, the text of an unexpected error may contain anything.
        reported = reportable(error, whole=evaluator.shares_data)
        link.send(Kind.ERROR, (Error.saying("evaluation_failed", reported),), **numbers)
    else:
        link.send(Kind.REPLY, (result,), **numbers)
        logger.info("evaluated", version=version)
    finally:
        release_unused_gpu_memory()
