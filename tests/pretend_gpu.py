"""A simulated GPU for machines without one: tensors that report ``cuda:0`` and are computed on the CPU.

It refuses what a GPU refuses: operands on two devices, a CPU tensor indexed by one that is not, ``numpy()`` of
one that is not; also random numbers from the GPU's generator, which are not reproducible. The CPU computes all
results, so a run on this GPU has the CPU's model to the bit. A real GPU's kernels, memory and speed are not simulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch
from torch.utils import _pytree as trees
from torch.utils._python_dispatch import TorchDispatchMode

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
_DRAWS = {"bernoulli", "bernoulli_", "multinomial", "native_dropout", "normal", "normal_", "rand", "rand_like"}
_DRAWS |= {"randint", "randn", "randn_like", "random_", "randperm", "uniform_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
#: Operations that may have operands on both devices.
_CROSSING = {"copy_", "_to_copy", *_INDEXING}


class Far(torch.Tensor):
    """A tensor on the simulated GPU; ``near`` is the CPU tensor with its values."""

    near: torch.Tensor
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type[Far], near: torch.Tensor) -> Far:
        # Torch's C++ side sees a CPU tensor, so autograd needs no GPU; only Python sees the device.
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            layout=near.layout,
            device=CPU,
        )
        made.near = near
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        return computed(operation, arguments, named or {})

    @property
    def device(self) -> torch.device:
        return GPU

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: Far) -> None:
        torch.Tensor.data.__set__(self, other)
        self.near = other.near

    def cpu(self) -> torch.Tensor:
        return torch.ops.aten._to_copy.default(self, device=CPU)

    def to(
        self, *wanted: Any, dtype: torch.dtype | None = None, device: Any = None, copy: bool = False
    ) -> torch.Tensor:
        for each in wanted:
            if isinstance(each, torch.dtype):
                dtype = each
            elif isinstance(each, torch.Tensor):
                device, dtype = each.device, each.dtype
            elif not isinstance(each, bool):
                device = each
        place = GPU if device is None else torch.device(device)
        if place == GPU and not copy and dtype in (None, self.dtype):
            return self
        return torch.ops.aten._to_copy.default(self, device=place, dtype=dtype or self.dtype)

    def tolist(self) -> Any:
        return self.near.tolist()

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host")

    __array__ = numpy


class _Factories(TorchDispatchMode):
    """Intercepts tensors that are created on the GPU or moved there."""

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        return computed(operation, arguments, named or {})


def computed(operation: Any, arguments: Any, named: dict[str, Any]) -> Any:
    """Compute one operation on the CPU if a GPU would accept it."""
    name = operation._schema.name.partition("::")[2]
    leaves, form = trees.tree_flatten((arguments, named))
    far = [each for each in leaves if isinstance(each, Far)]
    near = [each for each in leaves if isinstance(each, torch.Tensor) and not isinstance(each, Far)]
    asked = named.get("device")
    if far and name.startswith(("new_", "empty_like", "zeros_like", "ones_like", "full_like")):
        asked = None  # the default argument names the device that C++ sees
    on_gpu = bool(far) if asked is None else torch.device(asked).type == "cuda"
    if name in _DRAWS and on_gpu:
        raise RuntimeError(f"{name}: a draw on the GPU")
    if far and name not in _CROSSING and any(each.ndim for each in near):
        shapes = [tuple(each.shape) for each in near if each.ndim]
        raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found {shapes} on the CPU")
    if far and name in _INDEXING and not isinstance(arguments[0], Far):
        raise RuntimeError(f"{name}: indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    inner = [each.near if isinstance(each, Far) else each for each in leaves]
    inner = [CPU if isinstance(each, torch.device) and each.type == "cuda" else each for each in inner]
    arguments_, named_ = trees.tree_unflatten(inner, form)
    wrapped = {id(each.near): each for each in far}
    kept = {id(each) for each in near}

    def placed(made: Any) -> Any:
        if not isinstance(made, torch.Tensor) or id(made) in kept:
            return made
        return wrapped.get(id(made), Far(made) if on_gpu else made)

    return trees.tree_map(placed, operation(*arguments_, **named_))


@contextlib.contextmanager
def pretended(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give this thread one simulated GPU within the context."""
    with patch.context() as local:
        local.setattr(torch.cuda, "_lazy_init", lambda: None)
        local.setattr(torch.cuda, "device_count", lambda: 1)
        local.setattr(torch.cuda, "get_device_name", lambda _device: "pretended")
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            with _Factories():
                yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)
