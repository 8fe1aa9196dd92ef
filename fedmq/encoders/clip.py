"""open_clip models as frozen backbones whose weights are shared by all processes of a machine.

A model's weights are converted once to two safetensors files in the cache, one per tower. Each process builds the
module on the meta device and assigns memory maps of these files, so that pages are read once per machine, and only for
the towers in use. With ``adapter_site: blocks``, a bottleneck adapter follows every transformer block: x <- block(x);
x <- x + up(gelu(down(x))). Source: RCSR.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from fedmq.config.sections import Modality
from fedmq.encoders.base import too_long
from fedmq.encoders.clip_weights import SCALES, Weights, config_of, context_length, skeleton
from fedmq.errors import InputError, RunError

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


# --- towers ---------------------------------------------------------------------------------------------------------


#: Video frames per forward pass: a batch of videos has about twelve times the images of a batch of photos.
FRAMES_AT_ONCE = 256


class Frozen(nn.Module):
    """One frozen tower, always in eval mode, its weights memory-mapped from the cache.

    Args:
        tower: open_clip module without trainable parameters.
        half: use bfloat16 autocast, also for adapters inside the tower; residual sums and outputs stay float32.
    """

    mean: Tensor  # mean per channel of an image tower; empty for a text tower
    std: Tensor  # standard deviation per channel of an image tower; empty for a text tower

    def __init__(
        self, tower: nn.Module, mean: Sequence[float] = (), std: Sequence[float] = (), *, half: bool = False
    ) -> None:
        super().__init__()
        self.tower = tower
        self.half_products = half
        if half and isinstance(tower, open_clip.transformer.VisionTransformer):
            # Residual sums take the dtype of their input; in bfloat16 the adapters' small changes would be rounded off.
            tower.conv1.register_forward_hook(lambda _module, _inputs, output: output.float())
        self.register_buffer("mean", 255 * torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(std).view(-1, 1, 1))
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: dropout and batch norms of a frozen tower never train."""
        del mode
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Encode a batch; a video's embedding is the normalised mean of its frames' embeddings (RCSR, MSR-VTT).

        Args:
            x: pixels uint8 [B, 3, S, S], video frames uint8 [B, F, 3, S, S], or token ids int [B, 77].

        Returns:
            float32 [B, e].
        """
        if x.ndim == 5:
            frames = x.shape[1]
            parts = torch.split(x, max(1, FRAMES_AT_ONCE // frames))
            encoded_frames = torch.cat([self(part.flatten(0, 1)) for part in parts])
            return nn.functional.normalize(encoded_frames.view(len(x), frames, -1).mean(1), dim=-1)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half_products):
            if isinstance(self.tower, CLIP):
                encoded: Tensor = self.tower.encode_text(x.long())
            elif x.ndim == 4:
                encoded = self.tower((x.float() - self.mean) / self.std)
            else:
                encoded = self.tower(x.long())
        return encoded.float()


def tower_of(model: nn.Module, modality: Modality) -> nn.Module:
    """Extract one tower from a complete model and drop the other."""
    if modality == "image":
        visual: nn.Module = model.visual  # type: ignore[assignment]
        return visual
    if hasattr(model, "text"):
        text: nn.Module = model.text  # type: ignore[assignment]
        return text
    # CLIP has its text tower's modules at its top level.
    model.visual = nn.Identity()
    return model


def blocks_of(tower: nn.Module, name: str) -> tuple[list[nn.Module], int]:
    """The transformer blocks of a tower, and their width.

    Raises:
        InputError: the tower has no blocks to which adapters can be attached.
    """
    transformer = getattr(tower, "transformer", None)
    trunk = getattr(tower, "trunk", None)
    if isinstance(getattr(transformer, "resblocks", None), nn.ModuleList):
        return list(transformer.resblocks), int(transformer.width)  # type: ignore[union-attr]
    # timm's plain vision transformers have one width throughout, unlike its staged models.
    if type(trunk).__name__ in ("VisionTransformer", "Eva") and isinstance(trunk.blocks, nn.Module):  # type: ignore[union-attr]
        return list(trunk.blocks.children()), int(trunk.embed_dim)  # type: ignore[union-attr]
    found = type(trunk if trunk is not None else tower).__name__
    raise InputError(
        "backbone.adapter_site",
        f"blocks with {name}, whose image tower is a {found}",
        "feature, or a plain transformer",
    )


def _assign(model: nn.Module, path: Path) -> None:
    """Replace a tower's tensors by memory maps of a safetensors file."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                owner, _, leaf = name.rpartition(".")
                module, value = model.get_submodule(owner), file.get_tensor(name)
                if (wanted := getattr(module, leaf).shape) != value.shape:
                    raise ValueError(f"{name} of shape {list(value.shape)}, not {list(wanted)}")
                if leaf in module._parameters:
                    module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
                else:
                    module._buffers[leaf] = value
    except (OSError, safetensors.SafetensorError, AttributeError, ValueError) as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, found: str) -> RunError:
    return RunError(f"{path} cannot be read ({found}): delete its folder, and it will be created again")


def load_tower(
    weights: Weights, modality: Modality, device: str | torch.device = "cpu", *, half: bool = False
) -> Frozen:
    """Load one frozen tower; on the CPU, all processes that load it share the memory of its weights.

    Raises:
        RunError: the cached file is damaged.
    """
    model, path = skeleton(weights.name, weights.config), weights.folder / f"{modality}.safetensors"
    _assign(model, path)
    tower = tower_of(model, modality)
    found = (*tower.named_parameters(), *tower.named_buffers())
    if missing := [name for name, value in found if value.is_meta and name not in SCALES]:
        raise _unreadable(path, f"without {missing[0]}")
    scales = (weights.mean, weights.std) if modality == "image" else ((), ())
    frozen = Frozen(tower, *scales, half=half)
    for scale in SCALES:
        # Still on the meta device, so .to() would fail; no tower needs them.
        if hasattr(frozen.tower, scale):
            setattr(frozen.tower, scale, None)
    return frozen.to(device)


# --- encoding -------------------------------------------------------------------------------------------------------


def tokenise(name: str, texts: Sequence[str]) -> Tokens:
    """Token ids from CLIP's tokeniser, which is part of open_clip: int32 [n, context length], usually [n, 77].

    Raises:
        InputError: the model needs a tokeniser from a model hub, or its vocabulary is too small.
    """
    tokens: Tokens = _tokeniser(name)(list(texts)).numpy().astype(np.int32)
    return tokens


def _tokeniser(name: str) -> open_clip.SimpleTokenizer:
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
    return tokeniser


def cut(name: str, texts: Sequence[str]) -> list[bool]:
    """Whether each text has more tokens than the model reads; errors as in :func:`tokenise`."""
    limit = context_length(config_of(name))
    return too_long(
        texts, limit, lambda some: (len(tokens) + 2 > limit for tokens in map(_tokeniser(name).encode, some))
    )


def encode_texts(frozen: Frozen, tokens: npt.NDArray[Any], rows: int, device: str = "cpu") -> Floats:
    """Features float32 [n, e] of the frozen text tower, after its projection, of tokens int [n, 77], some rows each."""
    with torch.inference_mode():
        starts = range(0, len(tokens), rows)
        parts = [frozen(torch.from_numpy(tokens[at : at + rows]).to(device)).cpu().numpy() for at in starts]
    return np.concatenate(parts)
