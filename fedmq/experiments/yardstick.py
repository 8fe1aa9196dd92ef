"""Linear yardsticks: how well linear models of a data set's frozen features retrieve, as rows of a comparison.

If a base loss stays below its yardstick although it is trained on the pooled data, it is badly set up or too weak, and
differences between federated methods that use it say little. Nothing is tuned per table, so that every table has the
same yardsticks:

- ``classes``: a logistic regression per modality, on standardised features with scikit-learn's default penalty, for
  several labels per item one against the rest. Items are ranked by the cosine of their class probabilities.
- ``pairs``: canonical correlations of the two modalities with :data:`RIDGE`, without labels. Items are ranked by the
  cosine of their canonical variates, weighted by the correlations.

They train on the pairs of the pooled training data, on one thread, and are measured as models are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmq.config.resolve import ResolvedRun
from fedmq.data.labels import fine_columns
from fedmq.data.silo_dataset import SiloDataset
from fedmq.errors import InputError
from fedmq.evaluation.heldout import HeldOut
from fedmq.evaluation.recall import fairness_of, means
from fedmq.federation.population import Population, build_population
from fedmq.federation.protocol import Encoders

F64 = npt.NDArray[np.float64]
#: Ridge of the canonical correlations, as a fraction of the mean variance of a modality's features. Of .01 to 3 it has
#: the largest sum of R@1 over the validation splits of openmoji and of Flickr8k, with aligned and unaligned features.
RIDGE = 0.3


def figures(kind: str, runs: Mapping[int, ResolvedRun]) -> dict[int, Mapping[str, object]]:
    """Measure a yardstick: by seed its ``metrics``, ``fairness`` and ``per_silo_mean``, as in a run's summary.

    It takes data, split and metrics of a run of each seed.

    Raises:
        InputError: the data are not features, or cannot be fitted.
    """
    fitted: dict[tuple[str, bytes], Encoders] = {}
    result: dict[int, Mapping[str, object]] = {}
    for seed, run in runs.items():
        scenario = run.scenario
        if scenario.data is None:
            raise InputError("--yardstick", kind, "a scenario with data; silos with their own data share none")
        population = build_population(scenario, pooled=True)
        rows = population.rows_of(population.silos[0]).dataset
        key = (population.prepared.digest, rows.tobytes())
        if key not in fitted:
            fitted[key] = _fitted(kind, population, population.load(rows, image=True, text=True))
        names = [silo.name for silo in population.silos if len(population.heldout[silo.index])]
        measured = HeldOut.load(scenario, population).measured(fitted[key], binary=False, names=names)
        own = measured.per_silo
        silo_means = means(own) if own else {}
        result[seed] = {"metrics": measured.values, "fairness": fairness_of(own), "per_silo_mean": silo_means}
    return result


def _fitted(kind: str, population: Population, pairs: SiloDataset) -> Encoders:
    """The yardstick's encoders, fitted to training pairs on one thread."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # noqa: PLC0415

    if pairs.image is None or pairs.text is None:
        raise ValueError("a yardstick needs both modalities")
    image, text = (np.asarray(x, np.float64) for x in (pairs.image, pairs.text.values))
    if image.ndim != 2 or text.ndim != 2:
        raise InputError("--yardstick", f"{kind} on pixels or tokens", "a backbone with frozen features")
    owner = np.repeat(np.arange(len(image)), pairs.captions)
    with threadpool_limits(1):
        if kind == "pairs":
            return Encoders(*map(_encoder, canonical_variates(image[owner], text)))
        columns = fine_columns(population.run_data.label_names)
        if pairs.labels is None or (labels := pairs.labels.numpy()[:, columns] > 0).any(0).sum() < 2:
            raise InputError("--yardstick", kind, "pairs, or data whose training items have at least two labels")
        return Encoders(
            _encoder(class_probabilities(image, labels)), _encoder(class_probabilities(text, labels[owner]))
        )


def _encoder(function: Callable[[F64], F64]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.from_numpy(function(x.double().numpy())).float()


def class_probabilities(x: F64, labels: npt.NDArray[np.bool_]) -> Callable[[F64], F64]:
    """Fit a logistic regression of multi-hot labels, bool [n, C], on standardised features [n, d].

    With exactly one label per item the classes exclude each other.

    Returns:
        A function from features [m, d] to class probabilities [m, C']; labels that no item has are left out.
    """
    from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415 - a second to import
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415
    from sklearn.multiclass import OneVsRestClassifier  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    kept = labels[:, labels.any(0) & ~labels.all(0)] if (labels.sum(1) != 1).any() else labels
    several, regression = kept is not labels, LogisticRegression(max_iter=1000)
    model = make_pipeline(StandardScaler(), OneVsRestClassifier(regression) if several else regression)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x, kept.astype(int) if several else kept.argmax(1))
    return lambda items: np.asarray(model.predict_proba(items))


def canonical_variates(x: F64, y: F64) -> tuple[Callable[[F64], F64], Callable[[F64], F64]]:
    """Fit regularised canonical correlations of pairs x [n, d], y [n, e].

    With A = (C_xx + r_x I)^(-1/2) and B likewise for y, the singular values S of A C_xy B = U S V^T are the
    correlations, and the variates are (x - mean x) A U S and (y - mean y) B V S.

    Returns:
        Functions from features [m, d] and [m, e] to canonical variates [m, min(d, e)].
    """

    def whitening(covariance: F64) -> F64:
        values, vectors = np.linalg.eigh(covariance)
        return np.asarray(vectors / np.sqrt(values + RIDGE * values.mean()) @ vectors.T)

    means_of = x.mean(0), y.mean(0)
    x, y = x - means_of[0], y - means_of[1]
    first, second = whitening(x.T @ x / len(x)), whitening(y.T @ y / len(y))
    left, correlations, right = np.linalg.svd(first @ (x.T @ y / len(x)) @ second, full_matrices=False)
    maps = first @ left * correlations, second @ right.T * correlations
    return lambda items: (items - means_of[0]) @ maps[0], lambda items: (items - means_of[1]) @ maps[1]
