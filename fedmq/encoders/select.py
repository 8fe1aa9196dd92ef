"""Select a backbone's frozen image and text encoders; weights are loaded when the first row is encoded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from fedmq.config.scenario import MATCONVNET, TIMM, Backbone
from fedmq.encoders.base import BATCH, Array, Encoder
from fedmq.encoders.images import PIXELS_VERSION, Pixels, fit
from fedmq.storage.cache import key_of


def _batches(encode: Callable[[Array], torch.Tensor], items: Array) -> Array:
    with torch.inference_mode():
        parts = [encode(items[start : start + BATCH]).float().cpu().numpy() for start in range(0, len(items), BATCH)]
    return np.concatenate(parts)


def _channels_first(images: Sequence[Pixels]) -> Array:
    return np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))


def _timm_images(backbone: Backbone, seed: int, cache: Path, device: str) -> Encoder:
    from fedmq.encoders import timm_images  # noqa: PLC0415 - slow to import, only this backbone needs it

    loaded = functools.cache(lambda: timm_images.load(backbone, seed, device)[0])
    how = timm_images.preprocessing(backbone)
    edge, crop, squash = int(how["input_size"][-1]), float(how["crop_pct"]), how["crop_mode"] == "squash"

    def preprocess(image: Pixels) -> Pixels:
        return fit(image, edge, crop, str(how["interpolation"]).upper(), squash=squash)

    def encode(images: Sequence[Pixels]) -> Array:
        model = loaded()
        mean, std = (255 * torch.tensor(how[name], device=device).view(-1, 1, 1) for name in ("mean", "std"))
        return _batches(
            lambda rows: model((torch.from_numpy(rows).to(device).float() - mean) / std), _channels_first(images)
        )

    # Centre cropping applies to rendered drawings too, so the key has the version for all kinds of images.
    facts = (PIXELS_VERSION, "squash") if squash else (PIXELS_VERSION,)
    return Encoder(key_of(timm_images.weights_digest(backbone, seed, cache), *facts), encode, preprocess)


def _matconvnet_images(backbone: Backbone, device: str) -> Encoder:
    from fedmq.encoders import matconvnet  # noqa: PLC0415

    def preprocess(image: Pixels) -> Pixels:
        return fit(image, matconvnet.EDGE)

    if backbone.end_to_end:
        later = matconvnet.weights_digest(backbone)
        return Encoder(key_of("pixels", matconvnet.EDGE), _channels_first, preprocess, later=later)
    loaded = functools.cache(lambda: matconvnet.load(backbone, device))

    def encode(images: Sequence[Pixels]) -> Array:
        return _batches(lambda rows: loaded()(torch.from_numpy(rows).to(device)), _channels_first(images))

    return Encoder(matconvnet.weights_digest(backbone), encode, preprocess)


def image_encoder(backbone: Backbone, seed: int, cache: Path, device: str) -> Encoder:
    """The image encoder of a backbone other than ``features``; the seed is that of random weights.

    Lite always computes on the CPU.

    Raises:
        InputError: the model, tag or file is unknown, or a package is missing.
    """
    if backbone.name == "lite":
        from fedmq.encoders import lite, lite_inputs  # noqa: PLC0415

        return Encoder(lite_inputs.encoder_digest("image"), lite.encode_images, width=lite.DIM)
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

    def preprocess(image: Pixels) -> Pixels:
        return fit(image, size, resample=how.interpolation.upper(), squash=how.resize_mode == "squash")

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

    def encode(images: Sequence[Pixels]) -> Array:
        return _batches(lambda rows: tower()(torch.from_numpy(rows).to(device)), _channels_first(images))

    width = int(clip_weights.config_of(backbone.name)["embed_dim"])
    return Encoder(
        key_of("image", digest, size, *resizing_key, *how.unnamed), encode, preprocess, edge=size, width=width
    )


def text_encoder(backbone: Backbone, seed: int, cache: Path, device: str) -> Encoder:
    """The text encoder of a backbone; for timm and MatConvNet image encoders, lite's sentence encoder.

    ``backbone.text_encoder`` overrides the backbone's text encoder. Arguments and errors as of :func:`image_encoder`.
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
        from fedmq.encoders import lite, lite_inputs  # noqa: PLC0415

        # Lite's text head is aligned with lite's image head only; other image encoders get plain sentence embeddings.
        plain = backbone.name != "lite"
        encode = lite.text_features if plain else lite.encode_texts
        width = lite.TEXT_DIM if plain else lite.DIM
        digest = key_of("sentence", lite_inputs.weights_digest()) if plain else lite_inputs.encoder_digest("text")
        return Encoder(digest, encode, width=width, cut=lite.cut)
    from fedmq.encoders import clip, clip_weights  # noqa: PLC0415

    cut = functools.partial(clip.cut, backbone.name)
    if backbone.adapter_site == "blocks":
        config = clip_weights.config_of(backbone.name)
        return Encoder(key_of("tokens", config["text_cfg"]), functools.partial(clip.tokenise, backbone.name), cut=cut)
    tower = functools.cache(lambda: clip.load_tower(clip_weights.weights(backbone, seed, cache), "text", device))

    def encode_texts(texts: Sequence[str]) -> Array:
        return _batches(lambda rows: tower()(torch.from_numpy(rows).to(device)), clip.tokenise(backbone.name, texts))

    width = int(clip_weights.config_of(backbone.name)["embed_dim"])
    digest = key_of("text", clip_weights.weights_digest(backbone, seed, cache))
    return Encoder(digest, encode_texts, width=width, cut=cut)
