"""open_clip models as frozen backbones: adapters in every block, shared weights, no downloads, clear errors."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from PIL import Image

from fedmq.config.scenario import Backbone, Training
from fedmq.config.sections import Modality
from fedmq.encoders.base import InputSpec
from fedmq.encoders.select import image_encoder
from fedmq.errors import InputError, RunError
from fedmq.federation.population import device_of
from fedmq.models.build import build
from fedmq.models.optimiser import optimiser
from fedmq.models.two_tower import TwoTower
from fedmq.storage.cache import key_of
from tests.gradients import gradient_of

if TYPE_CHECKING:
    import open_clip

    from fedmq.encoders import clip, clip_weights
    from fedmq.models import clip_two_tower

pytestmark = pytest.mark.slow

TINY = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 3, "width": 64, "head_width": 32, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
PIXELS = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import what takes seconds for these tests only, not in each process that collects them."""
    for name in ("open_clip", "fedmq.encoders.clip", "fedmq.encoders.clip_weights", "fedmq.models.clip_two_tower"):
        globals()[name.rpartition(".")[2]] = import_module(name)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def backbone(tiny: Path, **changes: Any) -> Backbone:
    chosen = {"name": str(tiny), "adapter_site": "blocks", "head": "mlp", "bottleneck": 8, **changes}
    return Backbone(**chosen)


def spec(found: clip_weights.Weights) -> InputSpec:
    return InputSpec((3, 32, 32), (77,), "uint8", "int32", found.mean, found.std)


def make(tiny: Path, cache: Path, modalities: tuple[Modality, ...] = ("image", "text"), **changes: Any) -> TwoTower:
    chosen = backbone(tiny, **changes)
    return build(chosen, spec(clip_weights.weights(chosen, 0, cache)), 0, modalities=modalities, cache=cache)


def captions(tiny: Path) -> torch.Tensor:
    return torch.from_numpy(clip.tokenise(str(tiny), ["a dog", "two cats on a mat", "a red car"]))


def reference(
    tiny: Path, cache: Path, changes: Mapping[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """open_clip's own encoders with the same weights, and with changes of some of them."""
    found = clip_weights.weights(backbone(tiny), 0, cache)
    model = open_clip.model.CLIP(**TINY).eval()
    state: dict[str, torch.Tensor] = {}
    for modality in ("image", "text"):
        state |= safetensors.torch.load_file(found.folder / f"{modality}.safetensors")
    # The causal mask is in the files: no state dict holds it and a module on the meta device cannot compute it.
    state |= {name: state[name] + change for name, change in (changes or {}).items()}
    result = model.load_state_dict(state, strict=False)
    assert result.unexpected_keys == ["attn_mask"]
    assert result.missing_keys == ["logit_scale"]
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (found.mean, found.std))
    with torch.no_grad():
        return model.encode_image((PIXELS / 255 - mean) / std), model.encode_text(captions(tiny).long())


def test_the_papers_model_has_its_3_033_600_trainable_parameters() -> None:
    model = clip_two_tower.adapted(Backbone(name="ViT-B-32", adapter_site="blocks", head="mlp"))
    assert model.flat.numel() == 3_033_600
    adapters = sum(entry.size for entry in model.layout.entries if ".adapters." in entry.name)
    assert (adapters, model.dim) == (1_982_976, 512)


def test_a_silo_trains_the_papers_model_with_image_weights_alone(tmp_path: Path) -> None:
    chosen = Backbone(name="ViT-B-32", adapter_site="blocks", head="mlp")
    inputs = InputSpec((3, 224, 224), (77,), "uint8", "int32", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    model = build(chosen, inputs, 0, modalities=("image",), cache=tmp_path)
    assert model.flat.numel() == 3_033_600
    model.image(torch.zeros(1, 3, 224, 224, dtype=torch.uint8)).sum().backward()
    assert gradient_of(model)[model.branch("image")].any()
    assert not gradient_of(model)[model.branch("text")].any()


@pytest.mark.parametrize("adapter", ["bottleneck", "lora"])
def test_with_zero_adapters_and_heads_the_model_is_the_frozen_clip(tiny: Path, cache: Path, adapter: str) -> None:
    model = make(tiny, cache, head="residual", adapter_std=0.0, head_std=0.0, adapter=adapter)
    image, text = reference(tiny, cache)
    assert torch.allclose(model.image(PIXELS), F.normalize(image, dim=-1), atol=1e-5)
    assert torch.allclose(model.caption(captions(tiny)), F.normalize(text, dim=-1), atol=1e-5)


def test_an_adapter_follows_every_block_as_in_the_paper(tiny: Path, cache: Path) -> None:
    model = make(tiny, cache, adapter_std=0.3)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    assert model.visual.frozen is not None
    blocks, _ = clip.blocks_of(model.visual.frozen.tower, "tiny")
    assert len(blocks) == 3
    for block in blocks:
        plain: list[torch.Tensor] = []
        original = block.forward

        def forward(
            x: torch.Tensor, *, _of: Any = original, _to: list[torch.Tensor] = plain, **more: Any
        ) -> torch.Tensor:
            _to.append(_of(x, **more))
            return _to[-1]

        block.forward = forward  # type: ignore[method-assign]
        block.register_forward_hook(lambda _m, _i, out, _p=plain: seen.append((_p[-1], out)))
    with torch.no_grad():
        model.image(PIXELS)
    assert len(seen) == 3
    for index, (x, adapted) in enumerate(seen):
        at = f"visual.adapters.{index:02d}"
        hidden = F.gelu(x @ parameters[f"{at}.down.weight"].T + parameters[f"{at}.down.bias"])
        wanted = x + hidden @ parameters[f"{at}.up.weight"].T + parameters[f"{at}.up.bias"]
        assert torch.allclose(adapted, wanted, atol=1e-5)


def test_low_rank_adapters_change_the_weights_of_queries_and_values(tiny: Path, cache: Path) -> None:
    model = make(tiny, cache, head="residual", head_std=0.0, adapter="lora", adapter_scale=2.0)
    assert not any(view.any() for name, view in model.named_parameters() if ".up." in name)
    model.load(torch.randn(model.flat.shape, generator=torch.Generator().manual_seed(3)) / 8)
    for place in model.layout.ranges(entry.name for entry in model.layout.entries if ".head." in entry.name):
        model.flat.detach()[place] = 0.0
    held = {name: value.detach() for name, value in model.named_parameters() if ".adapters." in name}
    changes = {}
    for tower, blocks in (("visual.", 3), ("text.", 2)):
        for i in range(blocks):
            q, v = (held[f"{tower}adapters.{i:02d}.{of}.up.weight"] @ held[f"{tower}adapters.{i:02d}.{of}.down.weight"]
                    for of in ("query", "value"))  # fmt: skip
            name = f"{tower.replace('text.', '')}transformer.resblocks.{i}.attn.in_proj_weight"
            changes[name] = 2 * torch.cat([q, 0 * q, v])
    image, text = reference(tiny, cache, changes)
    for found, wanted, plain in zip(
        (model.image(PIXELS), model.caption(captions(tiny))), (image, text), reference(tiny, cache), strict=True
    ):
        torch.testing.assert_close(found, F.normalize(wanted, dim=-1), atol=1e-5, rtol=0)
        assert not torch.allclose(wanted, plain, atol=1e-2)
    (model.image(PIXELS) @ model.caption(captions(tiny)).T).trace().backward()
    assert all(value.grad is not None and value.grad.any() for name, value in model.named_parameters() if name in held)
    assert not any(value.requires_grad for name, value in model.named_parameters() if ".frozen." in name)


@pytest.mark.parametrize("adapter", ["bottleneck", "mma"])
def test_gradients_reach_every_adapter_through_the_frozen_blocks_and_no_frozen_weight(
    tiny: Path, cache: Path, adapter: str
) -> None:
    model = make(tiny, cache, adapter=adapter)
    assert (model.branch("shared").stop > 0) == (adapter == "mma")
    scores = model.image(PIXELS) @ model.caption(captions(tiny)).T
    F.cross_entropy(scores, torch.arange(3)).backward()
    for name, parameter in model.named_parameters():
        if ".frozen." in name:
            assert not parameter.requires_grad
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            assert parameter.grad.any(), name


def test_training_changes_no_frozen_weight(tiny: Path, cache: Path) -> None:
    model = make(tiny, cache)
    model.train()
    assert model.visual.frozen is not None
    assert not any(module.training for module in model.visual.frozen.modules())
    before = {name: value.clone() for name, value in model.named_parameters() if ".frozen." in name}
    step = optimiser(model, Training(), 1e-2, [model.branch("image"), model.branch("text")])
    model.image(PIXELS).sum().backward()
    step.step()
    after = dict(model.named_parameters())
    assert before
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_silo_without_images_loads_no_image_tower(tiny: Path, cache: Path) -> None:
    model = make(tiny, cache, ("text",))
    assert model.visual.frozen is None
    assert torch.equal(model.flat, make(tiny, cache).flat)
    assert model.caption(captions(tiny)).shape == (3, 32)
    with pytest.raises(RuntimeError, match="pass its modality to build"):
        model.image(PIXELS)


def test_weights_are_memory_mapped_from_the_cache_and_written_once(tiny: Path, cache: Path) -> None:
    model = make(tiny, cache, ("image",))
    files = sorted((cache / "weights").glob("*/image.safetensors"))
    made = [file.stat().st_mtime_ns for file in files]
    make(tiny, cache, ("image",))
    assert made == [file.stat().st_mtime_ns for file in files]
    found = clip_weights.weights(backbone(tiny), 0, cache)
    mapped = [line for line in Path(f"/proc/{os.getpid()}/maps").read_text().splitlines() if str(found.folder) in line]
    assert any("image.safetensors" in line for line in mapped)
    starts = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped]
    assert model.visual.frozen is not None
    for parameter in model.visual.frozen.parameters():
        assert any(low <= parameter.data_ptr() < high for low, high in starts)


def test_random_weights_depend_on_the_seed_and_leave_the_global_generator_alone(tiny: Path, cache: Path) -> None:
    before = torch.get_rng_state()
    one, two = (clip_weights.weights(backbone(tiny), seed, cache) for seed in (11, 12))
    assert torch.equal(before, torch.get_rng_state())
    assert one.folder != two.folder
    assert (one.folder / "text.safetensors").read_bytes() != (two.folder / "text.safetensors").read_bytes()


def local_weights(path: Path) -> dict[str, torch.Tensor]:
    state = {name: value.detach().clone() for name, value in open_clip.model.CLIP(**TINY).state_dict().items()}
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, path)
    return state


def test_a_local_checkpoint_is_loaded(tiny: Path, tmp_path: Path) -> None:
    state = local_weights(tmp_path / "own.pt")
    found = clip_weights.weights(backbone(tiny, pretrained=str(tmp_path / "own.pt")), 0, tmp_path / "cache")
    loaded = safetensors.torch.load_file(found.folder / "image.safetensors")
    assert torch.equal(loaded["visual.conv1.weight"], state["visual.conv1.weight"])


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"visual.proj": torch.zeros(64, 31)}, r"visual\.proj.*\[64, 31\].*\[64, 32\]"),
        ({"ln_final.weight": None}, r"ln_final\.weight.*no such parameter.*\[32\]"),
        ({"visual.extra": torch.zeros(1)}, r"visual\.extra.*does not have"),
    ],
)
def test_a_mismatched_checkpoint_is_refused_with_parameter_and_shapes(
    tiny: Path, tmp_path: Path, edit: dict[str, torch.Tensor | None], words: str
) -> None:
    changed = {**local_weights(tmp_path / "own.pt"), **edit}
    path = tmp_path / "bad.safetensors"
    safetensors.torch.save_file({name: value for name, value in changed.items() if value is not None}, path)
    with pytest.raises(InputError, match=words):
        clip_weights.weights(backbone(tiny, pretrained=str(path)), 0, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "weights").glob("*[!k]"))


def test_a_pickle_that_would_run_code_is_refused(tiny: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"visual.proj": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(InputError, match=r"evil\.pt: found 'something other than tensors'"):
        clip_weights.weights(backbone(tiny, pretrained=str(tmp_path / "evil.pt")), 0, tmp_path / "cache")
    assert not (tmp_path / "ran").exists()


def test_a_torchscript_archive_is_refused_and_the_advised_conversion_works(tiny: Path, tmp_path: Path) -> None:
    model = open_clip.model.CLIP(**TINY).eval()
    inputs = (PIXELS.float(), captions(tiny).long())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(model, inputs, check_trace=False).save(tmp_path / "archive.pt")
        torch.save(torch.jit.load(tmp_path / "archive.pt", map_location="cpu").state_dict(), tmp_path / "state.pt")
    chosen = backbone(tiny, pretrained=str(tmp_path / "archive.pt"))
    with warnings.catch_warnings(), pytest.raises(InputError) as caught:
        warnings.simplefilter("error")
        clip_weights.weights(chosen, 0, tmp_path / "cache")
    assert "torch.jit.load(FILE, map_location='cpu')" in str(caught.value)
    assert "weights_only" not in str(caught.value)
    found = clip_weights.weights(backbone(tiny, pretrained=str(tmp_path / "state.pt")), 0, tmp_path / "cache")
    loaded = safetensors.torch.load_file(found.folder / "image.safetensors")
    assert torch.equal(loaded["visual.conv1.weight"], model.visual.conv1.weight)


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_openais_weights_are_refused_for_a_model_with_another_activation(
    tiny: Path, tmp_path: Path, ending: str
) -> None:
    path, quick = tmp_path / f"openai.{ending}", tmp_path / "quick.json"
    marks = {name: torch.tensor(32) for name in ("input_resolution", "context_length", "vocab_size")}
    state = {**local_weights(tmp_path / "own.pt"), **marks}
    torch.save(state, path) if ending == "pt" else safetensors.torch.save_file(state, path)
    for name, words in ((str(tiny), 'a model with "quick_gelu": true'), ("ViT-B-32", "ViT-B-32-quickgelu")):
        with pytest.raises(InputError, match=rf"backbone\.name.*{words} for .*openai\.{ending}"):
            clip_weights.weights(Backbone(name=name, pretrained=str(path)), 0, tmp_path / "cache")
    quick.write_text(json.dumps({**TINY, "quick_gelu": True}))
    found = clip_weights.weights(Backbone(name=str(quick), pretrained=str(path)), 0, tmp_path / "cache")
    loaded = safetensors.torch.load_file(found.folder / "image.safetensors")
    assert torch.equal(loaded["visual.conv1.weight"], state["visual.conv1.weight"])


ONE = (1.0, 1.0, 1.0)


def openai() -> clip_weights.Preprocessing:
    return clip_weights.Preprocessing()


def test_the_weights_digest_is_the_same_whatever_path_names_the_model_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(json.dumps(clip_weights.config_of("RN50")))
    torch.save({"a": torch.zeros(1)}, "w.pt")
    digests = {
        clip_weights.weights_digest(Backbone(name=str(name), pretrained=str(tmp_path / "w.pt")), 0, tmp_path / "cache")
        for name in ("a.json", tmp_path / "a.json")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("name", "tag", "wanted"),
    [
        ("ViT-B-32", None, openai),
        ("ViT-B-32", "FILE", openai),
        ("MobileCLIP-S1", None, openai),
        (
            "MobileCLIP-S1",
            "FILE",
            lambda: clip_weights.Preprocessing((0.0,) * 3, ONE, "bilinear", unnamed=(0.0,) * 3 + ONE),
        ),
        ("MobileCLIP-S1", "datacompdr", lambda: clip_weights.Preprocessing((0.0,) * 3, ONE, "bilinear")),
        # Its tags disagree on mean and std, those of ViT-H-14 on how images are resized.
        ("ViT-L-14", "laion2b_s32b_b82k", lambda: clip_weights.Preprocessing((0.5,) * 3, (0.5,) * 3)),
        ("ViT-H-14-quickgelu", "dfn5b", lambda: clip_weights.Preprocessing(resize_mode="squash")),
        ("ViT-H-14", "FILE", openai),
    ],
)
def test_images_are_preprocessed_as_the_weights_require(
    name: str, tag: str | None, wanted: Callable[[], clip_weights.Preprocessing], tmp_path: Path
) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "w.pt")
    chosen = Backbone(name=name, pretrained=str(tmp_path / "w.pt") if tag == "FILE" else tag)
    found = clip_weights.preprocessing(chosen)
    assert found == wanted()
    # Rows of models with default preprocessing keep their cache keys.
    frozen = clip_weights.weights_digest(chosen, 0, tmp_path)
    size = clip_weights.image_size(name, clip_weights.config_of(name))
    digest = image_encoder(chosen, 0, tmp_path, "cpu").digest
    usual = (found.interpolation, found.resize_mode) == ("bicubic", "shortest")
    assert (digest == key_of("image", frozen, size)) == usual


@pytest.mark.parametrize(
    ("name", "tag", "mode", "interpolation"),
    [
        ("ViT-B-32", "laion2b_s34b_b79k", "shortest", "bicubic"),
        ("MobileCLIP-S1", "datacompdr", "shortest", "bilinear"),
        ("ViT-L-14-CLIPA", "datacomp1b", "squash", "bilinear"),
        ("ViT-B-16-SigLIP", "webli", "squash", "bicubic"),
    ],
)
def test_an_image_is_resized_as_open_clip_does_for_the_tag(
    name: str, tag: str, mode: str, interpolation: str, tmp_path: Path
) -> None:
    image = np.random.default_rng(3).integers(0, 256, (427, 640, 3), dtype=np.uint8)
    encoder = image_encoder(Backbone(name=name, pretrained=tag), 0, tmp_path, "cpu")
    edge = clip_weights.image_size(name, clip_weights.config_of(name))
    theirs = open_clip.image_transform(
        edge, False, mean=(0.0,) * 3, std=ONE, resize_mode=mode, interpolation=interpolation
    )(Image.fromarray(image))
    assert np.array_equal(encoder.fit(image), (255 * theirs).round().permute(1, 2, 0).to(torch.uint8).numpy())


def test_pixels_for_adapters_in_the_blocks_follow_the_resize_mode_and_get_their_own_cache_key(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = image_encoder(backbone(tiny), 0, tmp_path, "cpu")
    assert usual.digest == key_of("pixels", 32)
    way = clip_weights.Preprocessing(resize_mode="squash")
    monkeypatch.setattr(clip_weights, "preprocessing", lambda _: way)
    encoder = image_encoder(backbone(tiny), 0, tmp_path, "cpu")
    assert encoder.digest == key_of("pixels", 32, "bicubic", "squash")
    wide = np.zeros((40, 120, 3), np.uint8)
    wide[:, :40] = 255
    assert encoder.fit(wide)[16, 0].tolist() == [255] * 3
    assert usual.fit(wide)[16, 16].tolist() == [0] * 3


def test_an_unknown_resize_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda *_: {"resize_mode": "longest"})
    with pytest.raises(InputError, match=r"laion2b_s34b_b79k, whose images are scaled by longest.*or squash"):
        clip_weights.preprocessing(Backbone(name="ViT-B-32", pretrained="laion2b_s34b_b79k"))


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (Backbone(name="ViT-B32", adapter_site="blocks"), r"'ViT-B32'.*close: .*ViT-B-32"),
        (Backbone(name="ViT-B-32", pretrained="laion9b"), r"'laion9b'.*laion2b_s34b_b79k"),
        (Backbone(name="ViT-B-32", pretrained="openai"), "ViT-B-32-quickgelu"),
        (Backbone(name="coca_ViT-B-32"), "two towers"),
        (Backbone(name="xlm-roberta-base-ViT-B-32"), "model hub"),
        (Backbone(name="gone.json"), r"gone\.json.*No such file"),
    ],
)
def test_an_unusable_model_is_refused_by_name(tmp_path: Path, chosen: Backbone, words: str) -> None:
    with pytest.raises(InputError, match=words):
        clip_weights.weights_digest(chosen, 0, tmp_path)


def test_towers_without_plain_blocks_are_refused_at_the_blocks_site(name: str = "RN50") -> None:
    with pytest.raises(InputError, match=rf"adapter_site.*{name}.*feature"):
        clip_two_tower.adapted(Backbone(name=name, adapter_site="blocks", head="mlp"))
    with pytest.raises(InputError, match=r"backbone\.adapter.*lora with EVA02-B-16.*bottleneck"):
        clip_two_tower.adapted(Backbone(name="EVA02-B-16", adapter_site="blocks", head="mlp", adapter="lora"))


@pytest.mark.parametrize("name", ["vit_medium_patch16_gap_256", "EVA02-B-16"])
def test_adapters_are_inserted_in_the_blocks_of_timms_plain_transformers(name: str) -> None:
    model = clip_two_tower.adapted(Backbone(name=name, adapter_site="blocks", head="mlp"))
    assert len(model.visual.adapters) == len(model.text.adapters) == 12


def test_frozen_features_equal_those_of_open_clip(tiny: Path, cache: Path) -> None:
    found = clip_weights.weights(backbone(tiny), 0, cache)
    images = [image.permute(1, 2, 0).numpy() for image in PIXELS]
    image = image_encoder(backbone(tiny).model_copy(update={"adapter_site": "feature"}), 0, cache, "cpu").encode(images)
    text = clip.encode_texts(clip.load_tower(found, "text"), captions(tiny).numpy(), 2)
    wanted = reference(tiny, cache)
    assert np.allclose(image, wanted[0].numpy(), atol=1e-5)
    assert np.allclose(text, wanted[1].numpy(), atol=1e-5)


def test_bfloat16_products_stay_near_float32_and_train(tiny: Path, cache: Path) -> None:
    exact = make(tiny, cache)
    half = build(
        backbone(tiny).model_copy(update={"precision": "bfloat16"}), InputSpec((3, 32, 32), (77,)), 0, cache=cache
    )
    with torch.no_grad():
        close = torch.nn.functional.cosine_similarity(half.image(PIXELS), exact.image(PIXELS))
    assert half.image(PIXELS).dtype == torch.float32
    assert not torch.equal(half.image(PIXELS), exact.image(PIXELS))
    assert close.min() > 0.99
    half.caption(captions(tiny))[:, 0].sum().backward()
    assert torch.isfinite(gradient_of(half)).all()
    assert gradient_of(half)[half.branch("text")].any()


@pytest.mark.parametrize("name", ["visual", "text"])
def test_activations_between_bfloat16_blocks_are_float32(name: str, tiny: Path, cache: Path) -> None:
    half = make(tiny, cache, precision="bfloat16")
    kinds = set()
    for block in clip.blocks_of(getattr(half, name).frozen.tower, "tiny")[0]:
        block.register_forward_hook(lambda _module, _inputs, output: kinds.add(output.dtype))
    half.image(PIXELS), half.caption(captions(tiny))
    assert kinds == {torch.float32}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_and_cpu_agree_to_tolerance(tiny: Path, cache: Path) -> None:
    shapes = InputSpec((3, 32, 32), (77,))
    devices = ("cpu", device_of("cuda:0"))
    here, there = (build(backbone(tiny), shapes, 0, device=device, cache=cache) for device in devices)
    for model in (here, there):
        model.image(PIXELS.to(model.flat.device))[:, 0].sum().backward()
    torch.testing.assert_close(there.image(PIXELS.cuda()).cpu(), here.image(PIXELS), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(gradient_of(there), gradient_of(here), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"vision_cfg": []}, "vision_cfg: "),
        ({"text_cfg": {**TINY["text_cfg"], "heads": 3}}, "a configuration of an open_clip model"),
        ({"vision_cfg": {**TINY["vision_cfg"], "layers": 2**40}}, r"vision_cfg\.layers"),
        ({"text_cfg": {**TINY["text_cfg"], "width": 2**20}}, r"shape \[.*1048576"),
    ],
)
def test_a_configuration_that_cannot_be_built_or_does_not_fit_its_weights_is_refused(
    tiny: Path, cache: Path, tmp_path: Path, changes: dict[str, Any], allowed: str
) -> None:
    weights = clip_weights.weights(backbone(tiny), 0, cache)
    parts = [safetensors.torch.load_file(weights.folder / f"{each}.safetensors") for each in ("image", "text")]
    whole = {name: value for part in parts for name, value in part.items()}
    safetensors.torch.save_file(whole, tmp_path / "weights.safetensors")
    path = tmp_path / "other.json"
    path.write_text(json.dumps({**TINY, **changes}))
    with pytest.raises(InputError, match=allowed) as refused:
        clip_weights.weights(backbone(path, pretrained=str(tmp_path / "weights.safetensors")), 0, tmp_path)
    assert "\n" not in str(refused.value)


def test_a_configuration_is_read_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "model.json"
    config.write_text(json.dumps(clip_weights.config_of("RN50")))
    monkeypatch.setattr("fedmq.encoders.foreign_weights.read_json", None)  # in this process
    assert clip_weights.config_of(str(config))["embed_dim"] == 1024


@pytest.mark.parametrize("damage", ["missing", "shape", "unknown"])
def test_a_damaged_tower_in_the_cache_is_one_error_that_says_what_to_delete(tmp_path: Path, damage: str) -> None:
    sizes = {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 16}
    words = {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}
    config = tmp_path / "model.json"
    config.write_text(json.dumps({"embed_dim": 8, "vision_cfg": sizes, "text_cfg": words}))
    stored = clip_weights.weights(Backbone(name=str(config)), 0, tmp_path / "cache")
    path = stored.folder / "image.safetensors"
    state = safetensors.torch.load_file(path)
    name = "visual.conv1.weight"
    value = state.pop(name)
    if damage != "missing":
        state[name if damage == "shape" else f"{name}.more"] = value[:1].clone()
    safetensors.torch.save_file(state, path)
    with pytest.raises(RunError, match=r"image\.safetensors cannot be read \(.*(conv1|weight).*delete its folder"):
        clip.load_tower(stored, "image")
    clip.load_tower(stored, "text")


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64])
def test_a_damaged_digest_of_weights_in_the_cache_is_computed_again(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(b"weights")
    expected = clip_weights.digest_of(path, tmp_path / "cache")
    (kept,) = (each for each in (tmp_path / "cache" / "digests").iterdir() if each.suffix != ".lock")
    kept.write_bytes(damage)
    assert clip_weights.digest_of(path, tmp_path / "cache") == expected
