"""Kinds of files of frozen encoders, and what a run reads of them.

Libraries of encoders take seconds to import, so the functions import what they use.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from fedmq.config.scenario import Backbone
from fedmq.errors import InputError, RunError
from tests.damaged_files import Kind, files_of
from tests.data_set_folders import matconvnet as matconvnet_file

_CLIP = {
    "embed_dim": 8,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 16, "head_width": 8, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 2},
}
_BERT = {
    "vocab_size": 8, "max_position_embeddings": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16,
}  # fmt: skip
_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "dog")
_TEXTS = ("a red dog", "a dog", "", "x")


# --- CLIP and MatConvNet --------------------------------------------------------------------------------------------
def _clip(weights: str, folder: Path) -> None:
    from fedmq.encoders import clip_weights

    path = folder / "model.json"
    path.write_text(json.dumps(_CLIP))
    state = clip_weights._full_model(Backbone(name=str(path)), clip_weights.config_of(str(path)), 0).state_dict()
    _save({key: value.clone() for key, value in state.items()}, folder / weights)


def _save(state: Any, path: Path) -> None:
    (torch.save if path.suffix == ".pt" else safetensors.torch.save_file)(state, path)


def _read_clip(weights: str, folder: Path) -> None:
    from fedmq.encoders import clip_weights

    backbone = Backbone(name=str(folder / "model.json"), pretrained=str(folder / weights))
    clip_weights.weights(backbone, 0, folder / "cache")


def _towers(folder: Path) -> None:
    """The towers of a model without weights, as in the cache."""
    from fedmq.encoders import clip_weights

    path = folder / "model.json"
    path.write_text(json.dumps(_CLIP))
    clip_weights.weights(Backbone(name=str(path)), 0, folder / "cache").folder.rename(folder / "towers")


def _read_towers(folder: Path) -> None:
    """What a silo reads of the cache; an error says which folder to delete."""
    from fedmq.encoders import clip, clip_weights

    path = folder / "model.json"
    path.write_text(json.dumps(_CLIP))
    stored = clip_weights.Weights(folder / "towers", str(path), _CLIP, (0.5,) * 3, (0.5,) * 3)
    try:
        for modality in ("image", "text"):
            clip.load_tower(stored, modality)
        clip.encode_texts(clip.load_tower(stored, "text"), np.ones((2, 8), np.int64), 2, "cpu")
    except RunError as error:
        raise InputError("the cache", str(error), "") from None


def _read_matconvnet(folder: Path) -> None:
    from fedmq.encoders import matconvnet

    matconvnet.load(Backbone(name="matconvnet", pretrained=str(folder / "net.mat")), "cpu")


# --- timm -----------------------------------------------------------------------------------------------------------
def _timm(weights: str, folder: Path) -> None:
    import timm

    state = timm.create_model("test_resnet", num_classes=3).state_dict()
    _save({"state_dict": state} if weights.endswith(".pt") else state, folder / weights)


def _read_timm(weights: str, folder: Path) -> None:
    from fedmq.encoders import timm_images

    backbone = Backbone(name="timm:test_resnet", pretrained=str(folder / weights))
    timm_images.weights_digest(backbone, 0, folder / "cache")
    model, how = timm_images.load(backbone, 0, "cpu")
    with torch.inference_mode():
        model(torch.zeros(1, *how["input_size"]))


# --- sentences ------------------------------------------------------------------------------------------------------
def _sentences(folder: Path) -> None:
    """A BERT of one layer, as transformers saves it, and the same as the first of several modules."""
    import transformers
    from sentence_transformers import SentenceTransformer

    bare = folder / "bare"
    bare.mkdir()
    with torch.random.fork_rng():
        (bare / "vocab.txt").write_text("\n".join(_WORDS))
        transformers.BertTokenizerFast(vocab_file=str(bare / "vocab.txt")).save_pretrained(bare)
        transformers.BertModel(transformers.BertConfig(**_BERT)).save_pretrained(bare, safe_serialization=True)
        models: Any = importlib.import_module("sentence_transformers.models")
        more = (models.Pooling(8, "mean"), models.Dense(8, 6), models.Normalize())
        SentenceTransformer(modules=[models.Transformer(str(bare)), *more], device="cpu").save(str(folder / "all"))
    for path in (*folder.rglob("*.md"),):
        path.unlink()


def _read_sentences(name: str, folder: Path) -> None:
    """What preparing data computes; a second process computes the same."""
    from fedmq.encoders import sentences

    folder = folder / name
    assert sentences.weights_digest(folder)
    with torch.random.fork_rng():
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            encode, cut = sentences.load(folder, "cpu")
            found.append(encode(_TEXTS))
            assert len(cut(_TEXTS)) == len(_TEXTS)
    assert np.array_equal(found[0], found[1]), "accepted weights that are drawn at random"


def _kind(make: Callable[[Path], object], read: Callable[[Path], object], *chosen: str) -> Kind:
    return Kind(cache(partial(files_of, make, *chosen)), read)


_BOTH = ("weights.safetensors", "weights.pt")
ENCODER_KINDS: Mapping[str, Kind] = {
    **{f"CLIP model, {weights}": _kind(partial(_clip, weights), partial(_read_clip, weights)) for weights in _BOTH},
    "CLIP towers in the cache": _kind(_towers, _read_towers, "towers"),
    "MatConvNet network": _kind(lambda folder: matconvnet_file(folder / "net.mat"), _read_matconvnet),
    **{f"timm model, {weights}": _kind(partial(_timm, weights), partial(_read_timm, weights)) for weights in _BOTH},
    "sentence encoder": _kind(_sentences, partial(_read_sentences, "bare"), "bare"),
    "sentence encoder of several modules": _kind(_sentences, partial(_read_sentences, "all"), "all"),
}
