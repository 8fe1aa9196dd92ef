"""Two-tower model over a frozen backbone, with all trainable parameters in one flat buffer.

Each tower consists of adapters, a head and L2 normalisation. Adapters are bottlenecks, separate per tower (RCSR) or
multi-modal with a middle layer shared by both towers (pFedMMA), or low-rank changes of frozen weights (LoRA). The
frozen encoder precedes the adapters (precomputed features, ``adapter_site: feature``) or contains them
(``adapter_site: blocks``, see ``fedmq.models.clip_two_tower``). Source: RCSR, "frozen CLIP + adapters".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmq.config.scenario import Backbone
from fedmq.config.sections import Modality
from fedmq.encoders.base import InputSpec
from fedmq.errors import InputError
from fedmq.models.query_bank import Bank
from fedmq.seeds import torch_generator
from fedmq.wire.layout import Layout

# Name prefix of each modality's trainable parameters, which are one contiguous range of the flat buffer.
BRANCHES: Mapping[Modality, str] = {"image": "visual.", "text": "text."}
# Name prefix of layers shared by both modalities.
SHARED = "shared."
T = TypeVar("T")
Layer = Callable[[Tensor], Tensor]
# Joint dimension of an mlp head if the towers' dimensions differ and the scenario sets none.
DEFAULT_DIM = 512


@dataclass(frozen=True)
class Out:
    """Outputs of one tower for a batch, all float32."""

    # [B, h], input of the projection's last layer, contrasted by MOON and FedUCH; the embedding itself with
    # ``info_nce``.
    hidden: Tensor
    raw: Tensor  # [B, d], output of the last layer before any activation or enhancement
    code: Tensor  # [B, d], used for ranking
    logits: Tensor | None = None  # [B, C], output of the tower's classifier; None if it has none
    before: Tensor | None = None  # [B, d], code before enhancement by a memory; None without a memory

    @property
    def plain(self) -> Tensor:
        """The code [B, d] before any enhancement by a memory."""
        return self.code if self.before is None else self.before


class Linear(nn.Linear):
    """A linear layer without values, until :class:`TwoTower` makes its parameters views of the flat buffer."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias, device="meta")

    def reset_parameters(self) -> None:
        """Draw no values; on the meta device, torch would take a Python path that every forked silo pays for."""


class Adapter(nn.Module):
    """Bottleneck adapter: x + up(gelu(down(x))) (RCSR)."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down = Linear(width, bottleneck)
        self.up = Linear(bottleneck, width)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [..., width] to the same shape."""
        update: Tensor = self.up(F.gelu(self.down(x)))
        return x + update


def through_shared(x: Tensor, down: Layer, shared: Layer, up: Layer, scale: float) -> Tensor:
    """Multi-modal adapter x + scale * up(relu(shared(relu(down(x))))) of x [..., width] (pFedMMA)."""
    return x + scale * up(F.relu(shared(F.relu(down(x)))))


class SharedAdapters(nn.Module):
    """Middle layers of multi-modal adapters, one per site, shared by both towers (pFedMMA)."""

    def __init__(self, sites: int, bottleneck: int, scale: float) -> None:
        super().__init__()
        layers = {site(i): Linear(bottleneck, bottleneck) for i in range(sites)}
        self.adapters = nn.ModuleDict(layers)
        self.scale = scale

    def forward(self, out: T, tower: nn.Module) -> T:
        """Return a tower's output unchanged: the shared layers are applied inside the tower."""
        del tower
        return out


class MultiModalAdapter(nn.Module):
    """One tower's layers of a multi-modal adapter, around a middle layer shared by both towers (pFedMMA).

    Args:
        width: size of the last dimension of x.
        bottleneck: width of the middle layer.
        shared: the middle layer, a submodule of :class:`SharedAdapters` and not of this module.
        scale: scale of the adapter's update.
    """

    def __init__(self, width: int, bottleneck: int, shared: Layer, scale: float) -> None:
        super().__init__()
        self.down = Linear(width, bottleneck)
        self.up = Linear(bottleneck, width)
        self._shared = (shared,)  # in a tuple, so that torch does not register its parameters here too
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """float32 [..., width] to the same shape."""
        return through_shared(x, self.down, self._shared[0], self.up, self._scale)


class LowRank(nn.Module):
    """Low-rank change s B A of a frozen square weight, A = ``down`` and B = ``up`` (LoRA, Hu et al. 2021, section 4.1).

    Args:
        width: number d of rows and of columns of the weight.
        rank: LoRA rank r; A is [r, d] and B is [d, r].
        scale: s, the paper's alpha / rank.
    """

    def __init__(self, width: int, rank: int, scale: float) -> None:
        super().__init__()
        self.down = Linear(width, rank, bias=False)
        self.up = Linear(rank, width, bias=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """(I + s B A) x of x [..., width]: on features the frozen weight is the identity."""
        update: Tensor = self.up(self.down(x))
        return x + self.scale * update

    def change(self) -> Tensor:
        """The product s B A, float32 [width, width]."""
        return self.scale * self.up.weight @ self.down.weight


class LowRankAttention(nn.Module):
    """Low-rank changes of the query and value weights of an attention layer, as in LoRA's experiments (section 5.1).

    Args:
        width: width of the layer.
        rank: LoRA rank of each change.
        scale: alpha / rank.
    """

    def __init__(self, width: int, rank: int, scale: float) -> None:
        super().__init__()
        self.query, self.value = LowRank(width, rank, scale), LowRank(width, rank, scale)

    def forward(self, weight: Tensor) -> Tensor:
        """The changed weight from the frozen one [3 width, width], of queries, keys and values."""
        query, value = self.query.change(), self.value.change()
        return weight + torch.cat([query, torch.zeros_like(query), value])


def site(index: int) -> str:
    """Name of an adapter site: two digits, so that sorting by name sorts by index."""
    return f"{index:02d}"


class Branch(nn.Module):
    """One tower: frozen encoder (if any), adapters, head, L2 normalisation."""

    def __init__(
        self,
        adapters: Sequence[nn.Module],  # the adapter of each site, in order
        head_in: int,  # input dimension of the head
        dim: int,  # joint dimension d
        *,
        residual: bool,  # use z = x + W2 relu(W1 x) instead of z = W2 relu(W1 x)
        blocks: bool,  # the adapters are attached inside ``frozen``, which applies them
    ) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({site(i): adapter for i, adapter in enumerate(adapters)})
        self.head = nn.ModuleDict({"0": Linear(head_in, dim), "1": Linear(dim, dim)})
        self.residual = residual
        self.blocks = blocks
        self.frozen: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """A batch of inputs [B, ...] to float32 [B, d], unit length."""
        if self.blocks:
            if self.frozen is None:
                raise RuntimeError("the frozen weights of this tower are not loaded: pass its modality to build()")
            x = self.frozen(x)
        else:
            for adapter in self.adapters.values():
                x = adapter(x)
        first, second = self.head.values()
        z = second(F.relu(first(x)))
        return F.normalize(x + z if self.residual else z, dim=-1)


def branch(layout: Layout, prefix: str) -> slice:
    """The range of the flat buffer of the parameters whose names start with e.g. ``"visual."``; empty without any.

    Raises:
        ValueError: these parameters are not contiguous.
    """
    offset, ranges = 0, []
    for entry in layout.entries:
        if entry.name.startswith(prefix):
            ranges.append((offset, offset + entry.size))
        offset += entry.size
    if not ranges:
        return slice(0, 0)
    if sum(stop - start for start, stop in ranges) != ranges[-1][1] - ranges[0][0]:
        raise ValueError(f"entries of branch {prefix!r} are not contiguous")
    return slice(ranges[0][0], ranges[-1][1])


class TwoTower(nn.Module):
    """Image and text tower; all trainable parameters are views of one flat float32 buffer."""

    initial: Callable[[], Tensor]  # returns the initial parameters float32 [P], the same in every process

    def __init__(
        self,
        # Image tower, a module from a batch to embeddings or to an Out, with parameters on the meta device.
        visual: nn.Module,
        text: nn.Module,  # text tower, of the same kind
        dim: int,  # joint dimension d
        device: torch.device,  # device of the parameters
        *,
        # Layers shared by both modalities, a module from (Out, tower) to Out; None if there are none.
        shared: nn.Module | None = None,
        binary: bool = False,  # whether ranking uses Hamming distance
    ) -> None:
        super().__init__()
        self.visual, self.text, self.shared = visual, text, shared
        self.dim, self.binary = dim, binary
        self.bank: Bank | None = None  # query bank of a released model; None during training
        trainable = sorted(self.named_parameters())
        # Names and shapes of the parameters in the flat buffer, sorted by name.
        self.layout = Layout.of((name, parameter.shape, "float32") for name, parameter in trainable)
        # Float32 [P], contiguous; the parameters are views of it.
        self.flat = torch.zeros(self.layout.size, device=device)
        self._parts: list[tuple[nn.Parameter, slice]] = []
        self._branches: dict[str, slice] = {}
        offset = 0
        for name, old in trainable:
            part = slice(offset, offset + old.numel())
            offset = part.stop
            parameter = nn.Parameter(self.flat[part].view(old.shape))
            self._parts.append((parameter, part))
            owner, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(owner), leaf, parameter)

    def branch(self, name: str) -> slice:
        """Range of a branch in :attr:`flat`: ``image``, ``text``, ``shared``, or a name prefix (``visual.``)."""
        if name not in self._branches:
            prefixes = {"shared": SHARED, **{str(modality): prefix for modality, prefix in BRANCHES.items()}}
            self._branches[name] = branch(self.layout, prefixes.get(name, name))
        return self._branches[name]

    def load(self, theta: npt.NDArray[Any] | Tensor) -> None:
        """Copy parameters [P] of any numeric dtype into :attr:`flat`.

        Raises:
            ValueError: the shape is not [P].
        """
        if tuple(theta.shape) != tuple(self.flat.shape):
            raise ValueError(f"parameters of shape {list(theta.shape)} for a model of [{self.flat.numel()}]")
        if isinstance(theta, np.ndarray) and self.flat.device.type == "cpu":
            # Buffers from the wire are read-only, and torch warns when it wraps those; NumPy copies them directly.
            np.copyto(self.flat.detach().numpy(), theta, casting="unsafe")
            return
        source = torch.tensor(theta) if isinstance(theta, np.ndarray) else theta
        with torch.no_grad():
            self.flat.copy_(source)

    @contextmanager
    def computing_with(self, theta: Tensor) -> Iterator[None]:
        """Temporarily compute with other parameters float32 [P], without copying them or changing :attr:`flat`.

        Autograd graphs created before stay valid: copying values into :attr:`flat` would count as an in-place change of
        saved tensors, whereas here the original tensors are restored before the backward pass. The parameters are in
        memory allocated by torch.
        """
        self._point_to(theta.to(self.flat.device))
        try:
            yield
        finally:
            self._point_to(self.flat)

    def _point_to(self, flat: Tensor) -> None:
        for parameter, part in self._parts:
            parameter.data = flat[part].view(parameter.shape)

    def outputs(self, modality: Modality, x: Tensor) -> Out:
        """All outputs of one tower for a batch.

        Raises:
            RuntimeError: the model was built without the frozen weights of this tower.
        """
        tower = self.visual if modality == "image" else self.text
        result = tower(x)
        out = Out(result, result, result) if isinstance(result, Tensor) else result
        final: Out = out if self.shared is None else self.shared(out, tower)
        return final

    def image(self, x: Tensor) -> Tensor:
        """Embed images.

        Args:
            x: float32 features [B, d_i]; with adapters in the blocks uint8 pixels [B, 3, S, S], or [B, F, 3, S, S] for
                videos.

        Returns:
            float32 [B, d], unit length, or codes ranked by their signs if :attr:`binary`; [B, d + 4] with a
            :attr:`bank`.

        Raises:
            RuntimeError: the model was built without the frozen weights of the image tower.
        """
        code = self.outputs("image", x).code
        return code if self.bank is None else self.bank.images(code)

    def caption(self, x: Tensor) -> Tensor:
        """Embed captions: float32 [B, d], as :meth:`image`.

        Args:
            x: float32 features [B, d_t]; with adapters in the blocks int32 token ids [B, 77].

        Raises:
            RuntimeError: the model was built without the frozen weights of the text tower.
        """
        code = self.outputs("text", x).code
        return code if self.bank is None else self.bank.texts(code)

    def within(self, branches: Sequence[slice], values: Tensor | None = None) -> list[Tensor]:
        """The parameters in ranges of :attr:`flat`, in its order, or views of ``values`` [P] of the same shapes."""
        return [
            parameter if values is None else values[part].view(parameter.shape)
            for parameter, part in self._parts
            if any(r.start <= part.start < r.stop for r in branches)
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None (``set_to_none`` has no effect), so that autograd stores instead of adds gradients.

        Zeroing and accumulating cost four more passes over memory per step, a tenth of a step's time with wide layers
        and small batches.
        """
        for parameter, _ in self._parts:
            parameter.grad = None

    def add_gradient(self, gradient: Tensor) -> None:
        """Add a gradient float32 [P] computed without autograd.

        It must not change before the next :meth:`zero_grad`, as parameters without a gradient store views of it.
        """
        for parameter, part in self._parts:
            addition = gradient[part].view(parameter.shape)
            parameter.grad = addition if parameter.grad is None else parameter.grad.add_(addition)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # .to() and .float() would replace the parameters by tensors that are not views of the buffer.
        raise RuntimeError("a TwoTower cannot change its device or dtype: pass the device to build()")


def joint_dim(backbone: Backbone, image_dim: int, text_dim: int) -> int:
    """Dimension of the joint embedding.

    Raises:
        InputError: with a residual head, the towers' dimensions differ from each other or from ``backbone.dim``.
    """
    if backbone.head == "residual":
        if image_dim != text_dim:
            raise InputError(
                "backbone.head",
                f"residual with image dimension {image_dim} and text dimension {text_dim}",
                "mlp where the dimensions differ; residual adds to the input, so both must be the joint dimension",
            )
        if backbone.dim not in (None, image_dim):
            raise InputError("backbone.dim", backbone.dim, f"{image_dim} or null with a residual head")
        return image_dim
    return backbone.dim or (image_dim if image_dim == text_dim else DEFAULT_DIM)


def initial_parameters(layout: Layout, backbone: Backbone, seed: int) -> Tensor:
    """Initial parameters float32 [P]: adapters N(0, adapter_std^2), heads N(0, head_std^2), biases zero.

    The down projections and middle layers of multi-modal adapters have Kaiming's standard deviation for ReLU, as in
    pFedMMA's code: the product of three layers that all start near zero has next to no gradient. Each parameter has its
    own generator, so its value does not depend on the other parameters. Heads on features that are not aligned are
    initialised in the same way: as embeddings are normalised, a small standard deviation does no harm. Low-rank
    adapters start from B = 0 and A ~ N(0, 1 / (3 d)) for a width of d; LoRA's code draws A uniformly, with the same
    variance.
    """
    parts = []
    for entry in layout.entries:
        if entry.name.endswith(".bias"):
            parts.append(torch.zeros(entry.size))
            continue
        std = backbone.adapter_std if ".adapters." in entry.name else backbone.head_std
        if backbone.adapter == "mma" and ".adapters." in entry.name and ".up." not in entry.name:
            std = math.sqrt(2 / entry.shape[0])
        if backbone.adapter == "lora" and ".adapters." in entry.name:
            std = 0.0 if ".up." in entry.name else 1 / math.sqrt(3 * entry.shape[1])
        parts.append(torch.randn(entry.size, generator=torch_generator(seed, "model", entry.name)) * std)
    return torch.cat(parts)


def shared_adapters(backbone: Backbone, sites: int) -> SharedAdapters | None:
    """The middle layers of multi-modal adapters, shared by both towers; None for other adapters."""
    if backbone.adapter != "mma":
        return None
    return SharedAdapters(sites, backbone.bottleneck, backbone.adapter_scale)


def adapters_of(backbone: Backbone, widths: Sequence[int], shared: SharedAdapters | None) -> Iterator[nn.Module]:
    """One tower's adapters."""
    low_rank = LowRankAttention if backbone.adapter_site == "blocks" else LowRank
    for i, width in enumerate(widths):
        if shared is not None:
            yield MultiModalAdapter(width, backbone.bottleneck, shared.adapters[site(i)], shared.scale)
        elif backbone.adapter == "lora":
            yield low_rank(width, backbone.bottleneck, backbone.adapter_scale)
        else:
            yield Adapter(width, backbone.bottleneck)


def feature_towers(backbone: Backbone, inputs: InputSpec, dim: int, device: torch.device) -> TwoTower:
    """The model over precomputed features; trainable parameters are not yet initialised."""
    shared, residual = shared_adapters(backbone, 1), backbone.head == "residual"
    towers = [
        Branch([*adapters_of(backbone, [width], shared)], width, dim, residual=residual, blocks=False)
        for (width,) in (inputs.image_shape, inputs.text_shape)
    ]
    return TwoTower(towers[0], towers[1], dim, device, shared=shared)
