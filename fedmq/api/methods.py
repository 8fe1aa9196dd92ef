"""What users' own methods and base losses build on, by the same names in a checkout and in an installed wheel."""

from fedmq.federation.protocol import FederatedProtocol, MergeResult, State, Trained, Traits, take
from protocols.fedavg import AnchoredFedAvg, AnchoredOptions, FedAvg, FedAvgOptions
from protocols.parts import aggregation, losses, training
from protocols.parts.losses import info_nce
from protocols.parts.training import EveryBatch

__all__ = [
    "AnchoredFedAvg",
    "AnchoredOptions",
    "EveryBatch",
    "FedAvg",
    "FedAvgOptions",
    "FederatedProtocol",
    "MergeResult",
    "State",
    "Trained",
    "Traits",
    "aggregation",
    "info_nce",
    "losses",
    "take",
    "training",
]
