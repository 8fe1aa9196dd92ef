"""open_clip models as frozen backbones, their weights shared by all processes of a machine.

A model's weights are converted once to two safetensors files in the cache, one per tower. A process then builds the
module on the meta device and assigns tensors that are memory maps of these files: pages are read once per machine, and
only for the towers that the process has. With ``adapter_site: blocks`` a bottleneck adapter follows every transformer
block: x <- block(x); x <- x + up(gelu(down(x))). Source: RCSR.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import open_clip
import safetensors
import safetensors.torch
import torch
from open_clip.model import CLIP
from torch import Tensor, nn

from fedmq.config.parts import Modality
from fedmq.encoders.clip_weights import SCALES, Weights, config_of, context_length, skeleton
from fedmq.errors import InputError, RunError

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


# --- towers ---------------------------------------------------------------------------------------------------------


#: Frames of videos in one pass: a batch of videos has a dozen times as many pictures as one of photos.
FRAMES_AT_ONCE = 256


class Frozen(nn.Module):
    """One frozen tower: always in eval mode, its weights mapped from the cache.

    Args:
        tower: open_clip's module; its parameters need no gradient.
        mean: of an image tower, per channel; empty for a text tower.
        std: likewise.
        half: products in bfloat16 by autocast, those of the adapters inside included; a transformer's sums and all
            outputs stay float32.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, tower: nn.Module, mean: Sequence[float] = (), std: Sequence[float] = (), *, half: bool = False
    ) -> None:
        super().__init__()
        self.tower = tower
        self.half_products = half
        if half and isinstance(tower, open_clip.transformer.VisionTransformer):
            # Its sums take the type of what enters them, and bfloat16 would round off what adapters add.
            tower.conv1.register_forward_hook(lambda _module, _inputs, output: output.float())
        self.register_buffer("mean", 255 * torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(std).view(-1, 1, 1))
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stays in eval mode: dropout and batch norms of a frozen tower never train."""
        del mode
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels uint8 [B, 3, S, S], frames of videos [B, F, 3, S, S] or token ids int [B, 77] to float32 [B, e].

        A video's vector is the mean of its frames', scaled to unit length (RCSR, MSR-VTT).
        """
        if x.ndim == 5:
            frames = x.shape[1]
            several = torch.split(x, max(1, FRAMES_AT_ONCE // frames))
            each = torch.cat([self(part.flatten(0, 1)) for part in several])
            return nn.functional.normalize(each.view(len(x), frames, -1).mean(1), dim=-1)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half_products):
            if isinstance(self.tower, CLIP):
                encoded: Tensor = self.tower.encode_text(x.long())
            elif x.ndim == 4:
                encoded = self.tower((x.float() - self.mean) / self.std)
            else:
                encoded = self.tower(x.long())
        return encoded.float()


def _tower_of(model: nn.Module, modality: Modality) -> nn.Module:
    """The part of a whole model that is one tower; the other tower is let go."""
    if modality == "image":
        visual: nn.Module = model.visual  # type: ignore[assignment]
        return visual
    if hasattr(model, "text"):
        text: nn.Module = model.text  # type: ignore[assignment]
        return text
    # CLIP keeps its text tower's parts at its own top level.
    model.visual = nn.Identity()
    return model


def blocks_of(tower: nn.Module, name: str) -> tuple[list[nn.Module], int]:
    """The transformer blocks of a tower and their width.

    Raises:
        InputError: the tower has none that an adapter could follow.
    """
    transformer = getattr(tower, "transformer", None)
    trunk = getattr(tower, "trunk", None)
    if isinstance(getattr(transformer, "resblocks", None), nn.ModuleList):
        return list(transformer.resblocks), int(transformer.width)  # type: ignore[union-attr]
    # timm's plain vision transformers keep one width throughout; its staged models have blocks of other shapes.
    if type(trunk).__name__ in ("VisionTransformer", "Eva") and isinstance(trunk.blocks, nn.Module):  # type: ignore[union-attr]
        return list(trunk.blocks.children()), int(trunk.embed_dim)  # type: ignore[union-attr]
    found = type(trunk if trunk is not None else tower).__name__
    raise InputError(
        "backbone.adapter_site",
        f"blocks with {name}, whose image tower is a {found}",
        "feature, or a plain transformer",
    )


def _assign(model: nn.Module, path: Path) -> None:
    """Replace a tower's tensors by memory maps of a file."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                owner, _, leaf = name.rpartition(".")
                module, value = model.get_submodule(owner), file.get_tensor(name)
                if leaf in module._parameters:
                    module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
                else:
                    module._buffers[leaf] = value
    except (OSError, safetensors.SafetensorError, AttributeError) as error:
        raise RunError(f"{path} cannot be read ({error}): delete its folder, it is made again") from error


def load_tower(found: Weights, modality: Modality, device: str | torch.device = "cpu", *, half: bool = False) -> Frozen:
    """One frozen tower; on the CPU its weights are shared with every process that loads it.

    Args:
        found: the model's weights in the cache.
        modality: which tower.
        device: where it computes.
        half: products in bfloat16.

    Raises:
        RunError: the cached file is damaged.
    """
    model = skeleton(found.name, found.config)
    _assign(model, found.folder / f"{modality}.safetensors")
    scales = (found.mean, found.std) if modality == "image" else ((), ())
    frozen = Frozen(_tower_of(model, modality), *scales, half=half)
    for scale in SCALES:
        # Left on the meta device, which cannot be moved; no tower needs them.
        if hasattr(frozen.tower, scale):
            setattr(frozen.tower, scale, None)
    return frozen.to(device)


# --- encoding -------------------------------------------------------------------------------------------------------


def tokenise(name: str, texts: Sequence[str]) -> Tokens:
    """Token ids by CLIP's own tokeniser, which open_clip brings along.

    Args:
        name: of the model.
        texts: cut at the model's context length.

    Returns:
        int32 [n, 77] (or the model's context length).

    Raises:
        InputError: the model needs a tokeniser from a model hub, or has too few tokens.
    """
    config = config_of(name)
    text = config["text_cfg"]
    if text.get("hf_tokenizer_name") or "siglip" in name.lower():
        raise InputError("backbone.name", name, "a model with CLIP's own tokeniser; this one's needs a model hub")
    tokeniser = open_clip.SimpleTokenizer(context_length=context_length(config), **text.get("tokenizer_kwargs", {}))
    vocabulary = int(text.get("vocab_size", 49408))
    if tokeniser.vocab_size > vocabulary:
        raise InputError(
            "backbone.name", name, f"text_cfg.vocab_size of at least {tokeniser.vocab_size}, not {vocabulary}"
        )
    tokens: Tokens = tokeniser(list(texts)).numpy().astype(np.int32)
    return tokens


def encode_texts(frozen: Frozen, tokens: npt.NDArray[Any], rows: int, device: str = "cpu") -> Floats:
    """Features of the frozen text tower, after its projection.

    Args:
        frozen: the tower.
        tokens: int [n, 77].
        rows: captions encoded at once.
        device: where the tower is.

    Returns:
        float32 [n, e].
    """
    with torch.inference_mode():
        parts = [frozen(torch.from_numpy(part).to(device)).cpu().numpy() for part in _parts(tokens, rows)]
    return np.concatenate(parts)


def _parts(tokens: npt.NDArray[Any], rows: int) -> Iterator[npt.NDArray[Any]]:
    return (tokens[start : start + rows] for start in range(0, len(tokens), rows))
