"""Two towers over a frozen backbone: all that trains lives in one flat buffer.

Per tower: bottleneck adapters, then a head, then unit length. The frozen part lies before the adapters (features
computed once, ``adapter_site: feature``) or around them (``adapter_site: blocks``, see ``fedmq.encoders.clip``).
Source: RCSR, "frozen CLIP + adapters".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmq.config.parts import Modality
from fedmq.config.scenario import Backbone
from fedmq.encoders.base import MODALITIES, InputSpec
from fedmq.errors import InputError
from fedmq.models.adapters import Adapter, MultiModalAdapter, SharedAdapters, site
from fedmq.models.query_bank import Bank
from fedmq.seeds import torch_generator
from fedmq.wire.layout import Layout

# Name prefixes of a modality's trainable parameters; each branch is one contiguous range of the flat buffer.
BRANCHES: Mapping[Modality, str] = {"image": "visual.", "text": "text."}
# Name prefix of layers that both modalities go through.
SHARED = "shared."
# Joint dimension of an mlp head where the two towers' own dimensions differ and the scenario names none.
DEFAULT_DIM = 512


@dataclass(frozen=True)
class Out:
    """What a tower makes of a batch.

    Args:
        hidden: [B, h], the projection's output before the last layer: what MOON and FedUCH contrast. With ``info_nce``
            the embedding itself.
        raw: [B, d], the last layer's output before anything squashes or enhances it.
        code: [B, d], what retrieval ranks by.
        logits: [B, C] of the tower's classifier; None where it has none.
        before: [B, d], the code before a memory enhanced it; None where none did.
    """

    hidden: Tensor
    raw: Tensor
    code: Tensor
    logits: Tensor | None = None
    before: Tensor | None = None

    @property
    def plain(self) -> Tensor:
        """The code [B, d] without any memory's part."""
        return self.code if self.before is None else self.before


class Branch(nn.Module):
    """One tower: frozen encoder (if any), adapters, head, unit length.

    Args:
        widths: last dimension at each adapter site, in order.
        bottleneck: width of the adapters.
        head_in: dimension that enters the head.
        dim: joint dimension d.
        residual: z = x + W2 relu(W1 x) instead of z = W2 relu(W1 x).
        blocks: the adapters sit inside ``frozen``, which runs them itself.
        shared: middle layers of multi-modal adapters; None has adapters of the tower's own alone.
    """

    def __init__(
        self,
        widths: Sequence[int],
        bottleneck: int,
        head_in: int,
        dim: int,
        *,
        residual: bool,
        blocks: bool,
        shared: SharedAdapters | None = None,
    ) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict(
            {
                site(i): Adapter(width, bottleneck)
                if shared is None
                else MultiModalAdapter(width, bottleneck, shared.adapters[site(i)], shared.scale)
                for i, width in enumerate(widths)
            }
        )
        self.head = nn.ModuleDict(
            {"0": nn.Linear(head_in, dim, device="meta"), "1": nn.Linear(dim, dim, device="meta")}
        )
        self.residual = residual
        self.blocks = blocks
        self.frozen: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """One batch of inputs [B, ...] to float32 [B, d] of unit length."""
        if self.blocks:
            if self.frozen is None:
                raise RuntimeError("this tower's frozen weights were not loaded: its modality was left out at build")
            x = self.frozen(x)
        else:
            for adapter in self.adapters.values():
                x = adapter(x)
        first, second = self.head.values()
        z = second(F.relu(first(x)))
        return F.normalize(x + z if self.residual else z, dim=-1)


def branch(layout: Layout, prefix: str) -> slice:
    """Elements of the flat buffer whose names start with ``prefix``.

    Args:
        layout: of the flat buffer.
        prefix: e.g. ``"visual."``.

    Returns:
        A slice counted in elements; empty where no name starts so.

    Raises:
        ValueError: the names do not lie side by side.
    """
    offset, found = 0, []
    for entry in layout.entries:
        if entry.name.startswith(prefix):
            found.append((offset, offset + entry.size))
        offset += entry.size
    if not found:
        return slice(0, 0)
    if sum(stop - start for start, stop in found) != found[-1][1] - found[0][0]:
        raise ValueError(f"entries of branch {prefix!r} do not lie side by side")
    return slice(found[0][0], found[-1][1])


class TwoTower(nn.Module):
    """Image and text tower; all trainable parameters are views of one flat float32 buffer.

    Args:
        visual: the image tower, a module from a batch to its embeddings or to an :class:`Out`; its parameters are
            still on the meta device.
        text: the text tower, likewise.
        dim: joint dimension d.
        device: where the buffers are.
        shared: layers that both modalities go through, a module from (Out, tower) to Out; None where there are none.
        binary: retrieval ranks by the signs of the codes, in Hamming distance, instead of by their cosines.

    Attributes:
        layout: names and shapes of the flat buffer, sorted by name.
        dim: joint dimension d.
        binary: as above.
        initial: draws the initial parameters float32 [P] again, the same in every process.
        flat: float32 [P], contiguous; the parameters are views of it.
        bank: what a released model corrects its embeddings by; None where it has none, as in all training.
    """

    initial: Callable[[], Tensor]

    def __init__(
        self,
        visual: nn.Module,
        text: nn.Module,
        dim: int,
        device: torch.device,
        *,
        shared: nn.Module | None = None,
        binary: bool = False,
    ) -> None:
        super().__init__()
        self.visual, self.text, self.shared = visual, text, shared
        self.dim, self.binary = dim, binary
        self.bank: Bank | None = None
        trainable = sorted(self.named_parameters())
        self.layout = Layout.of((name, parameter.shape, "float32") for name, parameter in trainable)
        self.flat = torch.zeros(self.layout.size, device=device)
        self._parts: list[tuple[nn.Parameter, slice]] = []
        offset = 0
        for name, old in trainable:
            part = slice(offset, offset + old.numel())
            offset = part.stop
            parameter = nn.Parameter(self.flat[part].view(old.shape))
            self._parts.append((parameter, part))
            owner, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(owner), leaf, parameter)

    def branch(self, name: str) -> slice:
        """Where a branch lies in :attr:`flat`: ``image``, ``text``, ``shared``, or a name prefix (``visual.``)."""
        prefix = SHARED if name == "shared" else next((BRANCHES[each] for each in MODALITIES if each == name), name)
        return branch(self.layout, prefix)

    def load(self, theta: npt.NDArray[Any] | Tensor) -> None:
        """Copy parameters into :attr:`flat`.

        Args:
            theta: [P], cast to float32; left as it is.

        Raises:
            ValueError: another shape than [P].
        """
        if tuple(theta.shape) != tuple(self.flat.shape):
            raise ValueError(f"parameters of shape {list(theta.shape)} for a model of [{self.flat.numel()}]")
        if isinstance(theta, np.ndarray) and self.flat.device.type == "cpu":
            # A buffer off the wire is read-only, which torch cannot wrap without a warning; NumPy need not wrap it.
            np.copyto(self.flat.detach().numpy(), theta, casting="unsafe")
            return
        source = torch.tensor(theta) if isinstance(theta, np.ndarray) else theta
        with torch.no_grad():
            self.flat.copy_(source)

    @contextmanager
    def computing_with(self, theta: Tensor) -> Iterator[None]:
        """Compute with other parameters for a while; :attr:`flat` stays as it is, and nothing is copied.

        A graph made before may be alive: autograd, which would count an exchange of numbers as a change of its saved
        tensors, sees the parameters it knows again before its backward pass.

        Args:
            theta: float32 [P], in memory of torch's own allocator.
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
        """All that one tower makes of a batch.

        Args:
            modality: which tower.
            x: images or captions, as in :meth:`image` and :meth:`caption`.

        Raises:
            RuntimeError: built without the frozen tower that this needs.
        """
        tower = self.visual if modality == "image" else self.text
        found = tower(x)
        out = Out(found, found, found) if isinstance(found, Tensor) else found
        finished: Out = out if self.shared is None else self.shared(out, tower)
        return finished

    def image(self, x: Tensor) -> Tensor:
        """Embed images.

        Args:
            x: float32 features [B, d_i], or uint8 pixels [B, 3, S, S] with adapters in the blocks, of videos
                [B, F, 3, S, S].

        Returns:
            float32 [B, d]: unit length, or codes whose signs rank where :attr:`binary`; four numbers longer with a
            :attr:`bank`.

        Raises:
            RuntimeError: built without the frozen image tower that this needs.
        """
        code = self.outputs("image", x).code
        return code if self.bank is None else self.bank.images(code)

    def caption(self, x: Tensor) -> Tensor:
        """Embed captions.

        Args:
            x: float32 features [B, d_t], or token ids [B, 77] with adapters in the blocks.

        Returns:
            float32 [B, d], as :meth:`image`.

        Raises:
            RuntimeError: built without the frozen text tower that this needs.
        """
        code = self.outputs("text", x).code
        return code if self.bank is None else self.bank.texts(code)

    def within(self, branches: Sequence[slice]) -> list[nn.Parameter]:
        """The parameters that lie in some ranges of :attr:`flat`, in its order."""
        return [held for held, part in self._parts if any(r.start <= part.start < r.stop for r in branches)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. Autograd then hands over the tensors it makes instead of adding them to others.

        Zeroing and adding are four more passes over memory for every parameter and step, a tenth of a step's time where
        the layers are wide and the batches small.
        """
        for parameter, _ in self._parts:
            parameter.grad = None

    def add_gradient(self, gradient: Tensor) -> None:
        """Add a gradient found outside autograd.

        Args:
            gradient: float32 [P]; not to be changed before the next :meth:`zero_grad`: a parameter without a gradient
                takes its part over.
        """
        for parameter, part in self._parts:
            more = gradient[part].view(parameter.shape)
            parameter.grad = more if parameter.grad is None else parameter.grad.add_(more)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # .to() and .float() would replace the parameters by tensors that are no longer views of the buffer.
        raise RuntimeError("a TwoTower stays on the device and in the type it was built with")


def joint_dim(backbone: Backbone, image_dim: int, text_dim: int) -> int:
    """Dimension of the joint embedding.

    Raises:
        InputError: a residual head, and the towers' dimensions differ or ``backbone.dim`` is another.
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
    """The initial parameters float32 [P]: adapters N(0, adapter_std), heads N(0, head_std), biases zero.

    Each parameter has a generator of its own, so it is the same whatever else the model holds. Heads on features that
    are not aligned use the same rule: the towers end in unit length and the head has no scale of its own, so a small
    standard deviation costs nothing.
    """
    parts = []
    for entry in layout.entries:
        if entry.name.endswith(".bias"):
            parts.append(torch.zeros(entry.size))
            continue
        std = backbone.adapter_std if ".adapters." in entry.name else backbone.head_std
        parts.append(torch.randn(entry.size, generator=torch_generator(seed, "model", entry.name)) * std)
    return torch.cat(parts)


def shared_adapters(backbone: Backbone, sites: int) -> SharedAdapters | None:
    """The layers that multi-modal adapters share between the towers; None where adapters are each tower's own."""
    if backbone.adapter == "bottleneck":
        return None
    return SharedAdapters(sites, backbone.bottleneck, backbone.adapter_scale)


def _feature_towers(backbone: Backbone, inputs: InputSpec, dim: int, device: torch.device) -> TwoTower:
    shared, residual = shared_adapters(backbone, 1), backbone.head == "residual"
    towers = [
        Branch([width], backbone.bottleneck, width, dim, residual=residual, blocks=False, shared=shared)
        for (width,) in (inputs.image_shape, inputs.text_shape)
    ]
    return TwoTower(towers[0], towers[1], dim, device, shared=shared)
