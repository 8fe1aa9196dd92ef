"""Open the released model of a finished run for inference, from the run folder and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from fedmq.config.resolve import load
from fedmq.config.scenario import Backbone, Objective, Scenario
from fedmq.config.sections import Modality
from fedmq.data.prepared_arrays import Prepared
from fedmq.encoders.base import MODALITIES, Encoder, InputSpec
from fedmq.encoders.select import image_encoder, text_encoder
from fedmq.errors import InputError, RemoteWireError
from fedmq.evaluation.heldout import load_inference
from fedmq.federation.population import Population, device_of
from fedmq.federation.protocol import Encoders, encoders_of
from fedmq.models.build import build
from fedmq.models.two_tower import TwoTower
from fedmq.runs.release import BESIDE, OtherModelError, ReleaseConfig, beside, model_config, parameters, released_config
from fedmq.storage.cache import cache_folder
from fedmq.storage.run_folder import RunFolder, open_run
from fedmq.wire.codec import digest
from fedmq.wire.payloads import Model, Payload


@dataclass(frozen=True)
class Retriever:
    """A model's encoders for retrieval."""

    encoders: Encoders  # encoders of images and texts, with outputs [B, dim]
    binary: bool  # whether the signs of the outputs are hash codes
    dim: int  # width of an embedding, or number of bits of a code


@dataclass(frozen=True)
class PersonalModel:
    """A silo's personal model."""

    silo: str
    digest: str  # SHA-256 (hex) of everything it was built from, including the personal state
    retriever: Retriever


@dataclass(frozen=True)
class ModelFolder:
    """A released model's folder, which is enough to build the model."""

    folder: Path  # with ``config.json`` and ``model.safetensors``
    config: ReleaseConfig  # ``config.json``
    backbone: Backbone  # backbone as in the configuration; a local copy may have other paths of the frozen weights
    objective: Objective  # objective as in the run's scenario
    cache: Path  # folder of shared frozen weights
    device: str  # ``cpu`` or ``cuda:N``

    @property
    def seed(self) -> int:
        """Seed of random frozen weights."""
        return self.config.seed

    @property
    def used(self) -> str:
        """SHA-256 (hex) of the model as the release records it."""
        return self.config.model_digest

    def alone(self, modalities: tuple[Modality, ...] = MODALITIES) -> Retriever:
        """The model's encoders, without its run or its training data; arguments and errors as in :meth:`build`.

        Raises:
            InputError: also if :func:`described` cannot describe it.
        """
        model = self.build(*described(self), modalities)
        return Retriever(encoders_of(model), model.binary, model.dim)

    def build(
        self, inputs: InputSpec, label_names: Sequence[str], modalities: tuple[Modality, ...] = MODALITIES
    ) -> TwoTower:
        """The model with its released parameters, for inputs and labels like those of the data it was trained on.

        Raises:
            OtherModelError: the parameters, or a payload released with them, are not those of the run.
            InputError: the release is damaged or of another model, or the frozen weights are not those of the run.
        """
        if (recorded := self.config.frozen.get("blocks")) is not None:
            from fedmq.encoders.clip_weights import weights_digest  # noqa: PLC0415 - open_clip is slow to import

            self._check_frozen("blocks", (weights_digest(self.backbone, self.seed, self.cache),), recorded)
        model = build(
            self.backbone,
            inputs,
            self.seed,
            objective=self.objective,
            label_names=label_names,
            device=self.device,
            modalities=modalities,
            cache=self.cache,
        )
        path = self.folder / "model.safetensors"
        layout, theta = parameters(path, self.config.layout)
        if not layout.digest == model.layout.digest == self.config.layout_digest:
            others = [entry.name for entry in layout.entries if entry not in model.layout.entries]
            place = ": ".join([str(path), *others[:1]])
            raise InputError(place, "parameters of another model", "the release of this run")
        found_digest = model.layout.model_digest(theta)
        if found_digest != self.config.model_digest:
            raise OtherModelError(path, found_digest, self.config.model_digest)
        more = [self._beside(kind) for kind in BESIDE if kind in self.config.released_with]
        try:
            load_inference(model, (Model(model.layout.digest, theta), *more))
        except RemoteWireError as error:
            raise InputError(str(self.folder), str(error), "the release of this run") from None
        return model

    def encoder(self, modality: Modality) -> Encoder:
        """The frozen encoder of a modality, to encode new texts and images.

        Raises:
            InputError: the model was trained on vectors or bags of words, the encoder is not the one with which it was
                trained, or a package is missing.
        """
        if self.config.texts == "vectors":
            allowed = "a model trained on images and texts, which has encoders for them, or --item KEY of its gallery"
            raise InputError(str(self.folder), "a model of precomputed features", allowed)
        if modality == "text" and self.config.texts == "bag":
            raise InputError(str(self.folder), "a model whose texts are bags of words", "images, or --item KEY")
        make = image_encoder if modality == "image" else text_encoder
        encoder = make(self.backbone, self.seed, self.cache, self.device)
        if (recorded := self.config.frozen.get(modality)) is not None:
            # The coordinator of sites with their own data knows the encoders by what the sites stated.
            self._check_frozen(modality, (encoder.digest, encoder.stated), recorded)
        return encoder

    def _check_frozen(self, what: str, digests: Sequence[str], recorded: str) -> None:
        """Refuse frozen weights of which no digest is the recorded one."""
        if recorded not in digests:
            name, weights = self.backbone.name, self.backbone.pretrained or "its own weights"
            place = f"{self.folder / 'config.json'}: frozen.{what}"
            allowed = f"the encoder the model was trained with ({recorded[:12]}): the same weights and library version"
            shown = " or ".join(digest[:12] for digest in digests)
            raise InputError(place, f"{name} with {weights} ({shown})", allowed)

    def _beside(self, kind: str) -> Payload:
        path, expected = self.folder / f"{kind}.safetensors", self.config.released_with[kind]
        payload = beside(path, kind)
        if digest(payload) != expected:
            raise OtherModelError(path, digest(payload), expected, BESIDE[kind][0])
        return payload


def described(files: ModelFolder) -> tuple[InputSpec, tuple[str, ...]]:
    """The shapes and label names of the data that a model was trained on, without these data.

    Raises:
        InputError: the release's method trains no usable shared model.
    """
    config, place = files.config, str(files.folder / "config.json")
    if config.personal_only:
        allowed = "fedmq search RUN --silo NAME, which rebuilds a silo's personal model"
        raise InputError(place, f"{config.protocol}, which trains the shared model in part or not at all", allowed)
    return InputSpec.of(config.inputs), tuple(config.label_names)


@dataclass(frozen=True)
class Release:
    """A finished run, opened for inference."""

    run: RunFolder
    scenario: Scenario
    files: ModelFolder
    own: PersonalModel | None = None  # the personal model to use instead of the shared model; None uses the shared one
    # In a run on sites' own data the site whose personal model it is, with its data; None without one.
    site: Population | None = None

    @property
    def cache(self) -> Path:
        """Folder of prepared data and shared weights."""
        return self.files.cache

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:N``."""
        return self.files.device

    @property
    def used(self) -> str:
        """SHA-256 (hex) of the model that :meth:`retriever` returns."""
        return self.files.used if self.own is None else self.own.digest

    def retriever(self, prepared: Prepared, modalities: tuple[Modality, ...] = MODALITIES) -> Retriever:
        """The shared model, or the personal model if one is selected; arguments and errors as in :meth:`model`."""
        if self.own is not None:
            return self.own.retriever
        model = self.model(prepared, modalities)
        return Retriever(encoders_of(model), model.binary, model.dim)

    def alone(self, modalities: tuple[Modality, ...] = MODALITIES) -> Retriever:
        """The model without the run's data; arguments and errors as in :meth:`ModelFolder.alone`."""
        return self.files.alone(modalities) if self.own is None else self.own.retriever

    def model(self, prepared: Prepared, modalities: tuple[Modality, ...] = MODALITIES) -> TwoTower:
        """The shared model with its released parameters; ``prepared`` has the shapes and labels of its training data.

        Raises:
            OtherModelError: the parameters, or a payload released with them, are not those of the run.
            InputError: the release is damaged or of another model.
        """
        return self.files.build(prepared.inputs, prepared.label_names, modalities)

    def check_data(self, prepared: Prepared) -> None:
        """Refuse data that have changed since the run.

        Raises:
            InputError: they have other items, labels or splits, or are vectors of another file.
        """
        recorded = self.files.config.data_digest
        if recorded is not None and prepared.content != recorded:
            changed = f"data of other content than the run was made with ({prepared.content[:12]})"
            raise InputError(f"{self.run.root}: the data", changed, f"the data of the run ({recorded[:12]})")

    def encoder(self, modality: Modality) -> Encoder:
        """The frozen encoder of the run's data.

        Raises:
            InputError: as in :meth:`ModelFolder.encoder`.
        """
        return self.files.encoder(modality)


def open_model(folder: Path, device: str | None = None, weights: str | None = None) -> ModelFolder:
    """Open a released model's folder, without its run or its training data, by default on the CPU.

    ``weights`` is the file of the frozen weights, if it is not where the configuration says.

    Raises:
        InputError: it is not such a folder, or its configuration is damaged.
    """
    path, config = folder / "config.json", model_config(folder)
    try:
        backbone = Backbone.model_validate(config.backbone)
        objective = Objective.model_validate(config.objective)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = f"{path}: {'.'.join(map(str, first['loc'])) or 'backbone'}"
        raise InputError(place, str(first["input"]), str(first["msg"])) from None
    if weights is not None:
        backbone = backbone.model_copy(update={"pretrained": weights})
    return ModelFolder(folder, config, backbone, objective, cache_folder(), device_of(device or "cpu"))


def open_release(root: Path, device: str | None = None) -> Release:
    """Open a finished run.

    Raises:
        InputError: it is not the folder of a finished run.
        OtherModelError: the release does not match the digests in the run's summary.
    """
    run = open_run(root)
    config = released_config(run)
    scenario = load(run.scenario)
    place = device_of(device or scenario.device)
    backbone, objective = scenario.backbone, scenario.objective
    files = ModelFolder(run.model, config, backbone, objective, cache_folder(), place)
    return Release(run, scenario, files)
