"""CNN-F, VGG-19 and other chains of MatConvNet as image encoders: ``imagenet-vgg-f.mat`` and its like.

The file names its own layers, and they are run as it says up to the last convolution, which is the classifier: fc7 with
its ReLU, 4,096 wide (Chatfield et al. 2014; Simonyan and Zisserman 2015). DCMH, SHDCH and FedCAFE extract with CNN-F;
their authors train it, too, end to end, from these weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmq.config.scenario import Backbone
from fedmq.errors import InputError
from fedmq.extras import package
from fedmq.storage.cache import file_digest, key_of

Layer = Callable[[Tensor], Tensor]

#: Edge of the square pictures that CNN-F and VGG take, in pixels.
EDGE = 224
# Pictures that go through the network at once where no gradient is wanted: its layers need megabytes for each.
_BLOCK = 64


def _file(backbone: Backbone) -> Path:
    if backbone.pretrained is None or not Path(backbone.pretrained).is_file():
        raise InputError("backbone.pretrained", backbone.pretrained, "a .mat file, e.g. imagenet-vgg-f.mat")
    return Path(backbone.pretrained)


def weights_digest(backbone: Backbone) -> str:
    """SHA-256 (hex) of the file: a key for caches.

    Raises:
        InputError: no such file.
    """
    return key_of("matconvnet", file_digest(_file(backbone)))


def _plain(value: Any) -> Any:
    """What MATLAB wrote, unwrapped: structs as dicts, cells as lists, texts as str, arrays as they are.

    scipy can do so itself, but squeezes arrays, too: fc7's filters [1, 1, 4096, 4096] would lose their first two axes.
    """
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.names is not None:
        found = [{name: _plain(item[name]) for name in value.dtype.names} for item in value.ravel("F")]
        return found[0] if len(found) == 1 else found
    if value.dtype == object:
        return [_plain(item) for item in value.ravel("F")]
    if value.dtype.kind == "U":
        return "".join(value.ravel())
    return value


def _numbers(value: Any, count: int) -> list[int]:
    """MatConvNet writes one number where all sides are the same."""
    found = [int(item) for item in np.ravel(value)]
    return found * count if len(found) == 1 else found


def _padded(x: Tensor, pad: Any, value: float) -> Tensor:
    top, bottom, left, right = _numbers(pad, 4)
    return functional.pad(x, (left, right, top, bottom), value=value)


class Convolution(nn.Module):
    """A convolution with the file's own filters [out, in, h, w] and biases [out].

    Args:
        layer: as the file describes it.
    """

    def __init__(self, layer: Mapping[str, Any]) -> None:
        super().__init__()
        # Newer files keep both in `weights`; older ones have two fields.
        filters, biases = layer["weights"][:2] if "weights" in layer else (layer["filters"], layer["biases"])
        filters = np.asarray(filters, dtype=np.float32)
        # MATLAB drops axes of length 1 at the end.
        kernel = filters.reshape(*filters.shape, *[1] * (4 - filters.ndim)).transpose(3, 2, 0, 1).copy()
        self.weight = nn.Parameter(torch.from_numpy(kernel))
        self.bias = nn.Parameter(torch.from_numpy(np.asarray(biases, dtype=np.float32).reshape(-1).copy()))
        self.stride, self.pad = _numbers(layer.get("stride", 1), 2), layer.get("pad", 0)

    def forward(self, x: Tensor) -> Tensor:
        """[n, c, h, w] to [n, out, h', w']."""
        groups = x.shape[1] // self.weight.shape[1]
        return functional.conv2d(_padded(x, self.pad, 0.0), self.weight, self.bias, self.stride, groups=groups)


def _pooling(layer: Mapping[str, Any]) -> Layer:
    if layer.get("method", "max") != "max":
        raise InputError("backbone.pretrained", f"pooling by {layer['method']}", "max pooling")
    size, stride = _numbers(layer["pool"], 2), _numbers(layer.get("stride", 1), 2)
    pad = layer.get("pad", 0)
    return lambda x: functional.max_pool2d(_padded(x, pad, -torch.inf), size, stride)


def response_normalisation(layer: Mapping[str, Any]) -> Layer:
    """MatConvNet's ``vl_nnnormalize``: y = x / (kappa + alpha sum of x^2 over a window of channels)^beta."""
    size, kappa, alpha, beta = (float(item) for item in np.ravel(layer["param"]))
    # Torch divides alpha by the window, MatConvNet does not.
    return lambda x: functional.local_response_norm(x, int(size), alpha * size, beta, kappa)


def _layer(layer: Mapping[str, Any]) -> Layer:
    match str(layer.get("type")):
        case "conv":
            return Convolution(layer)
        case "pool":
            return _pooling(layer)
        case "normalize" | "lrn":
            return response_normalisation(layer)
        case "relu":
            return functional.relu
        case "dropout":
            return lambda x: x
        case other:
            raise InputError("backbone.pretrained", f"a layer of type {other}", "conv, relu, pool, normalize, dropout")


class Network(nn.Module):
    """The chain up to the last convolution.

    Args:
        layers: as the file describes them, in order.
        mean: float32 [3, h, w] or [3, 1, 1], taken off the pixels.
    """

    def __init__(self, layers: Sequence[Mapping[str, Any]], mean: Tensor) -> None:
        super().__init__()
        self.mean = mean
        last = max(index for index, layer in enumerate(layers) if layer.get("type") == "conv")
        self.chain = [_layer(layer) for layer in layers[:last]]
        # Registered under the layer's place: these are the names of the trained parameters.
        for place, layer in enumerate(self.chain):
            if isinstance(layer, Convolution):
                self.add_module(str(place), layer)

    @property
    def width(self) -> int:
        """Width d of what :meth:`forward` gives for pictures of :data:`EDGE`."""
        with torch.inference_mode():
            return int(self(torch.zeros(1, 3, EDGE, EDGE, device=self.mean.device)).shape[1])

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [n, 3, 224, 224], uint8 or float32 from 0 to 255, to float32 [n, d]."""
        if torch.is_grad_enabled():
            return self._run(pixels)
        return torch.cat([self._run(part) for part in torch.split(pixels, _BLOCK)])

    def _run(self, pixels: Tensor) -> Tensor:
        x = pixels.float() - self.mean
        for layer in self.chain:
            x = layer(x)
        return x.flatten(1)


def load(backbone: Backbone, device: str | torch.device) -> Network:
    """The network of a file with the file's weights.

    Args:
        backbone: ``matconvnet`` and a .mat file in ``pretrained``.
        device: where it computes.

    Raises:
        InputError: scipy is not installed, or the file is no such network.
    """
    path = _file(backbone)
    reader = package("scipy.io", "formats", str(path))
    try:
        content = {name: _plain(value) for name, value in reader.loadmat(path).items()}
        about = content.get("normalization") or content["meta"]["normalization"]
        mean = torch.from_numpy(np.asarray(about["averageImage"], dtype=np.float32).copy()).to(device)
        mean = mean.permute(2, 0, 1) if mean.ndim == 3 else mean.view(-1, 1, 1)
        return Network([dict(layer) for layer in content["layers"]], mean).to(device)
    except InputError:
        raise
    except Exception as error:  # scipy's reader and the file's structure may fail in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"backbone.pretrained: {path}", reason, "a network of MatConvNet (.mat with layers)") from None
