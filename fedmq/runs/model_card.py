"""The model card of a released model: what it is, how it was trained, how well it retrieves, and its limits."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fedmq.config.scenario import Objective
from fedmq.evaluation.metrics import shown
from fedmq.models.objective_registry import network_of
from fedmq.runs.release import ReleaseConfig
from fedmq.runs.result_limits import gallery_of, meaningful
from fedmq.runs.results import with_own_figures
from fedmq.runs.run_records import RunSummary

_TOWERS = """\
Each tower maps the frozen encoder's vector `x` (float32) of an image or a caption to an embedding:

    for each adapter of the tower:  x = x + {adapter}
    z = head.1(relu(head.0(x)))
    embedding = normalize({sum})

The tensors are `visual.adapters.*` and `visual.head.*` for images, `text.adapters.*` and `text.head.*` for captions;
each layer is `weight @ x + bias`. With `adapter_site: blocks` the adapters follow the blocks of the frozen encoder
instead. Embeddings have {dim} numbers and unit length; cosine similarity ranks them."""
_NETWORK = """\
The network of the base loss `{base}` maps the frozen encoders' vectors to {dim} numbers, of which {ranked}. Its layers
are listed in `config.json` (`layout`); `fedmq.models.hash_networks` computes them."""
_CARD = """\
---
library_name: fedmq
pipeline_tag: feature-extraction
tags: [cross-modal-retrieval, federated-learning]
model-index:
  - name: {scenario}
    results:
      - task: {{type: image-text-retrieval, name: cross-modal retrieval}}
        dataset: {{type: held-out-{split_name}, name: held-out {split_name} split of the training data's own set}}
        metrics:
{measured}
---

# {scenario}: a cross-modal retrieval model trained with {label}

It embeds images and captions in one space, so that one can be retrieved by the other.

| | |
|---|---|
| method | {label} |
| silos | {silos}, {participating} of them contributed |
| rounds | {versions} |
| training items | {samples} in all silos |
| backbone | {backbone} |
| data digest | `{data}` |
| model digest | `{model}` |
| versions | {made} |

## Use

    import fedmq

    model = fedmq.load("this folder")
    images = model.embed_images(["photo.jpg"])
    texts = model.embed_texts(["a red fox"])
    print(images @ texts.T)

It needs this folder and the frozen encoders of the backbone, not the training data. `config.json` records the digests
of the encoders; others are refused.

## Results

On {items} of the training data's own set, after the last round:

{results}{remarks}

## Forward pass

{forward}

## ONNX

{onnx}

## Limits

- It was evaluated only on data like its training data. Results elsewhere are not known.
- It retrieves what resembles the query. It does not verify that an image shows what a text says.
- Training data can leave traces in parameters. `fedmq audit RUN --probe` measures membership inference on the run.

## Licence

None is declared. The licence of the weights depends on the training data and on the frozen encoders; state it here
before you share the model.
"""


def model_card(config: ReleaseConfig, summary: RunSummary, label: str, split: str) -> str:
    """The text of the card (Markdown, with the front matter that model hubs read).

    Args:
        config: configuration of the released model.
        summary: summary of its run.
        label: the method's name for display.
        split: the evaluated split.
    """
    summary = with_own_figures(summary)
    gallery = gallery_of(summary)
    metrics = meaningful(summary.metrics, gallery)
    remarks = [] if gallery is None else gallery.remarks(summary.metrics)
    samples = sum(silo.samples for silo in summary.per_silo.values())
    contributed = sum(bool(silo.participations) for silo in summary.per_silo.values())
    name, weights = config.backbone.get("name"), config.backbone.get("pretrained")
    made = ", ".join(f"{what} {version}" for what, version in summary.versions_of.items())
    return _CARD.format(
        scenario=summary.scenario,
        label=label,
        silos=len(summary.per_silo),
        participating=contributed,
        versions=summary.versions,
        samples=f"{samples:,}",
        backbone=f"{name}, weights {weights}" if weights else name,
        data=config.data_digest,
        model=config.model_digest,
        made=made,
        items=f"the held-out {split} split" + ("" if gallery is None else f" ({gallery.items})"),
        remarks="".join(f"\n\n{each[0].upper()}{each[1:]}." for each in remarks),
        split_name=split,
        measured="\n".join(_measured(metrics)),
        results=_results(metrics),
        forward=_forward(config),
        onnx=onnx_contents(config),
    )


def onnx_contents(config: ReleaseConfig) -> str:
    """What the files of ``fedmq export --onnx`` hold of a model, and what their inputs are, as two sentences."""
    if config.backbone.get("adapter_site") == "blocks":
        return (
            "image.onnx and text.onnx of `fedmq export --onnx` hold the whole model, the frozen encoder included. "
            "Their inputs are pixels and token ids."
        )
    name = config.backbone.get("name")
    if name == "features":
        made = (
            "Their inputs are feature vectors like those of the training data; fedmq has no program that computes them."
        )
    else:
        made = f"Their inputs are the vectors of the frozen encoder {name}: it must run before them."
    return f"image.onnx and text.onnx of `fedmq export --onnx` hold the trained part only. {made}"


def _measured(metrics: Mapping[str, float]) -> list[str]:
    """Lines of the front matter, one per metric."""
    lines = []
    for metric in shown(metrics):
        about = {"type": metric.name, "name": metric.title, "value": round(metrics[metric.name], 6)}
        lines.append(f"          - {json.dumps(about)}")
    return lines


def _results(metrics: Mapping[str, float]) -> str:
    rows = [f"| {metric.title} | {metrics[metric.name]:.4f} |" for metric in shown(metrics)]
    return "\n".join(["| metric | value |", "|---|---|", *rows])


def _forward(config: ReleaseConfig) -> str:
    objective, backbone = config.objective, config.backbone
    network = network_of(Objective.model_validate(objective))
    if network is not None:
        ranked = "the signs are the hash code" if objective.get("bits") else "cosine similarity ranks them"
        return _NETWORK.format(base=objective.get("base"), dim=config.dim, ranked=ranked)
    plain = backbone.get("adapter") == "bottleneck"
    shared = f"{backbone.get('adapter_scale')} * up(relu(shared(relu(down(x)))))"
    return _TOWERS.format(
        adapter="up(gelu(down(x)))" if plain else shared,
        sum="x + z" if backbone.get("head") == "residual" else "z",
        dim=config.dim,
    )
