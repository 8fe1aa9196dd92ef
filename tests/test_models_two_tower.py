"""The two-tower model: one flat buffer, the same initialisation everywhere, optimisers restricted to given branches."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedmq.config.scenario import Backbone, Training
from fedmq.encoders.base import InputSpec
from fedmq.errors import InputError
from fedmq.models.build import build
from fedmq.models.optimiser import optimiser
from fedmq.models.two_tower import TwoTower, branch, joint_dim
from tests.gradients import gradient_of

SPEC = InputSpec((24,), (24,))
FEATURES = Backbone(name="features", bottleneck=4)


def small(seed: int = 0, **changes: object) -> TwoTower:
    return build(Backbone(name="features", bottleneck=4, **changes), SPEC, seed)


def batch(n: int = 6, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 24, generator=generator), torch.randn(n, 24, generator=generator)


def loss_of(model: TwoTower) -> torch.Tensor:
    image, text = batch()
    scores = model.image(image) @ model.caption(text).T / 0.07
    return F.cross_entropy(scores, torch.arange(len(scores)))


def test_silos_with_and_without_images_initialise_the_same_parameters() -> None:
    alone = build(FEATURES, SPEC, 0, modalities=("text",))
    assert torch.equal(alone.flat, small().flat)
    assert alone.layout.digest == small().layout.digest


def test_initial_standard_deviations_follow_the_scenario_and_biases_are_zero() -> None:
    model = build(Backbone(name="features", adapter_std=0.01, head_std=0.02), InputSpec((512,), (512,)), 0)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            assert not parameter.any()
        else:
            wanted = 0.01 if ".adapters." in name else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.05)


def test_parameters_are_views_of_the_flat_buffer() -> None:
    model = small()
    offset = 0
    for name, parameter in sorted(model.named_parameters()):
        assert parameter.data_ptr() == model.flat.data_ptr() + 4 * offset, name
        offset += parameter.numel()
    assert offset == model.flat.numel() == model.layout.size


def test_gradients_are_of_the_last_loss_plus_added_gradients() -> None:
    model = small()
    loss_of(model).backward()
    first = gradient_of(model)
    assert first.any()
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    loss_of(model).backward()
    assert torch.equal(gradient_of(model), first)
    model.zero_grad()
    model.image(batch()[0]).sum().backward()
    image = gradient_of(model)
    assert not image[model.branch("text")].any()
    model.add_gradient(torch.ones(model.layout.size))
    assert torch.equal(gradient_of(model), image + 1)


def test_branches_are_the_two_halves_of_the_buffer() -> None:
    model = small()
    text, image = model.branch("text"), model.branch("image")
    assert (text.start, text.stop, image.stop) == (0, image.start, model.flat.numel())
    assert model.branch("visual.") == image
    assert model.branch("visual.head.").stop == image.stop
    assert model.branch("nothing.") == slice(0, 0)
    assert branch(model.layout, "text.") == text


def test_loading_copies_into_the_buffer_and_keeps_the_views() -> None:
    model = small()
    theta = np.arange(model.flat.numel(), dtype=np.float32)
    model.load(theta)
    theta[0] = -1
    assert model.flat[0] == 0
    last = sorted(dict(model.named_parameters()))[-1]
    assert dict(model.named_parameters())[last].flatten()[-1] == len(theta) - 1
    model.load(torch.zeros(len(theta)))
    assert not model.flat.any()


def test_a_read_only_buffer_from_the_wire_loads_without_a_warning() -> None:
    model = small()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load(np.frombuffer(bytes(4 * model.flat.numel()), dtype=np.float32))
    assert not model.flat.any()


def test_the_residual_head_follows_the_papers_formula() -> None:
    model = small()
    w = dict(model.named_parameters())
    x = batch()[0]
    h = x + F.gelu(x @ w["visual.adapters.00.down.weight"].T) @ w["visual.adapters.00.up.weight"].T
    z = h + F.relu(h @ w["visual.head.0.weight"].T) @ w["visual.head.1.weight"].T
    assert torch.allclose(model.image(x), z / z.norm(dim=-1, keepdim=True), atol=1e-6)


def test_an_mlp_head_maps_towers_of_different_dimensions_to_a_joint_one() -> None:
    model = build(Backbone(name="features", head="mlp", bottleneck=4), InputSpec((30,), (20,)), 0)
    assert model.dim == 512
    assert model.image(torch.randn(2, 30)).shape == model.caption(torch.randn(2, 20)).shape == (2, 512)


@pytest.mark.parametrize(("kind", "present", "absent"), [("adamw", "image", "text"), ("sgd", "text", "image")])
def test_an_absent_branch_is_unchanged_by_training(kind: str, present: str, absent: str) -> None:
    model = small()
    start = model.flat.clone()
    training = Training(optimizer=kind, weight_decay=0.5)
    step = optimiser(model, training, 0.1, [model.branch(present)])
    for _ in range(3):
        model.zero_grad()
        z = model.image(batch()[0]) if present == "image" else model.caption(batch()[1])
        z.sum().backward()
        step.step()
    assert torch.equal(model.flat[model.branch(absent)], start[model.branch(absent)])
    assert not torch.equal(model.flat[model.branch(present)], start[model.branch(present)])


@pytest.mark.parametrize(("kind", "momentum"), [("adamw", 0.9), ("adam", 0.9), ("sgd", 0.9), ("sgd", 0.0)])
def test_steps_on_flat_branches_equal_torch_steps_on_single_parameters(kind: str, momentum: float) -> None:
    flat, single = small(), small()
    training = Training(optimizer=kind, weight_decay=0.1, momentum=momentum)
    step = optimiser(flat, training, 1e-2, [flat.branch("image"), flat.branch("text")])
    plain: torch.optim.Optimizer = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=False),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, foreach=False),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=momentum, weight_decay=0.1, foreach=False),
    }[kind](list(single.parameters()))
    for _ in range(4):
        for model, update in ((flat, step), (single, plain)):
            model.zero_grad()
            loss_of(model).backward()
            update.step()
    assert torch.allclose(flat.flat, single.flat, atol=2e-6)


def test_what_does_not_fit_the_model_is_refused_by_key() -> None:
    for place, backbone, inputs in (
        ("backbone.head", FEATURES, InputSpec((1280,), (384,))),
        ("backbone.dim", Backbone(name="features", dim=7), SPEC),
        ("data: image", FEATURES, InputSpec((3, 8, 8), (24,))),
    ):
        with pytest.raises(InputError) as caught:
            build(backbone, inputs, 0)
        assert caught.value.place == place
    assert joint_dim(Backbone(name="features", head="mlp", dim=9), 30, 20) == 9
    with pytest.raises(ValueError, match="parameters of shape"):
        small().load(np.zeros(1, dtype=np.float32))
    with pytest.raises(ValueError, match="at least one branch"):
        optimiser(small(), Training(), 1e-3, [slice(0, 0)])
    with pytest.raises(RuntimeError, match="cannot change its device"):
        small().double()
