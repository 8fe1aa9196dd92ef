"""The interface of federated methods, which the modules in ``protocols/`` implement.

One class has a method's silo side and its coordinator side. Its functions depend on their arguments alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch

from fedmq.config.privacy import ItemNoise
from fedmq.config.scenario import Objective, Training
from fedmq.data.silo_dataset import SiloDataset
from fedmq.errors import RemoteWireError
from fedmq.federation.sums import SumLayout
from fedmq.federation.updates import read_only
from fedmq.models.two_tower import TwoTower
from fedmq.wire.layout import Layout
from fedmq.wire.payloads import Delta, Loss, Model, PartialDelta, Payload, UpdateReport

P = TypeVar("P")


@dataclass(frozen=True)
class SiloFacts:
    """What both the coordinator and the silo know about a silo."""

    name: str  # ``silo-00``, ``silo-01``, ...
    index: int  # position in the fixed order of silos
    image: bool  # whether it holds images
    text: bool  # whether it holds captions
    image_only: int = 0  # number of its training items that have an image only
    text_only: int = 0  # number of its training items that have captions only

    @property
    def paired(self) -> bool:
        """Whether it holds both modalities."""
        return self.image and self.text

    @property
    def held(self) -> str:
        """The modalities that it holds, in words."""
        return "images and captions" if self.paired else "images only" if self.image else "captions only"

    @property
    def unpaired(self) -> int:
        """Number of training items in addition to the pairs of a silo with both modalities; 0 for other silos."""
        return self.image_only + self.text_only if self.paired else 0


@dataclass(frozen=True)
class Context:
    """Constants of a run, the same in every process unless noted."""

    seed: int
    rounds: int  # number of merges over which the methods' schedules run; an extended run has more
    silos: tuple[SiloFacts, ...]
    layout: Layout  # layout of the shared parameters
    dim: int  # dimension d of the joint embedding
    training: Training  # optimiser, batch size, local epochs
    objective: Objective = field(default_factory=Objective)  # the base loss and its options
    label_names: tuple[str, ...] = ()  # names of the data set's L labels, in order; empty if it has no labels
    # Number of silos in a full synchronous round, for merges of fewer replies; None if every merge is full.
    cohort: int | None = None
    # Whether each merge takes all replies of a round, as in mode ``sync``; set in the coordinator only.
    whole_rounds: bool = True
    # Number of versions after which a silo's last known statistics are dropped; None keeps all.
    max_age: int | None = None
    items: ItemNoise | None = None  # clipping and noise in local steps; None for plain ones
    # Loads the public items, which belong to no silo, in both modalities; returns None if the data set marks none as
    # public.
    public: Callable[[], SiloDataset | None] = field(default=lambda: None, compare=False)
    # Builds the model with both frozen towers, for a coordinator that trains on public items.
    build: Callable[[], TwoTower] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class State:
    """A method's state at the coordinator between two merges; checkpoints contain all of it."""

    theta: torch.Tensor  # float32 [P], the shared parameters in the layout's order
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # further tensors of the method, by name
    # Further JSON-serialisable scalars, lists and dicts of the method, by name.
    values: Mapping[str, Any] = field(default_factory=dict)
    _models: dict[str, Model] = field(default_factory=dict, init=False, repr=False, compare=False)

    def model(self, layout: Layout) -> Model:
        """The shared parameters as a payload, cached so that it is checked and hashed once for all silos."""
        if layout.digest not in self._models:
            self._models[layout.digest] = Model(layout.digest, self.theta.numpy())
        return self._models[layout.digest]


@dataclass(frozen=True)
class Task:
    """A training task of a silo."""

    sequence: int  # the task's number, unique per silo
    base_version: int  # version (number of merges) of the model it starts from
    round: int  # the round in which the task was sent, from 0
    learning_rate: float  # learning rate of this round
    payloads: tuple[Payload, ...]  # the model and the method's further payloads


class EpochStore(Protocol):
    """Keeps a snapshot of a long task between two epochs; results do not depend on whether it does."""

    def load(self) -> Mapping[str, torch.Tensor]:
        """The snapshot that an earlier process kept; empty if there is none."""
        ...

    def resumed(self, epochs: int) -> None:
        """Note that the snapshot was used: training continues after this number of epochs."""

    def save(self, snapshot: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Keep a snapshot, if the last one or the start of the task was long ago."""


@dataclass(frozen=True)
class Local:
    """What a silo trains with: its dataset, its model object and its personal state."""

    silo: SiloFacts  # facts about the silo
    dataset: SiloDataset  # the items that have all of the silo's modalities; of a silo with both, its pairs
    model: TwoTower  # the two towers; load sets the downloaded parameters
    # Personal tensors from the silo's previous task, empty at the first one; never sent.
    state: Mapping[str, torch.Tensor]
    # In a silo with both modalities, the items with an image only and those with captions only, as far as there are
    # any; empty unless the method's traits say that it trains on them.
    unpaired: tuple[SiloDataset, ...] = ()
    validation: SiloDataset | None = None  # pairs held out by ``training.validation``; None if there are none
    epochs: EpochStore | None = field(default=None, compare=False)  # keeps snapshots of a long task; None keeps none
    secret: bytes | None = None  # of 32 bytes, for the noise in its steps; None draws it from the scenario's seed

    @property
    def samples(self) -> int:
        """Number of items that the silo trains on."""
        return len(self.dataset) + sum(map(len, self.unpaired))


@dataclass(frozen=True)
class Trained:
    """The result of local training."""

    payloads: tuple[Payload, ...]  # payloads of the reply
    state: Mapping[str, torch.Tensor]  # personal tensors to keep for the next task
    loss: float  # mean training loss
    # The method left the silo without training, whatever its data are; its update of zeros gets no noise.
    idle: bool = False


@dataclass(frozen=True)
class Encoders:
    """The encoders of a silo's personal model, by which it is evaluated."""

    image: Callable[[torch.Tensor], torch.Tensor]  # maps a batch of B images to embeddings [B, d] for ranking
    caption: Callable[[torch.Tensor], torch.Tensor]  # maps a batch of B captions to embeddings [B, d]


@dataclass(frozen=True)
class Update:
    """A silo's validated reply as input of a merge.

    The coordinator checks a reply once, when it arrives (:mod:`coordinator.updates`): its payloads are of the kinds
    that :meth:`FederatedProtocol.uploads` declares, each once, and fit the run. Methods do not check them again.
    """

    silo: SiloFacts  # the silo that replied, with the modalities it had when its task was sent
    sequence: int
    base_version: int  # version that the silo started from
    staleness: int  # version at the merge minus ``base_version``
    damping: float  # h(staleness), 1 for a fresh reply
    payloads: tuple[Payload, ...]  # the change of the parameters, and the statistics that the method has silos report
    # Weight factor of a rarely replying silo; 1 unless ``aggregation.balance`` is set.
    participation_weight: float = 1.0
    # Mean weight factor of the trained items: ``aggregation.single_weight`` if they lack a modality, 1 for pairs.
    modality_weight: float = 1.0
    # The state that its task was created from, to interpret a stale update; None if it is the state that the reply is
    # merged into.
    base: State | None = None

    @property
    def factor(self) -> float:
        """Factor of the reply's weight, applied before weights are normalised; with 0 it does not count."""
        return self.damping * self.participation_weight * self.modality_weight

    @property
    def report(self) -> UpdateReport | None:
        """What the silo reports of its update in a secure sum, in which the coordinator has no update of a silo."""
        return next((payload for payload in self.payloads if isinstance(payload, UpdateReport)), None)

    @property
    def _change(self) -> Delta | PartialDelta:
        return next(payload for payload in self.payloads if isinstance(payload, Delta | PartialDelta))

    @cached_property
    def delta(self) -> torch.Tensor:
        """Change of the parameters that the method shares, float32 [P]; a view, for element-wise sums only."""
        return read_only(self._change.buffer)

    @property
    def samples(self) -> int:
        """Number of local samples that the change was trained on."""
        return (self.report or self._change).n_samples

    @property
    def loss(self) -> float | None:
        """The training loss that the silo reports; None if the method has it report none."""
        return next((payload.value for payload in self.payloads if isinstance(payload, Loss)), None)


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge: the next state, and numbers for ``metrics.jsonl``."""

    state: State
    log: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Added:
    """A secure sum: averages over the silos in it."""

    step: torch.Tensor  # float64 [P], change of the parameters
    replies: Sequence[Update]  # of the silos in the sum
    weights: torch.Tensor  # their weights float64 [M]
    means: Mapping[str, torch.Tensor]  # float64, of other sections by name; without rows that stay as they are


@dataclass(frozen=True)
class WeightedSum:
    """A merge that adds a weighted sum of the updates, before that sum is known."""

    weights: torch.Tensor  # float64 [M] of the replies, sum 1, or all 0 if no reply counts
    rows: Mapping[str, torch.Tensor]  # each section's weights of the replies, float64 [M], sum at most 1
    renormalised: bool  # a branch is averaged over the silos that trained it: its row has the sum 1
    finish: Callable[[Added], MergeResult]  # the merge's result


def defines_sum(kind: type[FederatedProtocol]) -> bool:
    """Whether a method defines a secure sum, at least with some of its options.

    A class that overrides ``merge`` alone merges in another way than the ``weigh`` that it inherits.
    """
    merging, weighing = (next(each for each in kind.__mro__ if name in vars(each)) for name in ("merge", "weigh"))
    return weighing is not FederatedProtocol and merging in weighing.__mro__


def why_no_items(method: FederatedProtocol) -> str:
    """Why a method's local training gives no guarantee to single items; empty if it does."""
    if method.traits().personalised:
        return "its personal models are trained without noise, and their metrics are sent"
    if method.traits().unpaired == "anchored" and any(silo.unpaired for silo in method.context.silos):
        return "it trains on items without a pair beside the pairs"
    return method.no_items() if protects_items(type(method)) else FederatedProtocol.no_items(method)


def protects_items(kind: type[FederatedProtocol]) -> bool:
    """Whether a method's local training can have ``privacy.items``, at least with some of its options.

    A class that overrides a part of the training has to define :meth:`FederatedProtocol.no_items` again.
    """
    parts = ("no_items", "train", "trained", "work", "extra_loss", "kept")
    said, *owners = (next((each for each in kind.__mro__ if name in vars(each)), FederatedProtocol) for name in parts)
    return said is not FederatedProtocol and all(owner in said.__mro__ for owner in owners)


def encoders_of(model: TwoTower) -> Encoders:
    """The encoders of the model's two towers."""
    device = model.flat.device
    return Encoders(lambda x: model.image(x.to(device)), lambda x: model.caption(x.to(device)))


def take(payloads: Sequence[Payload], kind: type[P]) -> P:
    """Return the only payload of a kind.

    Raises:
        RemoteWireError: there is none, or more than one.
    """
    found = [payload for payload in payloads if isinstance(payload, kind)]
    if len(found) != 1:
        raise RemoteWireError("unexpected", f"expected one {kind.__name__} payload, found {len(found)}")
    return found[0]


@dataclass(frozen=True)
class Traits:
    """Properties of a method that the programs need to know; the defaults describe FedAvg.

    Args:
        pooled: the first silo holds the training data of all silos, in both modalities.
        personal_only: the shared model is not fully trained, so that retrieval needs a silo's personal model.
        personalised: silos have personal models, which they evaluate with :meth:`FederatedProtocol.encoders`.
        shared_layers: names of the layers that a PartialDelta updates, in the layout's order; None for the whole model.
        first_round_selects_all: the first synchronous round selects all eligible silos, whatever the participation.
        counts_items_twice: a row of class prototypes or of a memory may count an item once per modality.
        needs_public: the method needs a data set that marks public items, which sites with their own data do not.
        public_items: number of public items that the method trains on in addition to the silos' data, reported with its
            results; None for a method without a public set.
        reply_bytes: tensor bytes of its largest reply, if that grows with something other than the model [bytes].
        model_per_silo: tasks of one version carry another model for each silo.
        our_reading: the method was reconstructed from an incomplete description; runs and tables report this.
        unpaired: what a silo with both modalities does with items that lack one: they are ``ignored`` and counted, or
            ``anchored``, that is trained against what the other silos report of the modality that they lack.
        weighs_single_silos: merges weight the replies of single-modality silos by :attr:`Update.factor`, so that
            ``aggregation.single_weight`` applies.
        completes_items: a silo that lacks a modality trains both branches, on its items completed with public ones.
        exact_updates: the method needs updates as they were trained, without clipping, noise and compression.
        adapter: the ``backbone.adapter`` whose layers the method averages; None if it works with any.
    """

    pooled: bool = False
    personal_only: bool = False
    personalised: bool = False
    shared_layers: tuple[str, ...] | None = None
    first_round_selects_all: bool = False
    counts_items_twice: bool = False
    needs_public: bool = False
    public_items: int | None = None
    reply_bytes: int = 0
    model_per_silo: bool = False
    our_reading: bool = False
    unpaired: Literal["ignored", "anchored"] = "ignored"
    weighs_single_silos: bool = True
    completes_items: bool = False
    exact_updates: bool = False
    adapter: Literal["mma", "lora"] | None = None


@dataclass(frozen=True)
class NoOptions:
    """Options of a method without options."""


@dataclass(frozen=True)
class ReportedValue:
    """How reports show a number that a method reports of its merges."""

    title: str  # title of its figure
    axis: str  # title of the vertical axis
    meaning: str  # what it is, in a sentence or two


class FederatedProtocol(ABC):
    """A federated method: the computations of its silos and of its coordinator.

    A method defines the abstract functions and describes itself in :meth:`traits`. The other functions have defaults
    that suit FedAvg. The programs use only the traits and these functions, so all other attribute names are free.

    Attributes:
        Options: frozen dataclass, the schema of ``protocol:`` in a scenario; every option has a default.
        REPORTED: how reports show the numbers of :attr:`MergeResult.log`, by name; others are titled by their names.
    """

    Options: ClassVar[type[Any]] = NoOptions
    REPORTED: ClassVar[Mapping[str, ReportedValue]] = {}

    def __init__(self, options: Any, context: Context) -> None:
        """Keep the method's options and the run's context; a method that overrides this calls it."""
        self.options = options
        self.context = context

    def eligible(self, silo: SiloFacts) -> bool:
        """Whether the method can select this silo for training; by default any silo that holds data."""
        return silo.image or silo.text

    @abstractmethod
    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The payload kinds of this silo's replies, each of which occurs exactly once."""

    @abstractmethod
    def initial(self, theta: torch.Tensor) -> State:
        """The coordinator's state before the first round; ``theta`` is float32 [P]."""

    @abstractmethod
    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The payloads of a task for a silo."""

    @abstractmethod
    def train(self, local: Local, task: Task) -> Trained:
        """Train locally, at the silo."""

    @abstractmethod
    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Merge replies, at the coordinator.

        Args:
            state: the state before the merge.
            replies: the replies in the fixed order of silos, so that the result does not depend on their order of
                arrival.
            round_: number of the merge, from 0.
        """

    def weigh(self, state: State, replies: Sequence[Update], round_: int) -> WeightedSum:
        """The weights of a merge, before the sum of the updates is known.

        A method that defines it, and :meth:`sum_layout`, supports ``privacy.secure_aggregation``.

        Args:
            state: the state before the merge.
            replies: the replies in the fixed order of silos; they have reports instead of updates.
            round_: number of the merge, from 0.
        """
        raise NotImplementedError

    def sum_layout(self) -> SumLayout:
        """The parts of its replies that a secure sum adds."""
        raise NotImplementedError

    def no_sum(self) -> str:
        """Why a secure sum is not possible with these options or data, besides ``branch_renorm``; empty if it is."""
        return ""

    def no_items(self) -> str:
        """Why ``privacy.items`` does not cover its local training, with its options; empty if it does.

        It does if each step follows from losses of groups alone (``protocols.parts.item_groups``), which depend on
        the groups' items and on what the silo was sent.
        """
        return "its local training is more than steps along gradients of groups of items"

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """The traits known from the options: at least those that ``protocols.check_traits`` compares.

        Args:
            options: an instance of ``Options``.
        """
        return Traits()

    def traits(self) -> Traits:
        """All traits in this run, which include those of :meth:`traits_of`; by default these alone."""
        return self.traits_of(self.options)

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check those payloads of a reply whose shapes only the method knows, e.g. FedHAP's discriminator.

        Called before a reply is accepted, after its kinds have been checked; updates are as received.

        Raises:
            RemoteWireError: a payload does not have this run's shape; the reply is refused and the run continues.
        """
        return

    def release(self, state: State) -> tuple[Payload, ...]:
        """Payloads that the global model needs for inference in addition to its parameters, e.g. FedCAFE's memory.

        They are sent to the evaluator and written to the released model's folder.
        """
        return ()

    def mix_state(self, before: State, after: State, rate: float) -> State:
        """Adapt the state after a merge whose step was scaled by ``fedmq.federation.updates.mixed``.

        Override it if other parts of the state have to move by the same fraction as the model.

        Args:
            before: state before the merge.
            after: state after the merge, with the model already mixed.
            rate: the mixing rate, in [0, 1).
        """
        return after

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The encoders of a silo's personal model, which the silo evaluates on the held-out set in both modalities.

        Required if the traits say ``personalised``.

        Args:
            local: the silo's dataset, model and personal state.
            payloads: the payloads of a task at the current version.
        """
        raise NotImplementedError
