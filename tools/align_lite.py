"""Train the ``lite`` backbone's alignment heads on openly licensed drawings other than OpenMoji.

    python tools/align_lite.py fetch  CACHE             npm pack the sets below into CACHE (the only step with network)
    python tools/align_lite.py words  CACHE             write fedmq/data/readers/openmoji_words.tsv
    python tools/align_lite.py features CACHE           render and encode every drawing (about 10 minutes on 2 cores)
    python tools/align_lite.py train  CACHE [--without-concepts test]   write fedmq/encoders/lite_heads.safetensors

Drawings, rendered unchanged (plain), with an added black outline as in OpenMoji's style (outlined), or both:

    npm package                              version  licence      by                     used
    @iconify-json/twemoji                    1.2.5    CC-BY-4.0    Twitter                emoji, both
    @iconify-json/noto                       1.2.9    Apache-2.0   Google                 emoji, both
    @iconify-json/noto-v1                    1.2.5    Apache-2.0   Google                 emoji, outlined
    @iconify-json/fluent-emoji-flat          1.2.6    MIT          Microsoft              emoji, both
    @iconify-json/emojione                   1.2.3    CC-BY-4.0    Emoji One              emoji, outlined
    @iconify-json/fxemoji                    1.2.2    Apache-2.0   Mozilla                emoji, outlined
    @iconify-json/streamline-emojis          1.2.4    CC-BY-4.0    Streamline             emoji, plain
    @iconify-json/icon-park                  1.2.4    Apache-2.0   ByteDance              icons, plain
    @iconify-json/flat-color-icons           1.2.3    MIT          Icons8                 icons, plain
    @iconify-json/streamline-ultimate-color  1.2.2    CC-BY-4.0    Streamline             icons, plain

Words:

    emojibase-data                           17.0.0   MIT          Miles Johnson; keywords: Unicode CLDR (Unicode-3.0)
    emojilib                                 4.0.3    MIT          Mu-An Chiou

OpenMoji's drawings are not read. The sets share concepts and names with OpenMoji, as all draw Unicode's emoji;
``--without-concepts test`` excludes the concepts of its test split from training, to measure the effect with
``fedmq compare --zero-shot``.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import resvg_py
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fedmq import seeds
from fedmq.data.readers import openmoji
from fedmq.encoders import lite

EMOJI_SETS = {
    "twemoji": "1.2.5",
    "noto": "1.2.9",
    "noto-v1": "1.2.5",
    "fluent-emoji-flat": "1.2.6",
    "emojione": "1.2.3",
    "fxemoji": "1.2.2",
    "streamline-emojis": "1.2.4",
}
ICON_SETS = {"icon-park": "1.2.4", "flat-color-icons": "1.2.3", "streamline-ultimate-color": "1.2.2"}
WORD_SETS = {"emojibase-data": "17.0.0", "emojilib": "4.0.3"}
PLAIN = ("twemoji", "noto", "fluent-emoji-flat", "streamline-emojis", *ICON_SETS)
OUTLINED = tuple(name for name in EMOJI_SETS if name != "streamline-emojis")  # already outlined
CODED = ("noto", "twemoji", "fluent-emoji-flat")  # their chars.json lists code points; the others' lists font slots
HAIR = {"1F9B0", "1F9B1", "1F9B2", "1F9B3"}
SHORTCODES = ("joypixels", "iamcal", "github", "emojibase", "cldr")


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of training."""

    members: int = 2  # heads trained from different seeds; their outputs are concatenated
    components: int = 1024  # principal components of the image features in training; afterwards part of the heads
    whiten: float = 0.0  # power of the components' standard deviations that divides them; 0 keeps them, 1 whitens them
    rank: int = 160  # width to which image features are reduced
    hidden: int = 384  # width of the hidden layer
    epochs: int = 12  # passes over the drawings
    batch: int = 512  # drawings per step, each with one text
    learning_rate: float = 2e-3  # peak of a one-cycle schedule
    decay: float = 0.05  # AdamW's weight decay
    drop: float = 0.3  # dropout on image features
    drop_hidden: float = 0.2  # dropout on the hidden layers
    mix: float = 0.5  # largest fraction of another drawing of the same concept mixed into the features
    among_images: float = 0.3  # weight of the image-image term
    average: float = 0.98  # decay of the moving average of the weights, which is the result


# --- sets -----------------------------------------------------------------------------------------------------------


def fetch(cache: Path) -> None:
    """Download the packages with npm and unpack them under ``cache/npm``."""
    wanted = {f"@iconify-json/{name}": version for name, version in {**EMOJI_SETS, **ICON_SETS}.items()} | WORD_SETS
    for name, version in wanted.items():
        folder = cache / "npm" / name.split("/")[-1]
        if folder.is_dir():
            continue
        packed = subprocess.run(
            ["npm", "pack", f"{name}@{version}", "--silent"], cwd=cache, capture_output=True, text=True, check=True
        )
        with tarfile.open(cache / packed.stdout.split()[-1]) as archive:
            archive.extractall(cache / "unpacked", filter="data")
        folder.parent.mkdir(exist_ok=True)
        (cache / "unpacked" / "package").rename(folder)
        print(f"{name} {version}")


def read_json(cache: Path, package: str, path: str) -> Any:
    return json.loads((cache / "npm" / package / path).read_text(encoding="utf-8"))


def bare(points: str) -> str:
    """The key of a concept: code points without presentation selectors."""
    return "-".join(point for point in points.upper().split("-") if point != "FE0F")


def concepts(cache: Path) -> dict[str, dict[str, Any]]:
    """Unicode's emoji without flags, components, skin tones and hair, by ``bare`` code points."""
    groups = {
        group["order"]: group["key"] for group in read_json(cache, "emojibase-data", "en/messages.json")["groups"]
    }
    return {
        bare(entry["hexcode"]): entry
        for entry in read_json(cache, "emojibase-data", "en/data.json")
        if groups.get(entry.get("group"), "flags") not in {"flags", "component"}
        and not set(entry["hexcode"].split("-")) & HAIR
    }


def words(cache: Path) -> None:
    """Write the table that ``fedmq.data.readers.openmoji`` reads."""
    messages = read_json(cache, "emojibase-data", "en/messages.json")
    groups = {group["order"]: group["key"] for group in messages["groups"]}
    subgroups = {group["order"]: group["key"] for group in messages["subgroups"]}
    drawn = {path.stem for path in openmoji._folder().glob("*.svg")}
    lines = []
    for concept, entry in concepts(cache).items():
        key = next(key for key in (entry["hexcode"], concept) if key in drawn)
        keywords = "|".join(entry["tags"]).replace("’", "'")
        lines.append(f"{key}\t{groups[entry['group']]}\t{subgroups[entry['subgroup']]}\t{keywords}\n")
    table = Path(openmoji.__file__).with_name("openmoji_words.tsv")
    head = [line for line in table.read_text(encoding="utf-8").splitlines(keepends=True) if line.startswith("#")]
    table.write_text("".join([*head, *sorted(lines)]), encoding="utf-8")


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower().replace("’", "").replace("'", ""))


def shortcodes(cache: Path) -> Iterator[tuple[str, str]]:
    for source in SHORTCODES:
        for points, codes in read_json(cache, "emojibase-data", f"en/shortcodes/{source}.json").items():
            for code in [codes] if isinstance(codes, str) else codes:
                yield bare(points), code


def by_slug(cache: Path, known: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Concepts by the names that the sets of drawings use."""
    found: dict[str, str] = {}
    for name in CODED:
        for points, label in read_json(cache, name, "chars.json").items():
            found.setdefault(slug(label), bare(points))
    for concept, entry in known.items():
        found.setdefault(slug(entry["label"]), concept)
    for concept, code in shortcodes(cache):
        found.setdefault(slug(code), concept)
    return {name: concept for name, concept in found.items() if concept in known}


def names_in(cache: Path, name: str, slugs: dict[str, str]) -> list[tuple[str, str]]:
    """(concept, drawing's name) pairs of a set; each icon is a separate concept ``"set/name"``."""
    icons = read_json(cache, name, "icons.json")
    if name in ICON_SETS:
        return [(f"{name}/{icon}", icon) for icon in sorted(icons["icons"]) if not icons["icons"][icon].get("hidden")]
    found: dict[str, str] = {}
    if name in CODED:
        aliases = icons.get("aliases", {})
        for points, label in read_json(cache, name, "chars.json").items():
            while label in aliases and label not in icons["icons"]:
                label = aliases[label]["parent"]  # noqa: PLW2901 - follows a chain
            if bare(points) in slugs.values() and label in icons["icons"]:
                found.setdefault(bare(points), label)
    else:
        for label in icons["icons"]:
            concept = slugs.get(slug(label)) or slugs.get(slug(re.sub(r"-\d$", "", label)))
            if concept:
                found.setdefault(concept, label)
    return sorted(found.items())


def draw(icons: dict[str, Any], name: str, outlined: bool) -> np.ndarray:
    """One drawing as uint8 [224, 224, 3] on white; blank if resvg cannot render it."""
    icon = icons["icons"][name]
    left, top, width, height = (
        icon.get(side, icons.get(side, default))
        for side, default in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
    )
    style, size = None, f'width="{width}" height="{height}"'
    if outlined:
        # A stroke with OpenMoji's width (2 of 72), and a margin for it.
        style = f"path,circle,ellipse,rect,polygon{{stroke:#000;stroke-width:{width * 0.025};stroke-linejoin:round}}"
        margin = width * 0.04
        left, top, width, height = left - margin, top - margin, width + 2 * margin, height + 2 * margin
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{left} {top} {width} {height}" {size}>{icon["body"].replace("currentColor", "black")}</svg>'
    )
    try:
        png = resvg_py.svg_to_bytes(
            svg_string=svg, width=224, height=224, background="white", skip_system_fonts=True, style_sheet=style
        )
    except ValueError:
        return np.full((224, 224, 3), 255, np.uint8)
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def features(cache: Path) -> None:
    """Encode all drawings of all sets, plain and outlined, into ``cache/features/SET.STYLE.npz``."""
    folder = cache / "features"
    folder.mkdir(exist_ok=True)
    slugs = by_slug(cache, concepts(cache))
    looks = [(name, False) for name in PLAIN] + [(name, True) for name in OUTLINED]
    for name, outlined in looks:
        path = folder / f"{name}.{'outlined' if outlined else 'plain'}.npz"
        if path.exists():
            continue
        start, icons, rows = time.monotonic(), read_json(cache, name, "icons.json"), names_in(cache, name, slugs)
        found = lite.image_features(draw(icons, icon, outlined) for _, icon in rows)
        with path.open("wb") as file:
            np.savez(file, features=found.astype(np.float16), concepts=np.array([concept for concept, _ in rows]))
        print(f"{path.name}: {len(rows)} drawings, {time.monotonic() - start:.0f} s", flush=True)


# --- texts ----------------------------------------------------------------------------------------------------------


def emoji_texts(concept: str, entry: dict[str, Any], codes: Sequence[str], more: Sequence[str], kind: str) -> list[str]:
    """Names, aliases and random subsets of the keywords."""
    random = seeds.numpy_generator(0, "align-lite", concept)
    name = entry["label"].replace("’", "'")
    named = set(re.findall(r"\w+", name.lower()))
    keywords = [
        word
        for word in dict.fromkeys([*(tag.replace("’", "'") for tag in entry["tags"]), *more])
        if not set(re.findall(r"\w+", word.lower())) <= named
    ]
    found = [name, f"an image of {name}", *[code for code in dict.fromkeys(codes) if code.lower() != name.lower()][:3]]
    shapes: tuple[Callable[[str], str], ...] = (
        str,
        lambda some: f"{name}: {some}",
        lambda some: f"{kind}: {some}",
        lambda some: f"{name}, for {some}",
        str,
        lambda some: some.replace(", ", " and "),
    )
    for shape in shapes if keywords else ():
        found.append(shape(", ".join(random.permutation(keywords)[: random.integers(1, 6)])))
    return list(dict.fromkeys(found))


def all_texts(cache: Path, wanted: set[str]) -> list[tuple[str, str]]:
    """(concept, text) pairs of the wanted concepts."""
    known = concepts(cache)
    library = read_json(cache, "emojilib", "dist/emoji-en-US.json")
    more = {bare("-".join(f"{ord(point):X}" for point in emoji)): found for emoji, found in library.items()}
    codes: dict[str, list[str]] = {}
    for concept, code in shortcodes(cache):
        codes.setdefault(concept, []).append(code.replace("_", " "))
    subgroups = read_json(cache, "emojibase-data", "en/messages.json")["subgroups"]
    kinds = {group["order"]: group["key"].replace("-", " ") for group in subgroups}
    found = []
    for concept in sorted(wanted):
        if "/" in concept:
            name = re.sub(r"(-\d+)+$", "", concept.split("/")[1]).replace("-", " ")
            texts = [name, f"an image of {name}"]
        else:
            entry, extra = known[concept], [word.replace("_", " ") for word in more.get(concept, ())]
            texts = emoji_texts(concept, entry, codes.get(concept, ()), extra, kinds[entry["subgroup"]])
        found += [(concept, text) for text in texts]
    return found


# --- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """Training data."""

    images: Tensor  # float [n, features]
    image_of: Tensor  # int64 [n], concept of each drawing
    texts: Tensor  # float32 [m, features]
    text_of: Tensor  # int64 [m], concept of each text


def load_pairs(cache: Path, without: set[str]) -> Pairs:
    """All cached drawings and their texts, except the concepts in ``without``."""
    found, of = [], []
    for path in sorted((cache / "features").glob("*.npz")):
        with np.load(path, allow_pickle=False) as file:
            kept = [i for i, concept in enumerate(file["concepts"]) if str(concept) not in without]
            found.append(file["features"][kept])
            of += [str(file["concepts"][i]) for i in kept]
    number = {concept: i for i, concept in enumerate(sorted(set(of)))}
    texts = all_texts(cache, set(of))
    return Pairs(
        torch.from_numpy(np.concatenate(found)),
        torch.tensor([number[concept] for concept in of]),
        torch.from_numpy(cached_texts(cache, [text for _, text in texts])),
        torch.tensor([number[concept] for concept, _ in texts]),
    )


def cached_texts(cache: Path, texts: list[str]) -> np.ndarray:
    path = cache / f"texts-{hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]}.npy"
    if not path.exists():
        np.save(path, lite.text_features(texts))
    found: np.ndarray = np.load(path, allow_pickle=False)
    return found


class Head(nn.Module):
    """Optional reduction, then a linear path plus one hidden layer, as in ``lite._member``."""

    def __init__(self, inputs: int, rank: int, hidden: int, width: int, drops: tuple[float, float]) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank) if rank else None
        self.skip = nn.Linear(rank or inputs, width)
        self.up = nn.Linear(rank or inputs, hidden)
        self.out = nn.Linear(hidden, width, bias=False)
        self.drops = drops

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, self.drops[0], self.training)
        x = self.down(x) if self.down else x
        hidden = functional.dropout(functional.gelu(self.up(x)), self.drops[1], self.training)
        return functional.normalize(self.skip(x) + self.out(hidden), dim=1)


@dataclass(frozen=True)
class Basis:
    """An affine change of coordinates, ``(x - mean) @ matrix``: mean float32 [n], matrix float32 [n, components]."""

    mean: Tensor
    matrix: Tensor


def principal(features: Tensor, components: int, whiten: float) -> Basis:
    """The leading principal components of standardised features, scaled to a mean variance of one.

    Args:
        features: float32 [n, m].
        components: number of components; at most 3,000, the number of drawings they are computed from.
        whiten: see :class:`Recipe`.
    """
    mean, spread = features.mean(0), features.std(0)
    spread = spread + 0.01 * spread.mean()
    some = ((features[:: -(-len(features) // 3000)] - mean) / spread).contiguous()
    # Via the Gram matrix of the drawings, of which there are fewer than features.
    variance, vectors = torch.linalg.eigh(some @ some.T / len(some))
    variance, vectors = variance[-components:].clamp(min=1e-6), vectors[:, -components:]
    matrix = some.T @ (vectors / (variance * len(some)).sqrt() / variance.pow(whiten / 2))
    matrix = matrix / variance.pow(1 - whiten).mean().sqrt()
    return Basis(mean, matrix / spread[:, None])


def centred(features: Tensor) -> Basis:
    """The basis that centres features and scales them to a mean variance of one."""
    return Basis(features.mean(0), torch.eye(features.shape[1]) / features.std(0).pow(2).mean().sqrt())


def contrast(scores: Tensor, same: Tensor) -> Tensor:
    """InfoNCE over rows with all items of the row's concept as positives."""
    return -(scores.log_softmax(1) * same).sum(1).div(same.sum(1)).mean()


class Picker:
    """Draws a random item of each given concept."""

    def __init__(self, of: Tensor, count: int, generator: torch.Generator) -> None:
        self.order = torch.argsort(of, stable=True)
        self.sizes = torch.bincount(of, minlength=count)
        self.starts = self.sizes.cumsum(0) - self.sizes
        self.generator = generator

    def __call__(self, concept: Tensor) -> Tensor:
        place = (torch.rand(len(concept), generator=self.generator) * self.sizes[concept]).long()
        return self.order[self.starts[concept] + place]


@torch.random.fork_rng(devices=[])
def train_member(pairs: Pairs, recipe: Recipe, member: int) -> tuple[Head, Head]:
    """One pair of heads (image, text), with weights averaged over the last steps."""
    torch.manual_seed(seeds.derive(0, "align-lite", "member", member))  # for initial weights and dropout
    random = seeds.torch_generator(0, "align-lite", "batches", member)
    images, width = pairs.images, lite.DIM // recipe.members
    image = Head(images.shape[1], recipe.rank, recipe.hidden, width, (recipe.drop, recipe.drop_hidden))
    text = Head(pairs.texts.shape[1], 0, recipe.hidden, width, (0.1, recipe.drop_hidden))
    scale = nn.Parameter(torch.tensor(3.0))
    weights = [*image.parameters(), *text.parameters()]
    groups = [{"params": weights, "weight_decay": recipe.decay}, {"params": [scale], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate)
    steps = recipe.epochs * (len(images) // recipe.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=steps, pct_start=0.1)
    count = int(pairs.image_of.max()) + 1
    image, caption = Picker(pairs.image_of, count, random), Picker(pairs.text_of, count, random)
    mean = [weight.detach().clone() for weight in weights]
    for step in range(steps):
        if step % (len(images) // recipe.batch) == 0:
            order = torch.randperm(len(images), generator=random).split(recipe.batch)
        batch = order[step % (len(images) // recipe.batch)]
        concept = pairs.image_of[batch]
        share = torch.rand(len(batch), 1, generator=random) * recipe.mix
        seen = image(images[batch] * (1 - share) + images[image(concept)] * share)
        read, again = text(pairs.texts[caption(concept)]), image(images[image(concept)])
        same, heat = (concept[:, None] == concept).float(), scale.exp().clamp(max=100)
        scores = heat * seen @ read.T
        loss = (contrast(scores, same) + contrast(scores.T, same)) / 2
        loss = loss + recipe.among_images * contrast(heat * seen @ again.T, same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for kept, weight in zip(mean, weights, strict=True):
                kept.lerp_(weight, 1 - min(recipe.average, (step + 1) / (step + 11)))
    with torch.no_grad():
        for kept, weight in zip(mean, weights, strict=True):
            weight.copy_(kept)
    return image.eval(), text.eval()


@torch.no_grad()
def pack(heads: Sequence[tuple[Head, Head]], bases: tuple[Basis, Basis]) -> dict[str, Tensor]:
    """Fold the bases (image, text) into the first layers and store matrices as int8 with one scale per row."""
    packed: dict[str, Tensor] = {}
    for member, pair in enumerate(heads):
        for tower, head, basis in zip(("image", "text"), pair, bases, strict=True):
            layers = {"skip": head.skip, "up": head.up, "out": head.out} | ({"down": head.down} if head.down else {})
            for name, layer in layers.items():
                weight, bias = layer.weight, layer.bias
                if name == "down" or (name in {"skip", "up"} and not head.down):
                    weight = weight @ basis.matrix.T
                    bias = bias - weight @ basis.mean
                scale = weight.abs().amax(1).clamp(min=1e-12) / 127
                at = f"{tower}.{member}.{name}"
                packed[f"{at}.weight"] = (weight / scale[:, None]).round().to(torch.int8).contiguous()
                packed[f"{at}.weight.scale"] = scale.clone()
                if bias is not None:
                    packed[f"{at}.bias"] = bias.detach().clone()
    return packed


def train(cache: Path, recipe: Recipe, without: set[str], output: Path) -> None:
    """Train all members and write the packed heads."""
    pairs, start = load_pairs(cache, without), time.monotonic()
    print(
        f"{len(pairs.images)} drawings of {int(pairs.image_of.max()) + 1} concepts, {len(pairs.texts)} texts",
        flush=True,
    )
    images = pairs.images.float()
    bases = principal(images, recipe.components, recipe.whiten), centred(pairs.texts)
    changed = [(raw - basis.mean) @ basis.matrix for raw, basis in zip((images, pairs.texts), bases, strict=True)]
    pairs = Pairs(changed[0], pairs.image_of, changed[1], pairs.text_of)
    print(f"principal components: {time.monotonic() - start:.0f} s", flush=True)
    heads = []
    for member in range(recipe.members):
        heads.append(train_member(pairs, recipe, member))
        print(f"member {member}: {time.monotonic() - start:.0f} s", flush=True)
    save_file(pack(heads, bases), output, metadata={"recipe": repr(recipe)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["fetch", "words", "features", "train"])
    parser.add_argument("cache", type=Path)
    parser.add_argument("--heads", type=Path, default=lite.HEADS)
    parser.add_argument("--without-concepts", choices=["val", "test"])
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of Recipe")
    arguments = parser.parse_args()
    cache: Path = arguments.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(2)
    match arguments.step:
        case "fetch":
            fetch(cache)
        case "words":
            words(cache)
        case "features":
            features(cache)
        case _:
            items = openmoji.load_items() if arguments.without_concepts else []
            without = {bare(item.key) for item in items if item.split == arguments.without_concepts}
            changes = {
                name: json.loads(value) for name, _, value in (change.partition("=") for change in arguments.set)
            }
            train(cache, dataclasses.replace(Recipe(), **changes), without, arguments.heads)


if __name__ == "__main__":
    main()
