"""Public items of a run (split ``public``): they belong to no silo, and all silos and the coordinator know them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fedmq.data.silo_dataset import SiloDataset
from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Local, SiloFacts
from fedmq.models.two_tower import TwoTower


@dataclass(frozen=True)
class PublicItems:
    """The public items, and the coordinator's model of a method whose coordinator trains on them.

    Args:
        dataset: the items, in both modalities.
        context: context of the run.
    """

    dataset: SiloDataset
    context: Context

    @classmethod
    def of(cls, context: Context, name: str, instead: str) -> PublicItems:
        """The public items of a run.

        Args:
            context: context of the run.
            name: the method that needs them.
            instead: a method to use without them.

        Raises:
            InputError: the data set marks no public items.
        """
        found = context.public()
        if found is None:
            raise InputError("protocol.name", name, f"{instead}, as the data set marks no public items")
        return cls(found, context)

    @cached_property
    def model(self) -> TwoTower:
        """The model that the coordinator trains on the public pairs."""
        if self.context.build is None:
            raise ValueError("a coordinator can build its model")
        return self.context.build()

    def coordinator(self) -> Local:
        """The coordinator in the role of a silo that holds the public pairs."""
        facts = SiloFacts("coordinator", len(self.context.silos), True, True)
        return Local(facts, self.dataset, self.model, {})
