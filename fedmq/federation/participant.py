"""What silos and the evaluator have in common: a site's own data, the way into a run, reports of their errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedmq.clock import Clock
from fedmq.config import plug_ins
from fedmq.config.faults import wire_over
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.config.site import Site
from fedmq.data.item_digests import item_digests
from fedmq.data.prepare import prepare
from fedmq.data.prepared_arrays import Prepared
from fedmq.data.splits import SPLITS
from fedmq.errors import DataItemError, DiskError, FedmqError, InputError, RemoteWireError
from fedmq.federation.agreement import format_of, held_by, mask_of, run_data_of, stated_alone
from fedmq.federation.population import Population, device_here, own_population
from fedmq.packages import __version__
from fedmq.profiling import span
from fedmq.storage.cache import cache_folder
from fedmq.storage.logs import Logger
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress, printable
from fedmq.wire.channel import DISPLACED, Channel
from fedmq.wire.handshake import Accepted
from fedmq.wire.inquiry import ScenarioComparison
from fedmq.wire.keys import Identity
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import EVALUATOR, Kind, Message, Reason
from fedmq.wire.payloads import IMAGE, TEXT, DataFormat, DataStatement, Error, Payload, Refusal, SiloModalities
from fedmq.wire.secure_sum import only_masked

#: Time after the handshake without a message after which a process logs that it waits for the others [s].
_ACCEPTED_SECONDS = 1.0


@dataclass(frozen=True)
class SiteData:
    """The data of a site, ready to be stated."""

    scenario: Scenario
    prepared: Prepared
    statement: tuple[DataStatement, DataFormat]

    @classmethod
    def load(
        cls, scenario: Scenario, site: Site | None, run: str, progress: Progress | None = None, file: Path | None = None
    ) -> SiteData:
        """Load and describe a site's data; ``run`` is the run's id, the salt of the digest.

        Raises:
            InputError: there is no site file, it has no data, or the data cannot be read.
        """
        if site is None or site.data is None:
            place = "--site" if site is None else site.place("data")
            raise InputError(place, "nothing", "a site file with data, as partition.kind is own")
        cache = cache_folder()
        try:
            device = device_here(scenario.device)
            prepared = prepare(site.data, scenario.backbone, cache, scenario.seed, progress, device)
            items = item_digests(prepared, site.data, progress)
        except DataItemError as error:
            command = f"`fedmq data check {file or 'SCENARIO'} --site {site.file}`"
            raise DataItemError(error.place, error.found, error.usable, command) from None
        except InputError as error:
            if not error.place.startswith("data."):
                raise
            raise InputError(site.place(error.place), error.found, error.allowed) from None
        image, text = held_by(prepared, image=site.has("image"), text=site.has("text"))
        stated = stated_alone(prepared, items, run, image=image, text=text)
        return cls(scenario, prepared, (stated, format_of(prepared, image=image, text=text)))

    @property
    def warnings(self) -> list[str]:
        """One line for each kind of content that is probably unintended, such as cut captions."""
        return self.prepared.warnings

    @property
    def content(self) -> str:
        """The salted digest of the data."""
        return self.statement[0].data

    @property
    def held(self) -> str:
        """The modalities that the silo states, in words."""
        return {IMAGE: "images only", TEXT: "captions only"}.get(self.statement[0].mask, "images and captions")

    @property
    def samples(self) -> int:
        """Number of training items."""
        return int(self.statement[0].counts[SPLITS.index("train")].sum())

    def alone(self, name: str) -> Population:
        """The population as if this site were the only one, to try it before there is an agreement.

        A modality that the site lacks has the shape of the encoder's inputs; of a features file the other one's shape.
        """
        (stated, held), inputs = self.statement, self.prepared.inputs
        alike = self.scenario.backbone.name == "features"
        if held.image_dtype == "none":
            shape = inputs.text_shape if alike else inputs.image_shape
            held = replace(held, image_shape=np.array(shape, np.int64), image_dtype=inputs.image_dtype)
        elif held.text_dtype == "none":
            shape = inputs.image_shape if alike else inputs.text_shape
            held = replace(held, text_shape=np.array(shape, np.int64), text_dtype=inputs.text_dtype)
        modalities = SiloModalities((name,), np.array([stated.mask], np.int64))
        names, counts = self.scenario.silo_names, {name: stated.counts}
        data = run_data_of(names, held, modalities, cache_folder(), counts)
        return own_population(self.scenario, name, self.prepared, data)

    def population(self, name: str, agreement: Sequence[Payload]) -> Population:
        """The population as this site, of a silo or of the evaluator, sees it.

        Raises:
            RemoteWireError: the payloads are not an agreement, or not that of this site.
        """
        match agreement:
            case [DataFormat() as agreed, SiloModalities() as modalities]:
                pass
            case _:
                raise RemoteWireError(Reason.UNEXPECTED, "an agreement without data_format and silo_modalities")
        stated, held = self.statement
        names = self.scenario.silo_names
        data = run_data_of(names, agreed, modalities, cache_folder(), {name: stated.counts})
        here = [silo for silo in data.silos if silo.name == name]
        fits = set(held.label_names) <= set(agreed.label_names) and set(held.vocabulary) <= set(agreed.vocabulary)
        mine = name == EVALUATOR or (here and mask_of(image=here[0].image, text=here[0].text) == stated.mask)
        # Silos that will state their data later are not listed.
        known = modalities.silos == tuple(silo for silo in names if silo in modalities.silos)
        if not fits or not mine or not known:
            raise RemoteWireError(Reason.DATA, f"an agreement that does not fit what {name} stated")
        return own_population(self.scenario, name, self.prepared, data)


@span("start")
def open_channel(
    run: ResolvedRun,
    uri: str,
    out: Path,
    identity: Identity,
    accepted: Accepted,
    *,
    clock: Clock,
    now: Callable[[], float],
    logger: Logger,
    comparison: ScenarioComparison | None = None,
    forbidden: Callable[[Message, int], Refusal | None] | None = None,
    patience: float = 1.0,
    deliver: Callable[[Message], None] | None = None,
    ends_with_other_run: bool = False,
) -> tuple[MessageLog, Channel]:
    """Open the message log of a silo or the evaluator, and its channel to the coordinator.

    Args:
        run: the run.
        uri: where the coordinator listens.
        out: folder of the log.
        identity: name and key of the silo or the evaluator.
        accepted: accepted public keys.
        clock: clock of log and channel.
        now: the run's time as the process knows it, from the time stamp of its last message [s].
        logger: the log for operators.
        comparison: finds what differs from the coordinator's scenario; None makes one for this process.
        forbidden: as for :class:`Channel`, like the arguments after it.
        patience: see ``forbidden``.
        deliver: see ``forbidden``.
        ends_with_other_run: see ``forbidden``.
    """
    name, scenario = identity.name, run.scenario
    log = MessageLog(RunFolder(out).messages(name), name, clock, logger=logger)
    log.note(LogEvent.STARTED, run=run.id, program=__version__)
    if comparison is None:
        plain = scenario.model_dump(mode="json")
        comparison = ScenarioComparison(uri, identity, accepted, plain, tells=forbidden is None)
    if scenario.privacy.secure_aggregation is not None:
        forbidden = only_masked(forbidden, logger.warning)
    return log, Channel(
        uri,
        identity,
        accepted,
        run.id,
        log,
        clock,
        now=now,
        progress=logger.warning,
        forbidden=forbidden,
        patience=patience,
        deliver=deliver,
        options=wire_over(uri, scenario.wire, scenario.faults),
        comparison=comparison,
        ends_with_other_run=ends_with_other_run,
    )


def begin(link: Channel, logger: Logger, own: SiteData | None, /, **facts: object) -> Callable[[], Message | None]:
    """Start to connect; returns the function that receives the first message.

    That may take hours: meanwhile the log, with its facts about the start, says when the coordinator has accepted the
    key and the scenario.
    """
    for line in [] if own is None else own.prepared.notes:
        logger.info("the data", found=line)
    for line in [] if own is None else own.warnings:
        logger.warning("remark on the data", found=line)
    link.start()
    logger.info("connecting", **facts)

    def first() -> Message | None:
        while (message := link.receive(_ACCEPTED_SECONDS)) is None and not link.has_session:
            pass
        if message is not None:
            return message
        logger.info("accepted by the coordinator; waiting for the other silos")
        return link.receive()

    return first


def confirm(link: Channel, agreement: Message) -> None:
    """Confirm an agreement by sending it back."""
    link.send(Kind.AGREEMENT, agreement.payloads, sequence=0, reply_to=None, base_version=0)


def raise_refused(message: Message, name: str) -> None:
    """End this process if the coordinator refused its data or another one replaced it; it handles other errors itself.

    Raises:
        InputError: the coordinator refused its data, or another process takes part with its key.
    """
    for payload in message.payloads:
        if isinstance(payload, Error) and payload.code == DISPLACED:
            allowed = "one process of each name; this one ends, the other one takes part"
            raise InputError(name, "another process that takes part with this key", allowed)
        if isinstance(payload, Error) and payload.code == Reason.DATA:
            found = f"data that the coordinator refused: {printable(payload.text)}"
            raise InputError(name, found, "data that fit the run's, as the coordinator says")


#: Errors that end the process instead of failing the task or evaluation, which is repeated after a restart; a silo
#: starts from the state before the task. After a GPU error, e.g. an illegal address or a failed memory cell, the
#: process can no longer use the GPU.
FATAL_ERRORS: tuple[type[Exception], ...] = (DiskError, *filter(None, (getattr(torch, "AcceleratorError", None),)))
#: From a possible start of a path to the last slash, since folder names may contain any character.
_FOLDERS = re.compile(r"(?<![^\s'\"(\[=:])[.~]*/(?:.*/)?", re.DOTALL)


@contextmanager
def end_reported(link: Channel, who: str = "silo") -> Iterator[None]:
    """Report an error that ends this silo or evaluator to the coordinator, which would only miss its heartbeats."""
    try:
        yield
    except Exception as error:
        failed = Error.saying(f"{who}_failed", f"the {who} has ended: {reportable(error)}")
        link.send(Kind.ERROR, (failed,), sequence=0, reply_to=None, base_version=0)
        raise


def reportable(error: Exception, *, whole: bool = False) -> str:
    """The description of an error that is sent to the coordinator; the full text goes only to the silo's stderr.

    Paths are reduced to file names, since folders may contain user names. Of an error that is not fedmq's, only the
    type is sent, since its text may contain anything, and the line of the user's own file, which all processes have.
    With ``whole`` the text is sent, too: all processes of the run belong to one user of this machine.
    """
    name = type(error).__name__
    match error:
        case InputError():
            place, found, allowed = (_FOLDERS.sub("", each) for each in (error.place, repr(error.found), error.allowed))
            return f"{name}: {place}: found {found}, allowed: {allowed}"
        case FedmqError():
            return f"{name}: {_FOLDERS.sub('', str(error))}"
        case _:
            place = plug_ins.place_of_error(error)
            return f"{f'{place}: ' if place else ''}{name}{f': {error}' if whole else ''}"
