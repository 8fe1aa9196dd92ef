"""Query bank of a released model, which reduces hubness by extending its embeddings.

Hubs are gallery items that are near very many queries and so are retrieved for most of them (Radovanovic et al. 2010).
Querybank normalisation (Bogolin et al., CVPR 2022, after the inverted softmax of Smith et al., ICLR 2017) subtracts
from an item's score its similarity to a bank of queries. Here the bank holds centroids c_j of n_j embeddings each,
because individual embeddings do not leave the silos, and half of the inverted softmax's correction is applied:

    h(z) = tau log(sum_j n_j exp(z . c_j / tau) / sum_j n_j),   c_j of the other modality
    score(x, y) = x . y - beta h(x) - beta h(y)

The query's h is constant over the gallery, so the same score ranks in both retrieval directions. Divided by
2 + beta^2, it is the inner product of extended unit vectors, so that any index can rank by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

#: tau, the default temperature of contrastive losses; 0.05 to 0.1 perform similarly.
TEMPERATURE = 0.07
#: beta: 1 would overcorrect, as the bank is coarser than the queries that it represents.
STRENGTH = 0.5
#: Number of dimensions added to an embedding.
MORE = 4


@dataclass(frozen=True)
class Bank:
    """Centroids of both modalities, and the number of embeddings that each represents."""

    image: Tensor  # float32 [I, d], unit length, I at least 1
    image_counts: Tensor  # float32 [I], at least 1 each
    text: Tensor  # float32 [T, d], unit length, T at least 1
    text_counts: Tensor  # float32 [T], at least 1 each

    def images(self, z: Tensor) -> Tensor:
        """Extend image embeddings: float32 [B, d] to [B, d + 4], both unit length."""
        return F.normalize(torch.cat([z, _extension(z, self.text, self.text_counts)], 1), dim=1)

    def texts(self, z: Tensor) -> Tensor:
        """Extend caption embeddings: float32 [B, d] to [B, d + 4], both unit length."""
        # In the inner product, each modality's -beta h meets the other's 1, and its padding meets the other's 0.
        extension = _extension(z, self.image, self.image_counts)[:, [1, 0, 3, 2]]
        return F.normalize(torch.cat([z, extension], 1), dim=1)


def hubness(z: Tensor, centroids: Tensor, counts: Tensor) -> Tensor:
    """The soft maximum h(z) of the module's docstring, in [-1, 1]: float32 [B].

    Args:
        z: float32 [B, d], unit length.
        centroids: float32 [J, d] of the other modality, unit length.
        counts: float32 [J], at least 1 each.
    """
    weights = (counts / counts.sum()).log()
    return TEMPERATURE * (z @ centroids.T / TEMPERATURE + weights).logsumexp(1)


def _extension(z: Tensor, centroids: Tensor, counts: Tensor) -> Tensor:
    """Additional dimensions of image embeddings, [B, 4]: -beta h, 1, padding to equal length, 0."""
    correction = -STRENGTH * hubness(z, centroids, counts)
    padding = (STRENGTH**2 - correction.square()).clamp_min(0).sqrt()
    return torch.stack([correction, torch.ones_like(correction), padding, torch.zeros_like(correction)], 1)
