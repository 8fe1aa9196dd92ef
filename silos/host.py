"""A host: one process that runs many silos in turn, so that a thousand of them fit on one machine.

Each silo keeps its own key, session, message log and personal state on disk, as if it were a separate process. The
silos share the connection, the data and one model, into which each loads the parameters that it receives.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from fedmq.clock import Clock, WallClock
from fedmq.data.item_digests import ItemDigests, item_digests
from fedmq.encoders.gpu import release_unused_gpu_memory
from fedmq.errors import RemoteWireError
from fedmq.federation.participant import open_channel, raise_refused
from fedmq.federation.population import Population, build_population, device_of
from fedmq.models.two_tower import TwoTower
from fedmq.profiling import party, span
from fedmq.storage.logs import Logger, open_log
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.channel import STEP_SECONDS, Channel
from fedmq.wire.codec import keep_buffers
from fedmq.wire.handshake import Accepted
from fedmq.wire.inquiry import ScenarioComparison
from fedmq.wire.keys import Identity, load_accepted, load_identity, noise_key
from fedmq.wire.layout import agree
from fedmq.wire.message_log import MessageLog, StartFacts
from fedmq.wire.messages import COORDINATOR, Kind, Message
from fedmq.wire.transports.base import QUEUE
from fedmq.wire.transports.registry import connect_shared
from fedmq.wire.transports.shared_connections import Branch, beat_patience
from silos.personal_state import StateNotes, StateStore
from silos.program import KEPT_MODELS, AgreedSchedule, ReadySilo, reply_to, secure_sums_of
from silos.secure_sums import SecureSums
from silos.tasks import Silo, SiloArguments, Slots, slots_folder

#: Silos whose datasets a host keeps in memory: those that ran last.
_KEPT_SILOS = 8


@dataclass(frozen=True)
class HostArguments:
    """How a host is started.

    Args:
        names: the silos that it hosts.
        silo: the arguments of the first of them; those of the others differ in the name only. ``connect`` has the
            prefix ``shared+``, and ``keys`` holds the keys of all its silos.
        most: the number of silos of the largest host of the run, on which the heartbeat depends.
        index: number of the host; ``auto`` assigns the machine's GPUs round-robin.
    """

    names: tuple[str, ...]
    silo: SiloArguments
    most: int
    index: int = 0

    def of(self, name: str) -> SiloArguments:
        """The arguments of one silo."""
        return replace(self.silo, name=name)


@dataclass
class _Member:
    """A hosted silo while no task of it runs."""

    log: MessageLog
    notes: StateNotes
    logger: Logger
    sums: SecureSums | None
    agreed: AgreedSchedule | None = None
    sent_at: float = 0.0


@dataclass
class Host:
    """The silos of a host."""

    arguments: HostArguments
    population: Population  # the data and its partition among the silos
    model: TwoTower  # the two towers, which the silos share
    accepted: Accepted
    identities: Mapping[str, Identity]  # names and keys of its silos, by name
    clock: Clock = field(default_factory=WallClock)
    members: dict[str, _Member] = field(default_factory=dict)

    @cached_property
    def channels(self) -> ChannelGroup:
        """The channels of all silos."""
        return ChannelGroup(self.arguments.silo.connect, self._open, self.arguments.names)

    def _open(self, name: str, deliver: Callable[[Message], None]) -> Channel:
        arguments, folder = self.arguments.of(name), RunFolder(self.arguments.silo.out)
        identity, logger = self.identities[name], open_log(arguments.logs, name)
        log, channel = open_channel(
            arguments.run,
            arguments.connect,
            arguments.out,
            identity,
            self.accepted,
            clock=self.clock,
            now=lambda: self.members[name].sent_at,
            logger=logger,
            comparison=self._comparison,
            patience=beat_patience(self.arguments.most),
            deliver=deliver,
        )
        notes = StateNotes(StateStore(folder.silo_state(name)), log)
        sums = secure_sums_of(arguments, identity, log)
        self.members[name] = _Member(log, notes, logger, sums)
        log.start(identity, self.accepted, StartFacts.of(arguments.run, self.population.prepared.content))
        channel.statement = (self.population.statement(self.population.facts(name), self._items, arguments.run.id),)
        return channel

    @cached_property
    def _comparison(self) -> ScenarioComparison:
        """Asks the coordinator once for all silos of the host, in the name of the first one."""
        silo, first = self.arguments.silo, self.identities[self.arguments.names[0]]
        return ScenarioComparison(silo.connect, first, self.accepted, silo.scenario.model_dump(mode="json"))

    @cached_property
    def _items(self) -> ItemDigests:
        return item_digests(self.population.prepared, self.arguments.silo.scenario.dataset)

    @cached_property
    def _recent(self) -> OrderedDict[str, Silo]:
        return OrderedDict()

    @span("data")
    def silo(self, name: str) -> Silo:
        """A silo with its dataset, which is loaded unless the silo was among the last ones."""
        found = self._recent.pop(name, None)
        if found is None:
            arguments = self.arguments.of(name)
            own = arguments.scenario.privacy.noise_from == "key"
            noise = noise_key(self.identities[name]) if own else arguments.scenario.seed
            found = Silo(arguments, self.population, self.model, noise=noise)
        self._recent[name] = found
        while len(self._recent) > _KEPT_SILOS:
            self._recent.popitem(last=False)
        return found


def run_host(
    arguments: HostArguments,
    *,
    joined: Callable[[], None] = lambda: None,
    identities: Mapping[str, Identity] | None = None,
) -> None:
    """Run a host until the coordinator has stopped its silos; ``joined`` is called when the first one is accepted.

    Raises:
        InputError: a key or the data is invalid, or the coordinator's model has another layout.
    """
    torch.set_num_threads(1)
    silo, scenario = arguments.silo, arguments.silo.scenario
    device = device_of(silo.device or scenario.device, arguments.index)
    here = scenario.model_copy(update={"device": device})
    population = build_population(here, folder=silo.data, pooled=silo.run.pooled)
    model = population.build_model(scenario, device, ("image", "text"), initial=False)
    keep_buffers(KEPT_MODELS * model.flat.nbytes)
    identities = identities or {name: load_identity(silo.keys, name) for name in arguments.names}
    host = Host(arguments, population, model, load_accepted(silo.keys, COORDINATOR), identities)
    with contextlib.closing(Slots(slots_folder(silo.run.id), scenario.slots)) as slots:
        channels = host.channels
        try:
            channels.start()
            while (received := channels.receive()) is not None:
                name, message = received
                _answer(host, name, message, slots, joined)
                # The next message may take minutes; release the memory of this one's model.
                del message, received
        finally:
            channels.close()


def _answer(host: Host, name: str, message: Message, slots: Slots, joined: Callable[[], None]) -> None:
    member = host.members[name]
    if message.header.kind is Kind.STOP:
        return  # its channel has ended
    member.sent_at = message.header.sent_at
    if message.header.kind is Kind.LAYOUT:
        agree(message.layout, host.model.layout)
        joined()
    elif message.header.kind is Kind.ERROR:
        raise_refused(message, name)
    elif message.header.kind in (Kind.TASK, Kind.SUM, Kind.EVALUATE):
        silo = host.silo(name)
        member.agreed = member.agreed or AgreedSchedule(host.arguments.silo.run, silo.protocol.traits(), member.log)
        ready = ReadySilo(silo, member.agreed, member.notes, member.sums)
        with party(name):
            reply_to(host.channels.channels[name], ready, slots, message, member.logger)
        release_unused_gpu_memory()  # memory of a failed task
        member.notes.after_task(message.header.sequence, message.task.committed if message.task else 0)


#: Handshakes in progress at a time, so that the coordinator answers each before it is repeated.
_HANDSHAKES = 16

#: What a peer receives: its name, and a message.
Item = tuple[str, Message]


class ChannelGroup:
    """Channels that share a thread and a connection; ``open_channel(name, deliver)`` makes that of a peer."""

    def __init__(
        self, uri: str, open_channel: Callable[[str, Callable[[Message], None]], Channel], names: Sequence[str]
    ) -> None:
        self._uri = uri
        self._inbox: queue.SimpleQueue[Item | BaseException | None] = queue.SimpleQueue()
        self.channels: Mapping[str, Channel] = {name: open_channel(name, self._deliver_to(name)) for name in names}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="links", daemon=True)

    def _deliver_to(self, name: str) -> Callable[[Message], None]:
        return lambda item: self._inbox.put((name, item))

    # ------------------------------------------------------------------------------------- for the training thread
    def start(self) -> None:
        """Start connecting."""
        self._thread.start()

    @span("wait")
    def receive(self) -> Item | None:
        """The next message of any peer, with the peer's name; None when all channels have finished.

        Raises:
            Exception: the error that ended the thread.
        """
        item = self._inbox.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self, patience_s: float = 5.0) -> None:
        """Send the queued messages, then end the thread; waits at most ``patience_s`` [s]."""
        self._closing.set()
        for channel in self.channels.values():
            channel.begin_closing()
        if self._thread.ident is not None:
            self._thread.join(patience_s)
        with contextlib.ExitStack() as closing:  # all of them, even if a log cannot be written
            for channel in self.channels.values():
                closing.callback(channel.close, 0.0)

    # ------------------------------------------------------------------------------------------------- the thread
    def _run_thread(self) -> None:
        try:
            shared = connect_shared(self._uri, queue=QUEUE * len(self.channels))
            try:
                links = [_Link(each, shared.branch(number)) for number, each in enumerate(self.channels.values())]
                for link in links:
                    link.channel.attach(link.branch)
                checked = -math.inf
                while links:
                    now = time.monotonic()
                    everyone = now - checked >= STEP_SECONDS
                    checked = now if everyone else checked
                    links = _step(links, everyone=everyone)
                    with contextlib.suppress(RemoteWireError):  # not two frames: their silo is unknown
                        shared.pump(STEP_SECONDS)
            finally:
                shared.close()
        except BaseException as error:
            self._inbox.put(error)
        else:
            self._inbox.put(None)


@dataclass(frozen=True)
class _Link:
    channel: Channel
    branch: Branch


def _step(links: list[_Link], *, everyone: bool) -> list[_Link]:
    """Let the channels receive and send, with ``everyone`` also those without messages; returns those still active."""
    handshakes = 0
    for link in links:
        channel = link.channel
        handshakes += not channel.has_session
        if not channel.has_session and handshakes > _HANDSHAKES:
            continue  # begun when others are complete
        if everyone or link.branch.arrived or channel.has_outgoing or not channel.has_session:
            channel.step(link.branch, 0.0)
    # Only channels with a session receive the end of the run; the others would wait for a coordinator that is gone.
    over = any(link.channel.stopped for link in links)
    return [link for link in links if not (link.channel.finished or (over and not link.channel.has_session))]
