"""FedRep: silos train personal heads first, then the shared body, which is averaged (Collins et al., 2021).

The layers are those of ``fedper``: the projection heads, or the last layers of a hash network, stay personal, all
others are averaged. FedPer trains both at once. In FedRep (arXiv 2102.07078, algorithm 1) a silo downloads the body φ
and fits its head h_i to it for ``head_epochs`` epochs, from where its last task left it; then it trains φ for
``training.local_epochs`` epochs with h_i fixed, and uploads the change of φ. The released code's commands train 10
epochs of the head for every data set, and then the body for one (CIFAR-10, 2 classes per silo) or five (CIFAR-100,
FEMNIST, Sent140); with few items per silo, 10 epochs overfit the head. Personal models are evaluated: the body as
downloaded, and the head after the silo's last task.

Departures: φ is averaged by numbers of samples, as in the released code (lgcollins/FedRep), where algorithm 1 has the
plain mean (``weighting: uniform``). The released code ends with a round that trains heads alone; here they are
evaluated as they are. Each part of a task has its own optimiser, which starts anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from fedmq.config.sections import Passes
from fedmq.federation.protocol import Context, Local, Task
from protocols.fedavg import AnchoredOptions
from protocols.fedper import TOP
from protocols.parts import training
from protocols.parts.personal_model import PartialFedAvg


@dataclass(frozen=True)
class FedRepOptions(AnchoredOptions):
    """Options of FedRep, in addition to those of FedAvg.

    Args:
        head_epochs: epochs of the head in each task, before those of the body.
    """

    head_epochs: Passes = 10


class FedRep(PartialFedAvg):
    """FedRep, see the module docstring."""

    Options: ClassVar[type[Any]] = FedRepOptions
    options: FedRepOptions

    @staticmethod
    def layers_of(options: FedRepOptions, context: Context) -> tuple[str, ...]:
        """Names of the layers of the body, in the layout's order."""
        return tuple(entry.name for entry in context.layout.entries if not entry.name.startswith(TOP))

    def epochs(self, local: Local, task: Task, base: Tensor, work: training.Work | None) -> training.TrainingResult:
        """Epochs of the head, then of the body; the result is that of the body."""
        head, body = (partial(self.ranges_of, names=names) for names in (self.personal, self.shared))
        settings = self.context.training.model_copy(update={"local_epochs": self.options.head_epochs})
        training.train_epochs(local, replace(self.context, training=settings), task, base, work, trains=head)
        start = local.model.flat.detach().clone()
        return training.train_epochs(local, self.context, task, start, work, trains=body)


PROTOCOL = FedRep
