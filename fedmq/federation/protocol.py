"""What a federated method is: the interface that every file in ``protocols/`` implements.

A method's silo half and coordinator half stand side by side in one class. Both halves are functions of their
arguments: they hold no sockets, no clock and no generator of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch

from fedmq.config.scenario import Objective, Training
from fedmq.data.silo_dataset import SiloDataset
from fedmq.errors import RemoteWireError
from fedmq.models.two_tower import TwoTower
from fedmq.wire.layout import Layout
from fedmq.wire.messages import Model, Payload

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


class FederatedProtocol(Protocol):
    """A federated method.

    ``Options`` is a frozen dataclass: the schema of ``protocol:`` in a scenario. A class may be any of the ones below
    too, from :class:`Personalised` to :class:`Bulky`, each of which adds a thing or two.
    """

    Options: ClassVar[type[Any]]

    def __init__(self, options: Any, context: Context) -> None: ...

    def eligible(self, silo: SiloFacts) -> bool:
        """Whether the method ever asks this silo to train."""
        ...

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The payload kinds a reply of this silo holds, one of each."""
        ...

    def initial(self, theta: torch.Tensor) -> State:
        """The coordinator's state before the first round."""
        ...

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """What goes down to a silo."""
        ...

    def train(self, local: Local, task: Task) -> Trained:
        """Local training at the silo."""
        ...

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """Merge replies, given in the fixed silo order; never depends on the order of their arrival."""
        ...


@runtime_checkable
class Personalised(Protocol):
    """What a method adds whose silos end up with models of their own, which are measured where they are."""

    @property
    def personalised(self) -> bool:
        """Whether its options ask for such models."""
        ...

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """A silo's own model, from its state and from what a task of now would bring.

        The silo measures it on held-out items in both modalities; nothing but the figures leaves the silo.
        """
        ...


@runtime_checkable
class OwnOnly(Protocol):
    """What a method adds whose shared model is none to retrieve by: all of it, or some layers, stay as drawn."""

    @staticmethod
    def own_only(options: Any) -> bool:
        """Whether with these options only the silos' own models are trained as a whole; asked of the class itself."""
        ...


@runtime_checkable
class Checking(Protocol):
    """What a method adds whose replies hold payloads of shapes that only it knows, as FedHAP's discriminator."""

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check a reply's payloads, whose kinds are right, before it counts as one; updates are as they travel.

        Raises:
            RemoteWireError: a payload is not of this run's shape; the reply is refused, the run goes on.
        """
        ...


@runtime_checkable
class Sharing(Protocol):
    """What a method adds whose silos share some layers only: its replies hold a PartialDelta of them."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Their names, in the layout's order."""
        ...


@runtime_checkable
class Following(Protocol):
    """What a method adds that keeps beside the model what has to move as far as the model does."""

    def followed(self, before: State, after: State, rate: float) -> State:
        """The state where of a merge's step a share is taken (``fedmq.federation.staleness.mixed``).

        Args:
            before: the merge.
            after: the merge, with the model that is kept already.
            rate: the share, in [0, 1).
        """
        ...


@runtime_checkable
class Releasing(Protocol):
    """What a method adds whose global model needs more than its parameters at inference, as FedCAFE's memory."""

    def release(self, state: State) -> tuple[Payload, ...]:
        """Payloads that go with the model to the evaluator and into the released folder."""
        ...


@runtime_checkable
class Pooling(Protocol):
    """What a method adds that may train on everybody's data in one place, as a centralised upper bound does."""

    @property
    def pooled(self) -> bool:
        """Whether the first silo holds everybody's training data, in both modalities; asked of the class itself."""
        ...


@runtime_checkable
class Opening(Protocol):
    """What a method adds whose first synchronous round may ask everybody eligible, whatever the participation."""

    @property
    def opening(self) -> bool:
        """Whether it does."""
        ...


@runtime_checkable
class Counting(Protocol):
    """What a method adds whose rows of class prototypes or of a memory may count an item of both modalities twice."""

    @property
    def counts_both(self) -> bool:
        """Whether they do."""
        ...


@runtime_checkable
class Interpreting(Protocol):
    """What a method adds that was put together from less than a description; its runs and tables say so."""

    @property
    def our_reading(self) -> bool:
        """Whether it is this project's reading."""
        ...


@runtime_checkable
class Public(Protocol):
    """What a method adds that has items beside the silos' own, as others have not; its runs and tables say so."""

    @property
    def public_items(self) -> int:
        """How many."""
        ...


@runtime_checkable
class Bulky(Protocol):
    """What a method adds whose replies grow with something else than the model, as representations of public items."""

    @property
    def reply_bytes(self) -> int:
        """Bytes of the tensors of its largest reply."""
        ...
