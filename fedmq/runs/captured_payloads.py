"""The payloads that a coordinator keeps with ``privacy.capture``: for each merge, what silos sent and its state before.

They show what a coordinator could read: a silo's payloads after clipping and noise, and in a run with secure
aggregation no update. A branch that a silo lacks is filled with zeros.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedmq.errors import InputError
from fedmq.federation.protocol import State, Update
from fedmq.storage.run_folder import RunFolder, load_aligned, make_folder, write_atomically, write_tensors
from fedmq.wire.fields import Names, Real, Tensor, Whole
from fedmq.wire.payloads import Payload

_THETA = "model"
#: Before the name of another tensor of the method's state.
_STATE = "state:"
Array = npt.NDArray[np.generic]
#: A captured payload: its arrays, and numbers as arrays without dimensions, by field.
Fields = Mapping[str, Array]


@dataclass(frozen=True)
class Captured:
    """What the silos sent for one merge."""

    version: int  # version of the model before the merge
    state: State  # the method's state before the merge, with the model's parameters
    silos: Mapping[str, Mapping[str, Fields]]  # payloads by silo and kind
    base_versions: Mapping[str, int]  # version that each silo started from
    layers: Mapping[str, Sequence[str]]  # names of the layers in a silo's partial update, in the order of its buffer


def capture(folder: RunFolder, state: State, replies: Sequence[Update], version: int) -> None:
    """Write the payloads of a merge to ``captured/``; a merge that is repeated writes the same file again.

    Raises:
        InputError: the file cannot be written there.
        DiskError: the disk is full or broken.
    """
    tensors = {_THETA: state.theta, **{f"{_STATE}{name}": tensor for name, tensor in state.tensors.items()}}
    layers: dict[str, Sequence[str]] = {}
    for reply in replies:
        for payload in reply.payloads:
            tensors |= {f"{reply.silo.name}/{payload.KIND}/{name}": value for name, value in _numbers(payload)}
            for name, spec in payload.FIELDS.items():
                if isinstance(spec, Names):
                    layers[reply.silo.name] = getattr(payload, name)
    base_versions = {reply.silo.name: reply.base_version for reply in replies}
    facts = {"base_versions": base_versions, "layers": layers, "values": state.values}
    make_folder(folder.captured)
    path = folder.captured / f"version-{version:06d}.safetensors"
    write_atomically(path, lambda place: write_tensors(place, tensors, {"facts": json.dumps(facts)}))


def _numbers(payload: Payload) -> Iterator[tuple[str, torch.Tensor]]:
    for name, spec in payload.FIELDS.items():
        if isinstance(spec, Tensor | Real | Whole):
            yield name, torch.from_numpy(np.array(getattr(payload, name)))


def read_captured(folder: RunFolder) -> Iterator[Captured]:
    """The captured payloads of a run, in the order of its merges.

    Raises:
        InputError: the run has none, or a file is damaged.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - runs without captured payloads do without

    paths = sorted(folder.captured.glob("version-*.safetensors"))
    if not paths:
        raise InputError(str(folder.captured), "no captured payloads", "a run with privacy.capture: true")
    for path in paths:
        try:
            tensors = load_aligned(path)
            with safe_open(path, "pt") as file:
                facts = json.loads(file.metadata()["facts"])
            kept = {name: tensors.pop(name) for name in list(tensors) if name.startswith(_STATE)}
            own = {name.removeprefix(_STATE): tensor for name, tensor in kept.items()}
            state, silos = State(tensors.pop(_THETA), own, facts["values"]), dict[str, dict[str, dict[str, Array]]]()
            for key, tensor in tensors.items():
                silo, kind, name = key.split("/")
                silos.setdefault(silo, {}).setdefault(kind, {})[name] = tensor.numpy()
            version = int(path.stem.removeprefix("version-"))
            yield Captured(version, state, silos, dict(facts["base_versions"]), dict(facts["layers"]))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise InputError(str(path), f"{type(error).__name__}: {error}", "a file as the run wrote it") from None
