"""FedCola, CAR-MFL and PmcmFL against numpy versions written from their equations and released code."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmq.audit.log_checks import audit_run
from fedmq.config.scenario import Training
from fedmq.federation.protocol import Local, Task, take
from fedmq.models.two_tower import BRANCHES
from fedmq.wire.log_events import LogEvent
from fedmq.wire.payloads import ClassPrototypes, Delta, Model
from protocols import carmfl, fedcola, pmcmfl
from protocols.parts import training
from tests.in_process_run import notes, run_restarted
from tests.small_federation import SmallFederation, population
from tests.threaded_run import resolved

PLAIN = Training(optimizer="sgd", momentum=0.0, weight_decay=0.0, batch_size=100, local_epochs=1)
F64 = np.ndarray


def layers(run: SmallFederation, theta: torch.Tensor, modality: str) -> dict[str, F64]:
    """A tower's parameters by name, float64."""
    prefix, layout = BRANCHES[modality], run.model.layout  # type: ignore[index]
    found = {}
    for entry in layout.entries:
        if entry.name.startswith(prefix):
            (part,) = layout.ranges([entry.name])
            found[entry.name.removeprefix(prefix)] = theta[part].double().numpy().reshape(entry.shape)
    return found


def embed(w: dict[str, F64], x: F64) -> F64:
    """A tower of adapter and residual head (RCSR)."""
    hidden = x @ w["adapters.00.down.weight"].T + w["adapters.00.down.bias"]
    gelu = hidden * 0.5 * (1 + torch.erf(torch.from_numpy(hidden / math.sqrt(2))).numpy())
    x = x + gelu @ w["adapters.00.up.weight"].T + w["adapters.00.up.bias"]
    z = np.maximum(x @ w["head.0.weight"].T + w["head.0.bias"], 0) @ w["head.1.weight"].T + w["head.1.bias"]
    return np.asarray((x + z) / np.linalg.norm(x + z, axis=1, keepdims=True))


def slope(loss: Callable[[], float], values: F64) -> F64:
    """Gradient of a loss by central differences, which changes ``values`` in place and restores them."""
    found = np.zeros_like(values)
    for place in np.ndindex(values.shape):
        kept = values[place]
        values[place] = kept + 1e-5
        up = loss()
        values[place] = kept - 1e-5
        found[place] = (up - loss()) / 2e-5
        values[place] = kept
    return found


# ------------------------------------------------------------------------------------------------------------ FedCola
@pytest.mark.parametrize("complement", ["trained", "frozen", "none"])
def test_a_fedcola_silo_steps_on_its_own_weights_the_gates_and_the_other_towers_weights(complement: str) -> None:
    """W + s W' as separate variables with gradients by central differences; two steps, as the first has s = 0."""
    rate, steps = 0.5, 2
    run = population("fedcola", {"complement": complement}, training=PLAIN.model_copy(update={"local_epochs": steps}))
    run.round()
    run.round()
    silo = run.context.silos[1]  # images only
    task = Task(run.version + 1, run.version, run.version, rate, run.protocol.task(run.state, silo))
    local = Local(silo, run.shares[1], run.model, {})
    update = take(run.protocol.train(local, task).payloads, Delta)
    start = torch.from_numpy(take(task.payloads, Model).buffer.copy())
    assert torch.equal(start, run.state.tensors[fedcola.SINGLE])
    own, other = layers(run, start, "image"), layers(run, start, "text")
    gates = {name: np.zeros(()) for name in own if name.endswith(".weight")}
    assert run.shares[1].image is not None
    x, target = run.shares[1].image.double().numpy(), run.state.tensors["prototypes"][1].double().numpy()

    def merged() -> dict[str, F64]:
        return {name: own[name] + (gates[name] * other[name] if name in gates else 0) for name in own}

    def loss() -> float:
        return float(1 - (embed(merged(), x) @ target).mean() / np.linalg.norm(target))

    before = merged()
    for _ in range(steps):
        groups = [own, *([gates] if complement != "none" else []), *([other] if complement == "trained" else [])]
        slopes = [{name: slope(loss, each[name]) for name in each} for each in groups]
        for group, found in zip(groups, slopes, strict=True):
            for name in group:
                group[name] -= rate * found[name]
    wanted = {name: value - before[name] for name, value in merged().items()}
    found = layers(run, torch.from_numpy(update.buffer.copy()), "image")
    largest = max(np.abs(value).max() for value in wanted.values())
    assert largest > 1e-3
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-4 * largest, err_msg=name)
    assert not torch.from_numpy(update.buffer.copy())[run.model.branch("text")].any()


def official(kinds: list[str], sizes: list[float], model: str, modality: str, *, shared: bool, comp: bool) -> F64:
    """Coefficients of ``_aggregate`` in imguangyu/FedCola for the parameters of one modality.

    ``kinds`` are the silos' modalities, ``model`` that of the server's model: img, txt or img+txt.
    """
    related = [kind in model or model in kind for kind in kinds]
    numerators = [
        size if (near if shared else kind == model) else 0.0
        for kind, size, near in zip(kinds, sizes, related, strict=True)
    ]
    divisor = sum(size for size, near in zip(sizes, related, strict=True) if near) if comp else sum(numerators)
    uploaded = [modality in kind for kind in kinds]
    return np.array([n / divisor * up if divisor else 0.0 for n, up in zip(numerators, uploaded, strict=True)])


@pytest.mark.parametrize("kinds", [["img+txt", "img", "txt", "img+txt", "img"], ["img+txt", "img"], ["txt", "img"]])
def test_fedcolas_coefficients_are_those_of_its_code(kinds: list[str]) -> None:
    sizes = [float(n) for n in (30, 11, 7, 5, 13)[: len(kinds)]]
    weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    paired = torch.tensor([kind == "img+txt" for kind in kinds])
    for modality in ("img", "txt"):
        has = torch.tensor([modality in kind for kind in kinds])
        for single in (False, True):
            for shared in (False, True):
                for comp in (False, True):
                    model = modality if single else "img+txt"
                    expected = official(kinds, sizes, model, modality, shared=shared, comp=comp)
                    found = fedcola.coefficients(weights, has, paired, single=single, shared=shared, compensation=comp)
                    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, err_msg=f"{model} {modality}")


def test_fedcolas_models_take_shared_layers_from_all_and_others_from_their_own_kind() -> None:
    run = population("fedcola", {"compensation": False})
    run.round()
    replies, layout = run.replies(), run.model.layout
    after = run.protocol.merge(run.state, replies, 1).state
    deltas = [take(reply.payloads, Delta).buffer.astype(np.float64) for reply in replies]
    n = np.array([reply.samples for reply in replies], np.float64)  # paired, images only, captions only, paired

    def step(theta: torch.Tensor, before: torch.Tensor, name: str) -> F64:
        (part,) = layout.ranges([name])
        return (theta - before)[part].double().numpy()

    def expected(name: str, rows: list[int], divisor: float) -> F64:
        (part,) = layout.ranges([name])
        return np.asarray(sum(n[k] * deltas[k][part] for k in rows) / divisor)

    before, single = run.state.theta, run.state.tensors[fedcola.SINGLE]
    for name, all_rows, alone in (("visual.", [0, 1, 3], 1), ("text.", [0, 2, 3], 2)):
        adapter, head = f"{name}adapters.00.up.weight", f"{name}head.1.weight"
        for found, wanted in (
            (step(after.theta, before, adapter), expected(adapter, all_rows, n.sum())),
            (step(after.theta, before, head), expected(head, [0, 3], n[0] + n[3])),
            (step(after.tensors[fedcola.SINGLE], single, adapter), expected(adapter, all_rows, n[all_rows].sum())),
            (step(after.tensors[fedcola.SINGLE], single, head), expected(head, [alone], n[alone])),
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=3e-8)
            assert np.abs(wanted).max() > 1e-6


def test_in_async_mode_fedcolas_three_models_move_by_the_same_fraction() -> None:
    run = population("fedcola")
    run.round()
    after = run.protocol.merge(run.state, run.replies(), 1).state
    mixed = run.protocol.mix_state(run.state, after, 0.25)
    wanted = 0.75 * run.state.tensors[fedcola.SINGLE] + 0.25 * after.tensors[fedcola.SINGLE]
    torch.testing.assert_close(mixed.tensors[fedcola.SINGLE], wanted)
    assert not torch.equal(after.tensors[fedcola.SINGLE], run.state.tensors[fedcola.SINGLE])


# ------------------------------------------------------------------------------------------------------------ CAR-MFL
def nearest(z: F64, public: F64, own: F64 | None, theirs: F64, candidates: int) -> list[int]:
    """``generate_RAG_mapping`` of bhattarailab/CAR-MFL."""
    distances = np.sqrt(((z[:, None] - public[None]) ** 2).sum(2))
    if own is None:
        return [int(row) for row in distances.argmin(1)]
    chosen = []
    for i, order in enumerate(np.argsort(distances, axis=1)[:, :candidates]):
        similarities = []
        for j in order:
            union = np.logical_or(own[i], theirs[j]).sum()
            similarities.append(np.logical_and(own[i], theirs[j]).sum() / union if union else 1.0)
        chosen.append(int(order[int(np.argmax(similarities))]))
    return chosen


@pytest.mark.parametrize("labelled", [True, False])
def test_carmfl_retrieves_the_nearest_item_or_of_the_nearest_ones_that_with_the_most_similar_labels(
    labelled: bool,
) -> None:
    generator = np.random.default_rng(3)
    z, public = generator.normal(size=(40, 6)), generator.normal(size=(25, 6))
    own, theirs = (generator.integers(0, 2, size=(n, 4)).astype(np.uint8) for n in (40, 25))
    own[0], theirs[:5] = 0, 0  # nothing in common of nothing counts as the same
    expected = nearest(z, public, own if labelled else None, theirs, 10)
    labels = (torch.from_numpy(own), torch.from_numpy(theirs)) if labelled else None
    assert carmfl.retrieved(torch.from_numpy(z), torch.from_numpy(public), labels, 10).tolist() == expected
    assert not labelled or expected != nearest(z, public, None, theirs, 10)


def test_carmfls_towers_are_weighted_as_in_its_code() -> None:
    sizes, alpha = np.array([30.0, 11.0, 7.0, 20.0]), 0.3  # paired, images only, captions only, the server
    norm = sizes / sizes.sum()
    for lacking in (1, 2):  # the text tower of the image client, and the other way round
        scaled = norm.copy()
        scaled[lacking] *= alpha
        expected = np.exp(scaled) / np.exp(scaled).sum()
        completed = torch.arange(4) == lacking
        found = carmfl.tower_weights(torch.from_numpy(sizes), completed, torch.ones(4, dtype=torch.float64), alpha)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    half = torch.tensor([1.0, 0.5, 0.0, 1.0], dtype=torch.float64)
    damped = carmfl.tower_weights(torch.from_numpy(sizes), torch.zeros(4, dtype=torch.bool), half, alpha)
    wanted = np.exp(norm) * half.numpy()
    np.testing.assert_allclose(damped.numpy(), wanted / wanted.sum(), rtol=1e-12)


@pytest.mark.parametrize("image", [True, False])
def test_a_carmfl_silo_trains_both_towers_on_its_items_with_the_retrieved_ones(image: bool) -> None:
    """One step of SGD equals that of a paired silo whose other modality was retrieved by hand."""
    run = population("carmfl", {"candidates": 1}, kinds=((image, not image), (True, True)), training=PLAIN)
    silo, method = run.context.silos[0], run.protocol
    assert isinstance(method, carmfl.CarMfl)
    own, public = run.shares[0], method.public.dataset
    run.model.load(run.state.theta)
    assert public.image is not None and public.text is not None
    with torch.no_grad():
        if image:
            assert own.image is not None
            z, pool = run.model.image(own.image), run.model.image(public.image)
        else:
            assert own.text is not None
            z = run.model.caption(own.text[torch.arange(len(own)), 0])
            pool = run.model.caption(public.text[torch.arange(len(public)), 0])
    chosen = torch.tensor(nearest(z.numpy(), pool.numpy(), None, np.zeros(0), 1))
    found = method.completed(Local(silo, own, run.model, {}))
    assert found.silo.paired and found.dataset.image is not None and found.dataset.text is not None
    if image:
        assert torch.equal(found.dataset.text[torch.arange(len(own)), 0], public.text[chosen, 0])
        assert torch.equal(found.dataset.captions, public.captions[chosen])
    else:
        assert torch.equal(found.dataset.image, public.image[chosen])
    update = take(run.train(silo).payloads, Delta)
    assert update.n_samples == len(own)
    paired = method.fedavg.train(found, Task(1, 0, 0, 1e-3, method.task(run.state, silo)))
    assert np.array_equal(take(paired.payloads, Delta).buffer, update.buffer)
    delta = torch.from_numpy(update.buffer.copy())
    assert all(delta[run.model.branch(name)].any() for name in ("image", "text"))


def test_carmfls_coordinator_is_one_more_silo_with_the_public_pairs() -> None:
    run = population("carmfl", {"alpha": 0.3}, training=PLAIN)
    method = run.protocol
    assert isinstance(method, carmfl.CarMfl)
    replies = run.replies()
    after = method.merge(run.state, replies, 0)
    own = method._trained(run.state.theta, 0)
    sizes = np.array([*(reply.samples for reply in replies), len(method.public.dataset)], np.float64)
    buffers = [*(take(reply.payloads, Delta).buffer for reply in replies), own.delta.numpy()]
    updates = np.stack(buffers).astype(np.float64)
    wanted = np.zeros(run.model.layout.size)
    for name, lacking in (("image", 2), ("text", 1)):
        scaled = sizes / sizes.sum()
        scaled[lacking] *= 0.3
        part = run.model.branch(name)
        wanted[part] = (np.exp(scaled) / np.exp(scaled).sum()) @ updates[:, part]
    step = (after.state.theta - run.state.theta).double().numpy()
    np.testing.assert_allclose(step, wanted, rtol=1e-3, atol=3e-8)
    assert np.abs(wanted).max() > 1e-5
    assert after.log["server_loss"] == own.loss > 0


# ------------------------------------------------------------------------------------------------------------- PmcmFL
def cross_entropy(scores: F64) -> float:
    """Mean cross-entropy of rows whose target is the diagonal."""
    return float(np.mean(np.log(np.exp(scores).sum(1)) - np.diag(scores)))


@pytest.mark.parametrize("image", [True, False])
def test_a_pmcmfl_silo_steps_on_the_base_loss_with_prototypes_and_on_the_contrast(image: bool) -> None:
    """Gradients by central differences of the two losses in numpy."""
    run, rate, weight = population("pmcmfl", {"weight": 0.3}, training=PLAIN), 0.05, 0.3
    run.round()
    silo = run.context.silos[1 if image else 2]
    share, state = run.shares[silo.index], run.state
    own, lacking = ("image", "text") if image else ("text", "image")
    prototypes = dict(zip(("image", "text"), state.tensors["class_prototypes"].double().chunk(2), strict=True))
    known = dict(zip(("image", "text"), state.tensors["class_prototypes_valid"].chunk(2), strict=True))
    assert share.labels is not None
    classes = share.labels.int().argmax(1)
    assert torch.equal(known["image"], known["text"])  # paired silos report both
    kept = known[own][classes].numpy()
    of = {name: prototypes[name][classes].numpy()[kept] for name in prototypes}
    task = Task(run.version + 1, run.version, run.version, rate, run.protocol.task(state, silo))
    generator = training.generator_of(run.context, Local(silo, share, run.model, {}), task, "train")
    if image:
        assert share.image is not None
        x = share.image.double().numpy()[kept]
    else:
        assert share.text is not None
        caption = torch.from_numpy((generator.random(len(share)) * share.captions.numpy()).astype(np.int64))
        x = share.text[torch.arange(len(share)), caption].double().numpy()[kept]
    layer = layers(run, state.theta, own)

    def loss() -> float:
        scores = embed(layer, x) @ of[lacking].T / 0.07
        base = (cross_entropy(scores) + cross_entropy(scores.T)) / 2
        return base + weight * cross_entropy(embed(layer, x) @ of[own].T / 0.07)

    slopes = {name: slope(loss, layer[name]) for name in layer}
    update = take(run.protocol.train(Local(silo, share, run.model, {}), task).payloads, Delta)
    found = layers(run, torch.from_numpy(update.buffer.copy()), own)
    largest = max(np.abs(value).max() for value in slopes.values()) * rate
    assert largest > 1e-3
    for name, value in slopes.items():
        np.testing.assert_allclose(found[name], -rate * value, rtol=0, atol=2e-4 * largest, err_msg=name)


def test_pmcmfls_contrast_is_that_of_its_code() -> None:
    generator = np.random.default_rng(5)
    z, prototypes = generator.normal(size=(7, 5)), generator.normal(size=(7, 5))
    found = pmcmfl.prototype_contrast(torch.from_numpy(z), torch.from_numpy(prototypes), 0.07)
    assert float(found) == pytest.approx(cross_entropy(z @ prototypes.T / 0.07), rel=1e-12)


def test_pmcmfls_prototypes_are_weighted_by_the_silos_sizes_plus_one() -> None:
    """``aggregate_local_prototypes``: for each class over the silos that have it."""
    run = population("pmcmfl")
    replies = run.replies()
    after = run.protocol.merge(run.state, replies, 0).state.tensors
    sent = [(take(reply.payloads, ClassPrototypes), reply.samples) for reply in replies if reply.silo.paired]
    total = sum((1 + n) * each.prototypes.astype(np.float64) * (each.counts > 0)[:, None] for each, n in sent)
    weights = np.sum([(1 + n) * (each.counts > 0) for each, n in sent], axis=0)
    expected = total / np.maximum(weights, 1)[:, None]
    np.testing.assert_allclose(after["class_prototypes"].numpy(), expected, rtol=1e-5, atol=1e-7)
    assert len(sent) == 2 and (weights > 0).any()
    assert np.array_equal(after["class_prototypes_valid"].numpy(), weights > 0)


# --------------------------------------------------------------------------------------------------------- whole runs
@pytest.fixture(scope="module", name="labelled")
def features_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled items, some of them public."""
    generator, path = np.random.default_rng(7), tmp_path_factory.mktemp("features") / "features.npz"
    latent = generator.normal(size=(90, 16))
    image, text = (latent + 0.5 * generator.normal(size=latent.shape) for _ in range(2))
    image, text = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (image, text))
    np.savez(path, image=image.astype(np.float32), text=text.astype(np.float32),
             labels=np.eye(4, dtype=np.uint8)[latent[:, :4].argmax(axis=1)],
             split=np.array(["train"] * 60 + ["test"] * 20 + ["public"] * 10))  # fmt: skip
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedcola", "carmfl", "pmcmfl"])
def test_a_run_ends_with_the_same_model_whatever_is_killed_and_its_logs_agree(
    name: str, tiny: Path, tmp_path: Path, labelled: Path
) -> None:
    common = (
        f"data.path={labelled}", f"protocol={name}", "rounds=3", "silos.count=4", "participation=1.0",
        "missing_modality={silos: {silo-01: image, silo-02: text}}", "training.batch_size=8", "evaluation.every=1",
        "compression={updates: {kind: int8}, model: {kind: bfloat16}}",
    )  # fmt: skip
    crash = "{kind: crash, silos: [silo-01], rounds: [1], restart: 1}"
    crashes = f"faults=[{{kind: coordinator_crash, after_event: 9}}, {crash}]"
    whole, killed = (
        run_restarted(resolved(tiny, *common, *more), tmp_path / str(len(more))).summary for more in ((), (crashes,))
    )
    assert whole is not None and killed is not None
    assert killed.model_digest == whole.model_digest
    assert len(notes(tmp_path / "1", LogEvent.RESUMED)) == 1
    assert not [finding for place in ("0", "1") for finding in audit_run(tmp_path / place).findings]
