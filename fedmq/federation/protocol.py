"""What a federated method is: the interface that every file in ``protocols/`` implements.

A method's silo half and coordinator half stand side by side in one class. Both halves are functions of their
arguments: they hold no sockets, no clock and no generator of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

from fedmq.config.options import schema_problem
from fedmq.config.scenario import Objective, Training
from fedmq.data.silo_dataset import SiloDataset
from fedmq.errors import InputError, RemoteWireError
from fedmq.models.two_tower import TwoTower
from fedmq.wire.layout import Layout
from fedmq.wire.messages import Model, PartialDelta, Payload

P = TypeVar("P")


@dataclass(frozen=True)
class SiloFacts:
    """What the coordinator and the silo itself both know of a silo.

    Args:
        name: ``silo-00``, ``silo-01``, ...
        index: position in the fixed silo order.
        image: whether it holds images.
        text: whether it holds captions.
    """

    name: str
    index: int
    image: bool
    text: bool

    @property
    def paired(self) -> bool:
        """Whether it holds both modalities."""
        return self.image and self.text


@dataclass(frozen=True)
class Context:
    """Facts fixed for a whole run, the same in every process.

    Args:
        seed: the scenario's seed.
        rounds: how many merges the run makes.
        silos: all silos in their fixed order.
        layout: layout of the shared parameters.
        dim: dimension d of the joint embedding.
        training: optimiser, batch size, local epochs.
        objective: the base loss and its options.
        label_names: of the data set's L labels, in their order; empty where it has none.
        cohort: silos of a full synchronous round, for merges of fewer; None takes every merge for a full one.
        whole_rounds: the scenario's mode merges a round's replies at a time, as ``sync`` does; false of modes without
            rounds that merge fewer. The coordinator's half alone is told.
        max_age: versions after which a table of last-known statistics forgets a silo; None keeps all.
        public: loads the items that belong to no silo and may be seen by all, in both modalities; None where the data
            set marks none.
        build: builds the model with both its frozen towers, for a coordinator that trains on public items.
    """

    seed: int
    rounds: int
    silos: tuple[SiloFacts, ...]
    layout: Layout
    dim: int
    training: Training
    objective: Objective = field(default_factory=Objective)
    label_names: tuple[str, ...] = ()
    cohort: int | None = None
    whole_rounds: bool = True
    max_age: int | None = None
    public: Callable[[], SiloDataset | None] = field(default=lambda: None, compare=False)
    build: Callable[[], TwoTower] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class State:
    """The coordinator's half of a method between two merges; all of it is checkpointed.

    Args:
        theta: float32 [P], the shared parameters in the layout's order.
        tensors: whatever else the method keeps, by name.
        values: JSON-serialisable scalars, lists and dicts the method keeps, by name.
    """

    theta: torch.Tensor
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    _models: dict[str, Model] = field(default_factory=dict, init=False, repr=False, compare=False)

    def model(self, layout: Layout) -> Model:
        """The shared parameters as they go down.

        One object however many silos it goes to, so that its contents are checked and hashed once.
        """
        if layout.digest not in self._models:
            self._models[layout.digest] = Model(layout.digest, self.theta.numpy())
        return self._models[layout.digest]


@dataclass(frozen=True)
class Task:
    """What a silo is asked to do.

    Args:
        sequence: the task's number, unique per silo.
        base_version: number of merges in the model it starts from.
        round: the round (merge number) the task was handed out in, from 0.
        learning_rate: of this round.
        payloads: the model and whatever the method adds.
    """

    sequence: int
    base_version: int
    round: int
    learning_rate: float
    payloads: tuple[Payload, ...]


@dataclass(frozen=True)
class Local:
    """A silo's own side: its data, its model object and its personal state.

    Args:
        silo: facts about the silo.
        share: its data, without the modality it lacks.
        model: the two towers; :meth:`TwoTower.load` puts the downloaded parameters into it.
        state: personal tensors kept from its previous task (empty the first time); never on the wire.
    """

    silo: SiloFacts
    share: SiloDataset
    model: TwoTower
    state: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """What local training gives.

    Args:
        payloads: what goes up.
        state: personal tensors to keep until the next task.
        loss: mean training loss, for progress displays and the log.
    """

    payloads: tuple[Payload, ...]
    state: Mapping[str, torch.Tensor]
    loss: float


@dataclass(frozen=True)
class Encoders:
    """How a silo's own, personalised model embeds: what it is measured by.

    Args:
        image: a batch of images to what ranks, [B, d].
        caption: a batch of captions, likewise.
    """

    image: Callable[[torch.Tensor], torch.Tensor]
    caption: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Reply:
    """One silo's answer as the merge sees it.

    Args:
        silo: who answered.
        sequence: the task answered.
        base_version: version the silo started from.
        staleness: version at merge minus base version.
        damping: h(staleness), 1 for a fresh reply.
        payloads: what came up; kinds already checked against :meth:`FederatedProtocol.uploads`.
        rarity: how much more it counts because its silo replies rarely; 1 unless ``aggregation.balance`` is given.
        base: the state that its task was made from, for what a stale update has to be seen with; None if that is the
            state it is merged into.
    """

    silo: SiloFacts
    sequence: int
    base_version: int
    staleness: int
    damping: float
    payloads: tuple[Payload, ...]
    rarity: float = 1.0
    base: State | None = None

    @property
    def factor(self) -> float:
        """What its weight is multiplied by before weights are renormalised."""
        return self.damping * self.rarity


@dataclass(frozen=True)
class MergeResult:
    """What a merge gives: the next state and numbers worth a line in ``metrics.jsonl``."""

    state: State
    log: Mapping[str, float] = field(default_factory=dict)


def encoders_of(model: TwoTower) -> Encoders:
    """The model's own two towers."""
    device = model.flat.device
    return Encoders(lambda x: model.image(x.to(device)), lambda x: model.caption(x.to(device)))


def take(payloads: Sequence[Payload], kind: type[P]) -> P:
    """The one payload of a kind.

    Raises:
        RemoteWireError: there is none, or more than one.
    """
    found = [payload for payload in payloads if isinstance(payload, kind)]
    if len(found) != 1:
        raise RemoteWireError("unexpected", f"expected one {kind.__name__} payload, found {len(found)}")
    return found[0]


@dataclass(frozen=True)
class Traits:
    """What a method is and does beyond plain FedAvg; all that the programs know of it besides calling it.

    The defaults describe FedAvg.

    Args:
        pooled: the first silo holds the training data of all silos, in both modalities.
        own_only: the shared model is not trained as a whole, so that retrieval needs a silo's personal model.
        personalised: silos end up with personal models, which they measure themselves by
            :meth:`FederatedProtocol.encoders`.
        shared_layers: names of the layers that replies update, in the layout's order: replies carry a PartialDelta of
            them. None for the whole model.
        first_round_selects_all: the first synchronous round selects every eligible silo, whatever the participation.
        counts_items_twice: a row of class prototypes or of a memory may count an item once for each modality.
        public_items: number of public items that the method trains on beside the silos' data, reported with its
            results; None for a method without a public set.
        reply_bytes: bytes of the tensors of its largest reply, where that grows with something other than the model.
        our_reading: the method was reconstructed from an incomplete description; runs and tables say so.
    """

    pooled: bool = False
    own_only: bool = False
    personalised: bool = False
    shared_layers: tuple[str, ...] | None = None
    first_round_selects_all: bool = False
    counts_items_twice: bool = False
    public_items: int | None = None
    reply_bytes: int = 0
    our_reading: bool = False


@dataclass(frozen=True)
class NoOptions:
    """Options of a method that has none."""


class FederatedProtocol(ABC):
    """A federated method: what its silos and its coordinator compute.

    A method defines the abstract functions and states in :meth:`traits` what it does beyond FedAvg. The other functions
    have defaults that suit FedAvg. The programs ask the traits and call these functions; they never look for attributes
    by name, so a method may give its own attributes any other names.

    Attributes:
        Options: frozen dataclass, the schema of ``protocol:`` in a scenario; every option has a default.
    """

    Options: ClassVar[type[Any]] = NoOptions

    @abstractmethod
    def __init__(self, options: Any, context: Context) -> None: ...

    @abstractmethod
    def eligible(self, silo: SiloFacts) -> bool:
        """Whether the method ever selects this silo for training."""

    @abstractmethod
    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The payload kinds a reply of this silo holds, one of each."""

    @abstractmethod
    def initial(self, theta: torch.Tensor) -> State:
        """The coordinator's state before the first round; ``theta`` is float32 [P]."""

    @abstractmethod
    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """What goes down to a silo."""

    @abstractmethod
    def train(self, local: Local, task: Task) -> Trained:
        """Local training at the silo."""

    @abstractmethod
    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """Merge replies, given in the fixed silo order; never depends on the order of their arrival."""

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """The traits as far as the options alone tell; ``pooled`` and ``own_only`` are needed before a context exists.

        Args:
            options: an instance of ``Options``.
        """
        return Traits()

    def traits(self) -> Traits:
        """The traits of this run, with the same ``pooled`` and ``own_only`` as :meth:`traits_of`."""
        return Traits()

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check a reply's payloads where only the method knows the shapes, as FedHAP's discriminator.

        Called before a reply counts as one; kinds have been checked, updates are as they travel.

        Raises:
            RemoteWireError: a payload is not of this run's shape; the reply is refused, the run goes on.
        """
        return

    def release(self, state: State) -> tuple[Payload, ...]:
        """Payloads that the global model needs at inference besides its parameters, as FedCAFE's memory.

        They go to the evaluator and into the released folder.
        """
        return ()

    def followed(self, before: State, after: State, rate: float) -> State:
        """The state after a merge of whose step only a share was taken (``fedmq.federation.staleness.mixed``).

        A method that keeps something beside the model that has to move as far as the model does moves it here.

        Args:
            before: the merge.
            after: the merge, with the model that is kept already.
            rate: the share, in [0, 1).
        """
        return after

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """A silo's personal model, from its state and from what a task of now would bring.

        Called where the traits say ``personalised``; such a method has to define it. The silo measures the model on
        held-out items in both modalities; nothing but the figures leaves the silo.
        """
        raise NotImplementedError


def class_problem(found: object) -> str | None:
    """What keeps an object from being the class of a federated method; None if nothing does."""
    if not isinstance(found, type):
        return f"an object of type {type(found).__name__}, no class"
    if not issubclass(found, FederatedProtocol):
        return f"class {found.__name__}, which is no subclass of FederatedProtocol"
    if missing := sorted(found.__abstractmethods__):
        return f"class {found.__name__} without {', '.join(missing)}"
    problem = schema_problem(found.Options)
    return problem and f"class {found.__name__}, whose Options are {problem}"


def check_traits(name: str, method: FederatedProtocol, options: Any, context: Context) -> None:
    """Check that a method implements what its traits say.

    Args:
        name: of the method, for the error.
        method: made with ``options`` and ``context``.
        options: of the run.
        context: of the run.

    Raises:
        InputError: it does not.
    """
    place, traits, before = f"protocol {name}: traits", method.traits(), type(method).traits_of(options)
    for trait, now, early in (
        ("pooled", traits.pooled, before.pooled),
        ("own_only", traits.own_only, before.own_only),
    ):
        if now != early:
            raise InputError(place, f"{trait} {now}, but traits_of says {early}", "the same in both")
    if traits.personalised and type(method).encoders is FederatedProtocol.encoders:
        raise InputError(place, "personalised without encoders", "personalised False, or a class that defines encoders")
    if traits.own_only and not traits.personalised:
        raise InputError(place, "own_only without personalised", "personalised True as well, or own_only False")
    sends = any(PartialDelta in method.uploads(silo) for silo in context.silos if method.eligible(silo))
    known = [entry.name for entry in context.layout.entries]
    if traits.shared_layers is None:
        if sends:
            raise InputError(place, "a PartialDelta in uploads without shared_layers", "the names of its layers")
        return
    if not sends and any(map(method.eligible, context.silos)):
        raise InputError(place, "shared_layers without a PartialDelta in uploads", "both, or neither")
    shared = list(traits.shared_layers)
    if not shared or shared != [name for name in known if name in shared]:
        found = ", ".join(shared) or "no layer"
        raise InputError(place, f"shared_layers {found}", f"some of {', '.join(known)}, in this order")
