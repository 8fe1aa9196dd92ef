"""CNN-F, VGG-19 and other chains of MatConvNet as frozen image encoders: ``imagenet-vgg-f.mat`` and its like.

The file names its own layers, and they are run as it says up to the last convolution, which is the classifier: fc7 with
its ReLU, 4,096 wide (Chatfield et al. 2014; Simonyan and Zisserman 2015). DCMH, SHDCH and FedCAFE extract with CNN-F.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmq.data.features import file_digest
from fedmq.data.pictures import package
from fedmq.data.prepared import key_of
from fedmq.errors import InputError
from fedmq.scenario import Backbone

Layer = Callable[[Tensor], Tensor]


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


def _numbers(value: Any, count: int) -> list[int]:
    """MatConvNet writes one number where all sides are the same."""
    found = [int(item) for item in np.atleast_1d(value)]
    return found * count if len(found) == 1 else found


def _padded(x: Tensor, pad: Any, value: float) -> Tensor:
    top, bottom, left, right = _numbers(pad, 4)
    return functional.pad(x, (left, right, top, bottom), value=value)


def _convolution(layer: Mapping[str, Any], device: str) -> Layer:
    # Newer files keep both in `weights`; older ones have two fields.
    filters, biases = layer["weights"][:2] if "weights" in layer else (layer["filters"], layer["biases"])
    filters = np.asarray(filters, dtype=np.float32)
    kernel = torch.from_numpy(filters.reshape(*filters.shape, *[1] * (4 - filters.ndim)).transpose(3, 2, 0, 1).copy())
    bias = torch.from_numpy(np.asarray(biases, dtype=np.float32).reshape(-1).copy())
    kernel, bias = kernel.to(device), bias.to(device)
    stride, pad = _numbers(layer.get("stride", 1), 2), layer.get("pad", 0)

    def run(x: Tensor) -> Tensor:
        return functional.conv2d(_padded(x, pad, 0.0), kernel, bias, stride, groups=x.shape[1] // kernel.shape[1])

    return run


def _pooling(layer: Mapping[str, Any]) -> Layer:
    if layer.get("method", "max") != "max":
        raise InputError("backbone.pretrained", f"pooling by {layer['method']}", "max pooling")
    size, stride = _numbers(layer["pool"], 2), _numbers(layer.get("stride", 1), 2)
    pad = layer.get("pad", 0)
    return lambda x: functional.max_pool2d(_padded(x, pad, -torch.inf), size, stride)


def _normalisation(layer: Mapping[str, Any]) -> Layer:
    size, kappa, alpha, beta = (float(item) for item in layer["param"])
    # Torch divides alpha by the window, MatConvNet does not.
    return lambda x: functional.local_response_norm(x, int(size), alpha * size, beta, kappa)


def _layer(layer: Mapping[str, Any], device: str) -> Layer:
    match str(layer.get("type")):
        case "conv":
            return _convolution(layer, device)
        case "pool":
            return _pooling(layer)
        case "normalize" | "lrn":
            return _normalisation(layer)
        case "relu":
            return functional.relu
        case "dropout":
            return lambda x: x
        case other:
            raise InputError("backbone.pretrained", f"a layer of type {other}", "conv, relu, pool, normalize, dropout")


def load(backbone: Backbone, device: str) -> Layer:
    """The chain up to the last convolution.

    Args:
        backbone: ``matconvnet`` and a .mat file in ``pretrained``.
        device: where it computes.

    Returns:
        A function from pixels float32 [n, 3, 224, 224], 0 to 255, to float32 [n, d].

    Raises:
        InputError: scipy is not installed, or the file is no such network.
    """
    path = _file(backbone)
    reader = package("scipy.io", "formats", str(path))
    try:
        content = reader.loadmat(path, simplify_cells=True)
        layers = [dict(layer) for layer in content["layers"]]
        about = content.get("normalization") or content["meta"]["normalization"]
        mean = torch.from_numpy(np.asarray(about["averageImage"], dtype=np.float32).copy()).to(device)
        last = max(index for index, layer in enumerate(layers) if layer.get("type") == "conv")
        chain = [_layer(layer, device) for layer in layers[:last]]
    except InputError:
        raise
    except Exception as error:  # scipy's reader and the file's structure may fail in any way
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"backbone.pretrained: {path}", reason, "a network of MatConvNet (.mat with layers)") from None
    mean = mean.permute(2, 0, 1) if mean.ndim == 3 else mean.view(-1, 1, 1)

    def run(pixels: Tensor) -> Tensor:
        x = pixels - mean
        for step in chain:
            x = step(x)
        return x.flatten(1)

    return run
