"""Type of ``model/config.json``, the configuration of a released model; read and written like a run's other records."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from fedmq.storage.json_files import Digest, Finite, Stored


class ReleasedInputs(Stored):
    """Shapes and dtypes of the model's inputs of one item, as :class:`fedmq.encoders.base.InputSpec` describes them."""

    image_shape: list[int]
    text_shape: list[int]
    image_dtype: str
    text_dtype: str
    mean: list[Finite] = Field(default_factory=list)
    std: list[Finite] = Field(default_factory=list)


class ReleaseConfig(Stored):
    """``model/config.json``: the configuration of a released model.

    The fields from ``seed`` on are enough to build the model without the training data. Releases made before they were
    introduced lack them.

    Args:
        backbone: the scenario's backbone section.
        objective: the scenario's objective section.
        protocol: the method.
        dim: dimension of the embeddings.
        layout_digest: SHA-256 (hex) of the parameters' layout.
        layout: names of its entries, in the order that ``model.safetensors`` does not keep.
        model_digest: digest of the parameters.
        data_digest: digest of the prepared data's content.
        released_with: digests of the payloads released with the model, by kind.
        seed: seed of the run, from which random frozen weights are drawn.
        inputs: shapes and dtypes of the model's inputs.
        label_names: names of the data's labels, in the order of a classifier's outputs.
        texts: ``sentences`` if captions are encoded from text, ``bag`` for bags of words, ``vectors`` for features.
        frozen: digest of the frozen encoder of each modality (``image``, ``text``), with its preprocessing; ``blocks``
            is that of encoders that contain the adapters. Empty for features. With ``partition.kind own`` it is the
            digest that the sites stated, :func:`fedmq.encoders.base.stated_digest`.
        personal_only: the shared model is not fully trained, so that retrieval needs a silo's personal model.
    """

    backbone: dict[str, JsonValue]
    objective: dict[str, JsonValue] = Field(default_factory=dict)
    protocol: str
    dim: int
    layout_digest: Digest
    layout: list[str] = Field(default_factory=list)
    model_digest: Digest
    data_digest: Digest | None = None
    released_with: dict[str, Digest]
    seed: int | None = None
    inputs: ReleasedInputs | None = None
    label_names: list[str] = Field(default_factory=list)
    texts: Literal["sentences", "bag", "vectors"] | None = None
    frozen: dict[str, str] = Field(default_factory=dict)
    personal_only: bool = False
