"""The data of galleries: what ``--gallery`` names, checked against the agreement of a run on sites' own data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fedmq.config.resolve import load
from fedmq.config.scenario import Backbone, Data
from fedmq.config.site import Site, read_site
from fedmq.config.yaml_files import read_yaml
from fedmq.data.prepare import prepare
from fedmq.data.prepared_arrays import Prepared
from fedmq.encoders.image_sets import files_below
from fedmq.encoders.images import IMAGE_ENDINGS
from fedmq.errors import InputError
from fedmq.federation.agreement import difference, format_of, spread, unknown_name
from fedmq.retrieval.released_model import Release
from fedmq.runs.data_records import AgreementRecord
from fedmq.storage.json_files import read_json
from fedmq.text import Progress

_FEATURES: Final = (".npz", ".safetensors")
ALLOWED: Final = (
    "a folder of images, a scenario or site file (YAML) for its data, or with backbone features a features file "
    f"({', '.join(_FEATURES)})"
)
#: What to name for a run whose data only the sites have.
NO_DATA_SET: Final = f"{ALLOWED}: with partition.kind own only the sites have data"


def data_in(file: Path) -> Data:
    """The data of a scenario, a site file or a features file.

    Args:
        file: value of ``--gallery``.

    Raises:
        InputError: there is no such file, or it is invalid or has no data.
    """
    if not file.is_file():
        raise InputError(f"--gallery {file}", "no such file or folder", ALLOWED)
    if file.suffix.lower() in _FEATURES:
        return Data(name="features", path=file.absolute())
    # A site file may have the same keys as a scenario of nothing but data; its paths start at its own folder.
    site = read_yaml(file).keys() <= Site.model_fields.keys()
    data = read_site(file).data if site else load(file).data
    if data is None:
        raise InputError(f"--gallery {file}", f"a {'site file' if site else 'scenario'} without data", ALLOWED)
    return data


def caption_texts(data: Data, backbone: Backbone, keys: Sequence[str]) -> list[list[str]]:
    """Captions of each item as text; empty if the data set has vectors only, as with backbone ``features``."""
    known: dict[str, Sequence[str]] = {}
    if backbone.name != "features":
        from fedmq.data import catalogue  # noqa: PLC0415 - loaders need optional packages

        raw = catalogue.find(data.name).read(data)
        known = dict(zip(raw.keys, raw.captions, strict=True))
    return [list(known.get(key, ())) for key in keys]


def images_below(folder: Path, place: str) -> list[Path]:
    """The image files below a folder, in the order of their paths.

    Args:
        folder: folder to search; links to folders are followed.
        place: the option or argument that names it, for the error.

    Raises:
        InputError: there are none.
    """
    files = sorted(path for path in files_below(folder) if path.suffix.lower() in IMAGE_ENDINGS)
    if not files:
        raise InputError(f"{place} {folder}", "no image", f"a folder with {', '.join(sorted(IMAGE_ENDINGS))}")
    return files


def chosen_for_sites(release: Release, chosen: Path | None) -> Path:
    """The value of ``--gallery`` for a run whose data only the sites have.

    Raises:
        InputError: nothing was chosen, or a folder of images for a model of features.
    """
    if chosen is None:
        raise InputError("--gallery", "nothing", NO_DATA_SET)
    if chosen.is_dir() and release.scenario.backbone.name == "features":
        allowed = f"a features file ({', '.join(_FEATURES)}), or a scenario or site file (YAML) for its data"
        raise InputError(f"--gallery {chosen}", "a folder, for a model that was trained on features", allowed)
    return chosen


def site_gallery(
    release: Release, chosen: Path, progress: Progress | None
) -> tuple[Data, Prepared, Callable[[npt.NDArray[Any]], npt.NDArray[Any]]]:
    """Prepare the data that a user chose for a run whose data only the sites have.

    Returns:
        The data, their arrays, and a function of rows of captions [n, ...] that gives them as the model reads them: the
        counts of bags of words in the order on which the sites agreed.

    Args:
        release: the run.
        chosen: scenario, site file or features file.
        progress: called while features are extracted.

    Raises:
        InputError: the data are invalid, have no images, or do not fit the agreement.
    """
    scenario, place, data = release.scenario, f"--gallery {chosen}", data_in(chosen)
    record = read_json(release.run.agreement, AgreementRecord, "what the sites of a run agreed on")
    if record.agreed is None:
        raise InputError(str(release.run.agreement), "no agreed format", "the agreement of a run on sites' own data")
    agreed = record.agreed.payload()
    prepared = prepare(data, scenario.backbone, release.cache, scenario.seed, progress, release.device)
    present = np.asarray(prepared.present)
    image, text = bool(present[:, 0].any()), bool(present[:, 1].any())
    if not image:
        raise InputError(place, "data without images", "data with images")
    # Labels are not encoded, so they may differ.
    held = replace(format_of(prepared, image=image, text=text), label_names=())
    wrong = difference("the gallery", held, "the run", agreed) or unknown_name("the gallery", held, agreed)
    if wrong is not None:
        raise InputError(place, wrong, "data with the widths, encoders and words on which the sites agreed")

    def captions(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        words, wanted = prepared.vocabulary, agreed.vocabulary
        return rows if words == wanted else spread(torch.from_numpy(np.array(rows)), len(rows), words, wanted).numpy()

    return data, prepared, captions
