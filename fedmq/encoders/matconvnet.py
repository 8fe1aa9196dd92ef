"""CNN-F, VGG-19 and other sequential MatConvNet models as image encoders, e.g. ``imagenet-vgg-f.mat``.

The layers are read from the file and run up to the last convolution, which is the classifier. The output is fc7 after
its ReLU, 4,096 wide (Chatfield et al. 2014; Simonyan and Zisserman 2015). DCMH, SHDCH and FedCAFE extract features with
CNN-F; their authors also fine-tune it end to end.
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
from fedmq.encoders.foreign_weights import structs_of
from fedmq.errors import InputError
from fedmq.storage import quarantine
from fedmq.storage.cache import file_digest, key_of

Layer = Callable[[Tensor], Tensor]

#: Edge length of the square inputs of CNN-F and VGG [pixels].
EDGE = 224
# Images per forward pass without gradients: the layers need megabytes per image.
_BLOCK = 64


def _file(backbone: Backbone) -> Path:
    if backbone.pretrained is None or not Path(backbone.pretrained).is_file():
        raise InputError("backbone.pretrained", backbone.pretrained, "a .mat file, e.g. imagenet-vgg-f.mat")
    return Path(backbone.pretrained)


def weights_digest(backbone: Backbone) -> str:
    """SHA-256 (hex) of the file, used as a cache key.

    Raises:
        InputError: the file does not exist.
    """
    return key_of("matconvnet", file_digest(_file(backbone)))


def _numbers(value: Any, count: int) -> list[int]:
    """The ``count`` numbers of a field; MatConvNet stores a single one if all are equal."""
    numbers = [int(item) for item in np.ravel(value)]
    return numbers * count if len(numbers) == 1 else numbers


def _padded(x: Tensor, pad: Any, value: float) -> Tensor:
    top, bottom, left, right = _numbers(pad, 4)
    return functional.pad(x, (left, right, top, bottom), value=value)


class Convolution(nn.Module):
    """A convolution with filters [out, in, h, w] and biases [out] from the file."""

    def __init__(self, layer: Mapping[str, Any]) -> None:
        super().__init__()
        # Newer files have one field `weights`, older ones two fields.
        filters, biases = layer["weights"][:2] if "weights" in layer else (layer["filters"], layer["biases"])
        filters = np.asarray(filters, dtype=np.float32)
        # MATLAB drops trailing axes of size 1.
        kernel = filters.reshape(*filters.shape, *[1] * (4 - filters.ndim)).transpose(3, 2, 0, 1).copy()
        self.weight = nn.Parameter(torch.from_numpy(kernel))
        self.bias = nn.Parameter(torch.from_numpy(np.asarray(biases, dtype=np.float32).reshape(-1).copy()))
        self.stride, self.pad = _numbers(layer.get("stride", 1), 2), layer.get("pad", 0)

    def forward(self, x: Tensor) -> Tensor:
        """float32 [n, c, h, w] to [n, out, h', w']."""
        groups = x.shape[1] // self.weight.shape[1]
        return functional.conv2d(_padded(x, self.pad, 0.0), self.weight, self.bias, self.stride, groups=groups)


def _pooling(layer: Mapping[str, Any]) -> Layer:
    if layer.get("method", "max") != "max":
        raise InputError("backbone.pretrained", f"pooling by {layer['method']}", "max pooling")
    size, stride = _numbers(layer["pool"], 2), _numbers(layer.get("stride", 1), 2)
    pad = layer.get("pad", 0)
    return lambda x: functional.max_pool2d(_padded(x, pad, -torch.inf), size, stride)


def response_normalisation(layer: Mapping[str, Any]) -> Layer:
    """MatConvNet's ``vl_nnnormalize``: y = x / (kappa + alpha * sum of x^2 over a window of channels)^beta."""
    size, kappa, alpha, beta = (float(item) for item in np.ravel(layer["param"]))
    # Torch divides alpha by the window size, MatConvNet does not.
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
    """The layers before the last convolution.

    Args:
        layers: structs of all layers in the file, in order.
        mean: float32 [3, h, w] or [3, 1, 1], subtracted from the pixels.
    """

    def __init__(self, layers: Sequence[Mapping[str, Any]], mean: Tensor) -> None:
        super().__init__()
        self.mean = mean
        last = max(index for index, layer in enumerate(layers) if layer.get("type") == "conv")
        self.chain = [_layer(layer) for layer in layers[:last]]
        # Trained parameters are named by the layer's index.
        for index, layer in enumerate(self.chain):
            if isinstance(layer, Convolution):
                self.add_module(str(index), layer)

    @property
    def width(self) -> int:
        """Output width d of :meth:`forward` for images of size :data:`EDGE`."""
        with torch.inference_mode():
            return int(self(torch.zeros(1, 3, EDGE, EDGE, device=self.mean.device)).shape[1])

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [n, 3, 224, 224], uint8 or float32 in [0, 255], to float32 [n, d]."""
        if torch.is_grad_enabled():
            return self._run(pixels)
        return torch.cat([self._run(part) for part in torch.split(pixels, _BLOCK)])

    def _run(self, pixels: Tensor) -> Tensor:
        x = pixels.float() - self.mean
        for layer in self.chain:
            x = layer(x)
        return x.flatten(1)


def load(backbone: Backbone, device: str | torch.device) -> Network:
    """Load a network with the weights of ``pretrained``, a .mat file.

    Raises:
        InputError: scipy is not installed, or the file is not a MatConvNet network.
    """
    path, allowed = _file(backbone), "a network of MatConvNet (.mat with layers)"
    place = f"backbone.pretrained: {path}"
    content = quarantine.read(structs_of, path, place=place, allowed=allowed, files=[path], libraries=["scipy.io"])
    try:
        normalisation = content.get("normalization") or content["meta"]["normalization"]
        mean = torch.from_numpy(np.asarray(normalisation["averageImage"], dtype=np.float32).copy()).to(device)
        mean = mean.permute(2, 0, 1) if mean.ndim == 3 else mean.view(-1, 1, 1)
        return Network([dict(layer) for layer in content["layers"]], mean).to(device)
    except InputError:
        raise
    except Exception as error:  # any field may be missing, or hold something else
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(place, reason, allowed) from None
