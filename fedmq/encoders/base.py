"""The frozen image and text encoders of a backbone; weights are loaded when the first row is encoded."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import MATCONVNET, TIMM, Backbone
from fedmq.config.sections import Modality
from fedmq.encoders.images import PIXELS_VERSION, Pixels, fit
from fedmq.storage.cache import key_of

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[Any]

BATCH = 32  # items per forward pass


def stated_digest(digest: str, later: str = "") -> str:
    """Digest (hex) by which a site with its own data states its encoder: of the encoder and the later weights.

    Args:
        digest: :attr:`Encoder.digest`.
        later: :attr:`Encoder.later`.
    """
    return hashlib.sha256(f"{digest} {later}".encode()).hexdigest()


@dataclass(frozen=True)
class Encoder:
    """A frozen encoder of one modality.

    Args:
        digest: digest of the weights and of everything else that affects the encoder's rows.
        encode: maps items to rows [n, ...]; a row depends only on its item and its position in the call.
        fit: resizes a picture right after decoding.
        mean: mean per channel if rows are pixels that the model normalises; else empty.
        std: standard deviation per channel if rows are pixels that the model normalises; else empty.
        edge: edge length [pixels] of pictures that need no resizing; drawings are rendered at this size.
        later: digest of the weights that the model applies to the rows if these are pixels; else empty.
        width: length of a row if known before encoding; else 0.
        cut: for a text encoder, whether it reads only the beginning of each text; None if it reads any length.
    """

    digest: str
    encode: Callable[[Sequence[Any]], Array]
    fit: Callable[[Pixels], Pixels] = lambda picture: picture
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    edge: int = 224
    later: str = ""
    width: int = 0
    cut: Callable[[Sequence[str]], Sequence[bool]] | None = None

    @property
    def stated(self) -> str:
        """:func:`stated_digest` of this encoder."""
        return stated_digest(self.digest, self.later)


MODALITIES: tuple[Modality, Modality] = ("image", "text")


@dataclass(frozen=True)
class InputSpec:
    """Shapes and dtypes of the model inputs of one item.

    Args:
        image_shape: ``(d,)`` for features, ``(3, S, S)`` for pixels, ``(F, 3, S, S)`` for the frames of a video.
        text_shape: ``(d,)`` for features of one caption, ``(77,)`` for token ids.
        image_dtype: ``float32`` for features, ``uint8`` for pixels.
        text_dtype: ``float32`` for features, ``int32`` for token ids.
        mean: mean per channel of pixels scaled to [0, 1]; empty for features.
        std: standard deviation per channel of pixels scaled to [0, 1]; empty for features.
    """

    image_shape: tuple[int, ...]
    text_shape: tuple[int, ...]
    image_dtype: str = "float32"
    text_dtype: str = "float32"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


# --- of a backbone --------------------------------------------------------------------------------------------------


def _batches(encode: Callable[[Array], Tensor], items: Array) -> Array:
    import torch  # noqa: PLC0415 - most users of this module do without

    with torch.inference_mode():
        parts = [encode(items[start : start + BATCH]).float().cpu().numpy() for start in range(0, len(items), BATCH)]
    return np.concatenate(parts)


def _tensor(rows: Array, device: str) -> Tensor:
    import torch  # noqa: PLC0415

    return torch.from_numpy(rows).to(device)


def _channels_first(pictures: Sequence[Pixels]) -> Array:
    return np.ascontiguousarray(np.stack(pictures).transpose(0, 3, 1, 2))


def _timm_images(backbone: Backbone, seed: int, cache: Path, device: str) -> Encoder:
    import torch  # noqa: PLC0415

    from fedmq.encoders import timm_images  # noqa: PLC0415 - slow to import, only this backbone needs it

    loaded = functools.cache(lambda: timm_images.load(backbone, seed, device)[0])
    how = timm_images.preprocessing(backbone)
    edge, crop, squash = int(how["input_size"][-1]), float(how["crop_pct"]), how["crop_mode"] == "squash"

    def preprocess(picture: Pixels) -> Pixels:
        return fit(picture, edge, crop, str(how["interpolation"]).upper(), squash=squash)

    def encode(pictures: Sequence[Pixels]) -> Array:
        model = loaded()
        mean, std = (255 * torch.tensor(how[name], device=device).view(-1, 1, 1) for name in ("mean", "std"))
        return _batches(lambda rows: model((_tensor(rows, device).float() - mean) / std), _channels_first(pictures))

    # Centre cropping applies to rendered drawings too, so the key has the version for all kinds of pictures.
    facts = (PIXELS_VERSION, "squash") if squash else (PIXELS_VERSION,)
    return Encoder(key_of(timm_images.weights_digest(backbone, seed, cache), *facts), encode, preprocess)


def _matconvnet_images(backbone: Backbone, device: str) -> Encoder:
    from fedmq.encoders import matconvnet  # noqa: PLC0415

    def preprocess(picture: Pixels) -> Pixels:
        return fit(picture, matconvnet.EDGE)

    if backbone.end_to_end:
        later = matconvnet.weights_digest(backbone)
        return Encoder(key_of("pixels", matconvnet.EDGE), _channels_first, preprocess, later=later)
    loaded = functools.cache(lambda: matconvnet.load(backbone, device))

    def encode(pictures: Sequence[Pixels]) -> Array:
        return _batches(lambda rows: loaded()(_tensor(rows, device)), _channels_first(pictures))

    return Encoder(matconvnet.weights_digest(backbone), encode, preprocess)


def image_encoder(backbone: Backbone, seed: int, cache: Path, device: str) -> Encoder:
    """The image encoder of a backbone.

    Args:
        backbone: the scenario's backbone section; not ``features``.
        seed: seed of random weights.
        cache: folder of shared weights.
        device: device of the encoder; lite always computes on the CPU.

    Raises:
        InputError: the model, tag or file is unknown, or a package is missing.
    """
    if backbone.name == "lite":
        from fedmq.encoders import lite  # noqa: PLC0415

        return Encoder(key_of("image", lite.weights_digest()), lite.encode_images, width=lite.DIM)
    if backbone.name.startswith(TIMM):
        return _timm_images(backbone, seed, cache, device)
    if backbone.name == MATCONVNET:
        return _matconvnet_images(backbone, device)
    from fedmq.encoders import clip, clip_weights  # noqa: PLC0415

    size = clip_weights.image_size(backbone.name, clip_weights.config_of(backbone.name))
    digest = clip_weights.weights_digest(backbone, seed, cache)
    how = clip_weights.preprocessing(backbone)
    resizing = (how.interpolation, how.resize_mode)
    # The default resizing is not part of the key, which keeps existing caches valid.
    resizing_key = () if resizing == ("bicubic", "shortest") else resizing

    def preprocess(picture: Pixels) -> Pixels:
        return fit(picture, size, resample=how.interpolation.upper(), squash=how.resize_mode == "squash")

    if backbone.adapter_site == "blocks":
        frozen = clip_weights.weights(backbone, seed, cache)
        return Encoder(
            key_of("pixels", size, *resizing_key),
            _channels_first,
            preprocess,
            frozen.mean,
            frozen.std,
            size,
            key_of(digest, frozen.mean, frozen.std),
        )
    tower = functools.cache(lambda: clip.load_tower(clip_weights.weights(backbone, seed, cache), "image", device))

    def encode(pictures: Sequence[Pixels]) -> Array:
        return _batches(lambda rows: tower()(_tensor(rows, device)), _channels_first(pictures))

    width = int(clip_weights.config_of(backbone.name)["embed_dim"])
    return Encoder(
        key_of("image", digest, size, *resizing_key, *how.unnamed), encode, preprocess, edge=size, width=width
    )


def text_encoder(backbone: Backbone, seed: int, cache: Path, device: str) -> Encoder:
    """The text encoder of a backbone; for timm and MatConvNet image encoders, lite's sentence encoder.

    ``backbone.text_encoder`` overrides the backbone's text encoder.

    Args:
        backbone: the scenario's backbone section; not ``features``.
        seed: seed of random weights.
        cache: folder of shared weights.
        device: device of the encoder; lite always computes on the CPU.

    Raises:
        InputError: the model, tag or file is unknown, or a package is missing.
    """
    if (folder := backbone.text_encoder) is not None:
        from fedmq.encoders import sentences  # noqa: PLC0415

        loaded = functools.cache(lambda: sentences.load(folder, device))

        def encode_sentences(texts: Sequence[str]) -> Array:
            return loaded()[0](texts)

        def cut_sentences(texts: Sequence[str]) -> Sequence[bool]:
            return loaded()[1](texts)

        return Encoder(sentences.weights_digest(folder), encode_sentences, cut=cut_sentences)
    if backbone.name in ("lite", MATCONVNET) or backbone.name.startswith(TIMM):
        from fedmq.encoders import lite  # noqa: PLC0415

        # Lite's text head is aligned with lite's image head only; other image encoders get plain sentence embeddings.
        plain = backbone.name != "lite"
        encode = lite.text_features if plain else lite.encode_texts
        width = lite.TEXT_DIM if plain else lite.DIM
        return Encoder(
            key_of("sentence" if plain else "text", lite.weights_digest()), encode, width=width, cut=lite.cut
        )
    from fedmq.encoders import clip, clip_weights  # noqa: PLC0415

    cut = functools.partial(clip.cut, backbone.name)
    if backbone.adapter_site == "blocks":
        config = clip_weights.config_of(backbone.name)
        return Encoder(key_of("tokens", config["text_cfg"]), functools.partial(clip.tokenise, backbone.name), cut=cut)
    tower = functools.cache(lambda: clip.load_tower(clip_weights.weights(backbone, seed, cache), "text", device))

    def encode_texts(texts: Sequence[str]) -> Array:
        return _batches(lambda rows: tower()(_tensor(rows, device)), clip.tokenise(backbone.name, texts))

    width = int(clip_weights.config_of(backbone.name)["embed_dim"])
    digest = key_of("text", clip_weights.weights_digest(backbone, seed, cache))
    return Encoder(digest, encode_texts, width=width, cut=cut)
