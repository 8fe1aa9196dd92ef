"""Kinds of files of frozen encoders, and what a run reads of them."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import timm
import torch
import transformers

from benchmarks.fuzz_damage import Folder, Kind
from fedmq.config.scenario import Backbone
from fedmq.encoders import clip, clip_weights, matconvnet, sentences, timm_images
from fedmq.errors import InputError, RunError
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
def _clip(ending: str) -> Folder:
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as name:
        path = Path(name) / "model.json"
        path.write_text(json.dumps(_CLIP))
        backbone = Backbone(name=str(path))
        state = clip_weights._full_model(backbone, clip_weights.config_of(str(path)), 0).state_dict()
        weights = Path(name) / f"weights.{ending}"
        if ending == "pt":
            torch.save(state, weights)
        else:
            safetensors.torch.save_file({key: value.clone() for key, value in state.items()}, weights)
        return {path.name: path.read_bytes(), weights.name: weights.read_bytes()}


def _read_clip(ending: str, folder: Path) -> None:
    backbone = Backbone(name=str(folder / "model.json"), pretrained=str(folder / f"weights.{ending}"))
    clip_weights.weights(backbone, 0, folder / "cache")


@cache
def _towers() -> Folder:
    """A model without weights, and its towers in the cache."""
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as name:
        path = Path(name) / "model.json"
        path.write_text(json.dumps(_CLIP))
        stored = clip_weights.weights(Backbone(name=str(path)), 0, Path(name) / "cache").folder
        return {f"towers/{each.name}": each.read_bytes() for each in sorted(stored.iterdir()) if each.is_file()}


def _read_towers(folder: Path) -> None:
    """What a silo reads of the cache; an error says which folder to delete."""
    path = folder / "model.json"
    path.write_text(json.dumps(_CLIP))
    stored = clip_weights.Weights(folder / "towers", str(path), _CLIP, (0.5,) * 3, (0.5,) * 3)
    try:
        for modality in ("image", "text"):
            clip.load_tower(stored, modality)
        clip.encode_texts(clip.load_tower(stored, "text"), np.ones((2, 8), np.int64), 2, "cpu")
    except RunError as error:
        raise InputError("the cache", str(error), "") from None


def _matconvnet() -> Folder:
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as name:
        return {"net.mat": matconvnet_file(Path(name) / "net.mat").read_bytes()}


def _read_matconvnet(folder: Path) -> None:
    matconvnet.load(Backbone(name="matconvnet", pretrained=str(folder / "net.mat")), "cpu")


# --- timm -----------------------------------------------------------------------------------------------------------
@cache
def _timm(ending: str) -> Folder:
    state = timm.create_model("test_resnet", num_classes=3).state_dict()
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as name:
        weights = Path(name) / f"weights.{ending}"
        if ending == "pt":
            torch.save({"state_dict": state}, weights)
        else:
            safetensors.torch.save_file(state, weights)
        return {weights.name: weights.read_bytes()}


def _read_timm(ending: str, folder: Path) -> None:
    backbone = Backbone(name="timm:test_resnet", pretrained=str(folder / f"weights.{ending}"))
    timm_images.weights_digest(backbone, 0, folder / "cache")
    model, how = timm_images.load(backbone, 0, "cpu")
    with torch.inference_mode():
        model(torch.zeros(1, *how["input_size"]))


# --- sentences ------------------------------------------------------------------------------------------------------
@cache
def _sentences(*, listed: bool) -> Folder:
    """A BERT of one layer, as transformers saves it, or with a list of modules."""
    with tempfile.TemporaryDirectory(prefix="fedmq-fuzz-") as name, torch.random.fork_rng():
        root = Path(name)
        (root / "vocab.txt").write_text("\n".join(_WORDS))
        transformers.BertTokenizerFast(vocab_file=str(root / "vocab.txt")).save_pretrained(root)
        transformers.BertModel(transformers.BertConfig(**_BERT)).save_pretrained(root, safe_serialization=True)
        if listed:
            from sentence_transformers import SentenceTransformer

            models: Any = importlib.import_module("sentence_transformers.models")
            first = models.Transformer(str(root))
            more = (models.Pooling(8, "mean"), models.Dense(8, 6), models.Normalize())
            SentenceTransformer(modules=[first, *more], device="cpu").save(str(root / "all"))
            root = root / "all"
        found = (path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix != ".md")
        return {str(path.relative_to(root)): path.read_bytes() for path in found}


def _read_sentences(folder: Path) -> None:
    """What preparing data computes; a second process computes the same."""
    assert sentences.weights_digest(folder)
    with torch.random.fork_rng():
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            encode, cut = sentences.load(folder, "cpu")
            found.append(encode(_TEXTS))
            assert len(cut(_TEXTS)) == len(_TEXTS)
    assert np.array_equal(found[0], found[1]), "accepted weights that are drawn at random"


ENCODER_KINDS: Mapping[str, Kind] = {
    "CLIP model": Kind(partial(_clip, "safetensors"), partial(_read_clip, "safetensors")),
    "CLIP model in pt": Kind(partial(_clip, "pt"), partial(_read_clip, "pt")),
    "CLIP towers in the cache": Kind(_towers, _read_towers),
    "MatConvNet network": Kind(_matconvnet, _read_matconvnet),
    "timm model": Kind(partial(_timm, "safetensors"), partial(_read_timm, "safetensors")),
    "timm model in pt": Kind(partial(_timm, "pt"), partial(_read_timm, "pt")),
    "sentence encoder": Kind(partial(_sentences, listed=False), _read_sentences),
    "sentence encoder of several modules": Kind(partial(_sentences, listed=True), _read_sentences),
}
