"""Which paths in ``summary.json``, such as ``fairness.worst_r1``, a run may have."""

from __future__ import annotations

from collections.abc import Collection

from fedmq.evaluation.recall import fairness_of
from fedmq.runs.run_records import RunSummary
from fedmq.storage.json_files import Stored
from fedmq.text import nearest

#: Parts of the summary that evaluations during a run have, too; with names of metrics below, or of fairness.
EVALUATED = ("fairness", "per_silo_mean", "personal", "personal_fairness", "personal_per_silo_mean")


def allowed_instead(path: str, known: Collection[str]) -> str | None:
    """What is allowed instead of a path that no summary has; None for a path that a summary may have.

    Args:
        path: with a dot.
        known: names of metrics.
    """
    head, _, name = path.partition(".")
    if head not in RunSummary.model_fields:
        return f"a value of the summary, e.g. {', '.join(nearest(head, RunSummary.model_fields))}"
    if head in ("fairness", "personal_fairness"):
        names: Collection[str] = fairness_of({})
    elif head in ("metrics", "personal", "per_silo_mean", "personal_per_silo_mean"):
        names = known
    else:
        kind = RunSummary.model_fields[head].annotation
        if kind in (bool, float, int, str):
            return f"a number below a part of the summary; {head} has no parts"
        if not (isinstance(kind, type) and issubclass(kind, Stored)):
            return None
        first, names = name.partition(".")[0], kind.model_fields
        return None if first in names else f"{head} with one of {', '.join(names)}"
    return None if name in names else f"{head} with one of {', '.join(nearest(name, names))}"
