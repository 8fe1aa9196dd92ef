"""Embedding of items by a model's two towers."""

from __future__ import annotations

import torch

from fedmq.data.silo_dataset import SiloDataset
from fedmq.evaluation.gallery_ranking import Embedded
from fedmq.federation.protocol import Encoders

_BATCH = 256


def embed(encoders: Encoders, items: SiloDataset, *, binary: bool) -> Embedded:
    """Embed every image and every caption.

    Args:
        encoders: encoders of the model.
        items: with both modalities.
        binary: the model computes hash codes.

    Raises:
        ValueError: a modality is missing.
    """
    if items.image is None or items.text is None:
        raise ValueError("evaluation needs both modalities")
    owner = torch.repeat_interleave(torch.arange(len(items)), items.captions)
    number = torch.cat([torch.arange(int(count)) for count in items.captions])
    with torch.no_grad():
        image = torch.cat([encoders.image(part) for part in torch.split(items.image, _BATCH)])
        pairs = zip(torch.split(owner, _BATCH), torch.split(number, _BATCH), strict=True)
        text = torch.cat([encoders.caption(items.text[item, caption]) for item, caption in pairs])
    labels = None if items.labels is None else items.labels.numpy()
    return Embedded(image.cpu().numpy(), text.cpu().numpy(), owner.numpy(), labels, binary)
