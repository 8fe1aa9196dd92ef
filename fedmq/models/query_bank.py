"""A query bank against hubs: what a model that was released with one adds to its embeddings.

Some items of a gallery, hubs, lie near very many queries and are found for most of them (Radovanovic et al. 2010).
Querybank normalisation (Bogolin et al., CVPR 2022, after the inverted softmax of Smith et al., ICLR 2017) takes from an
item's score what a bank of queries makes of it. Here the bank holds centroids c_j of n_j embeddings each, for single
embeddings stay where they are, and half of what the inverted softmax takes is taken:

    h(z) = tau log(sum_j n_j exp(z . c_j / tau) / sum_j n_j),   c_j of the other modality
    score(x, y) = x . y - beta h(x) - beta h(y)

In one way of retrieval the query's own h is the same for the whole gallery, so one score serves both ways. It is the
inner product of longer vectors of unit length, by which any index ranks; scores are 1 / (2 + beta^2) of the above.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

#: tau, what contrasts have by default; .05 to .1 make little difference.
TEMPERATURE = 0.07
#: beta: all of it overcorrects, the bank being coarser than the queries it stands for.
STRENGTH = 0.5
#: Numbers that an embedding is longer by.
MORE = 4


@dataclass(frozen=True)
class Bank:
    """Centroids of both modalities and how many embeddings each stands for.

    Args:
        image: float32 [I, d] of unit length, I at least 1.
        image_counts: float32 [I], at least 1 each.
        text: float32 [T, d] of unit length, T at least 1.
        text_counts: float32 [T], at least 1 each.
    """

    image: Tensor
    image_counts: Tensor
    text: Tensor
    text_counts: Tensor

    def images(self, z: Tensor) -> Tensor:
        """Image embeddings float32 [B, d] of unit length, made longer: [B, d + 4], of unit length."""
        return F.normalize(torch.cat([z, _more(z, self.text, self.text_counts)], 1), dim=1)

    def texts(self, z: Tensor) -> Tensor:
        """Caption embeddings, likewise."""
        # What an image adds meets a 1, and what makes up its length meets a 0; so for a caption, the other way round.
        more = _more(z, self.image, self.image_counts)[:, [1, 0, 3, 2]]
        return F.normalize(torch.cat([z, more], 1), dim=1)


def hubness(z: Tensor, centroids: Tensor, counts: Tensor) -> Tensor:
    """The h of the module's text, in [-1, 1].

    Args:
        z: [B, d] of unit length.
        centroids: [J, d] of unit length.
        counts: [J], at least 1 each.

    Returns:
        [B].
    """
    weights = (counts / counts.sum()).log()
    return TEMPERATURE * (z @ centroids.T / TEMPERATURE + weights).logsumexp(1)


def _more(z: Tensor, centroids: Tensor, counts: Tensor) -> Tensor:
    """What an image's embedding is longer by, [B, 4]: -beta h, 1, what makes all of one length, 0."""
    own = -STRENGTH * hubness(z, centroids, counts)
    rest = (STRENGTH**2 - own.square()).clamp_min(0).sqrt()
    return torch.stack([own, torch.ones_like(own), rest, torch.zeros_like(own)], 1)
