"""Rankings of the evaluated items as TREC files, for evaluation with trec_eval, ir_measures or pytrec_eval.

Each direction has a file of relevance judgements, ``i2t.qrels`` with lines ``query 0 item relevance``, and a run,
``i2t.run`` with lines ``query Q0 item rank score name`` (https://trec.nist.gov, trec_eval's README). An image is named
by its item's key, a caption by the key and its number, ``key#0``; characters that end a field are percent-encoded.

An image and its own captions are relevant to each other. Further positives, such as ECCV Caption's (Chun et al., ECCV
2022), come from files in the format of judgements; :func:`scores_of` then measures what that paper reports beside
recall: mAP@R and R-precision.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from fedmq.errors import InputError
from fedmq.evaluation.gallery_ranking import comparable, shuffled
from fedmq.evaluation.heldout import HeldOut, embed
from fedmq.evaluation.recall import RECALLS, first_of_rows, tied
from fedmq.retrieval.plots import evaluated_population
from fedmq.retrieval.released_model import Release
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import make_folder, write_text
from fedmq.text import Progress

Direction = Literal["i2t", "t2i"]
I64 = npt.NDArray[np.int64]

#: Queries ranked at a time.
_BLOCK = 256
#: Every printable ASCII character except blanks and the escape itself stays as it is.
_SAFE = "".join(chr(code) for code in range(33, 127) if chr(code) != "%")
_LINE = "lines of four fields: query, a number, item, relevance (a whole number)"


@dataclass(frozen=True)
class Rankings:
    """The rankings of one direction."""

    queries: Sequence[str]  # names of the Q queries
    items: Sequence[str]  # names of the N items of the gallery
    found: I64  # int64 [Q, K], the first K items of each query, best first
    scores: npt.NDArray[
        np.float32
    ]  # [Q, K], cosines, or for codes the number of equal bits minus that of different ones
    relevant: Mapping[str, frozenset[str]]  # names of each query's relevant items


def _named(keys: Sequence[str]) -> list[str]:
    return [quote(key, safe=_SAFE) for key in keys]


def ranked(release: Release, top: int, progress: Progress | None = None) -> dict[Direction, Rankings]:
    """Rank the evaluated items with a released model, in the order in which its run measured recall.

    The model is the run's shared one, or a silo's personal one. A query has ``top`` items, fewer if the gallery is
    smaller.

    Raises:
        InputError: the data are not those of the run, or only the sites have them.
    """
    population = evaluated_population(release, progress)
    heldout, model = HeldOut.load(release.scenario, population), release.retriever(population.prepared)
    embedded = embed(model.encoders, heldout.dataset, binary=model.binary)
    seed = release.scenario.seed
    image, text, owner = comparable(embedded, seed)
    rows, captions = shuffled(embedded, seed)
    keys = _named([population.prepared.keys[row] for row in heldout.dataset.rows.tolist()])
    first = np.searchsorted(embedded.owner, np.arange(len(keys)))
    of_captions = [f"{keys[item]}#{place - first[item]}" for place, item in enumerate(embedded.owner.tolist())]
    images, texts = [keys[row] for row in rows], [of_captions[caption] for caption in captions]
    i2t, t2i = defaultdict(set), {}
    for caption, item in zip(texts, owner.tolist(), strict=True):
        i2t[images[item]].add(caption)
        t2i[caption] = frozenset({images[item]})
    return {
        "i2t": Rankings(images, texts, *_best(image, text, top), {name: frozenset(own) for name, own in i2t.items()}),
        "t2i": Rankings(texts, images, *_best(text, image, top), t2i),
    }


def _best(
    queries: npt.NDArray[np.float32], gallery: npt.NDArray[np.float32], top: int
) -> tuple[I64, npt.NDArray[np.float32]]:
    """The best ``top`` rows of a gallery [N, d] for queries [Q, d], ties by index, and their scores."""
    same, found, scores = first_of_rows(gallery), [], []
    for start in range(0, len(queries), _BLOCK):
        similar = tied(queries[start : start + _BLOCK] @ gallery.T, same)
        similar = np.where(np.isnan(similar), -np.inf, similar)
        order = np.argsort(-similar, axis=1, kind="stable")[:, :top]
        found.append(order)
        scores.append(np.take_along_axis(similar, order, axis=1))
    return np.concatenate(found), np.concatenate(scores)


def write(rankings: Mapping[Direction, Rankings], folder: Path, name: str) -> list[Path]:
    """Write the files of both directions; ``name`` is that of the run in their lines."""
    make_folder(folder)
    tag, files = quote(name, safe=_SAFE), []
    for way, ranking in rankings.items():
        for ending, lines in (("qrels", _judgements(ranking)), ("run", _run(ranking, tag))):
            write_text(folder / f"{way}.{ending}", "".join(f"{line}\n" for line in lines))
            files.append(folder / f"{way}.{ending}")
    return files


def _judgements(ranking: Rankings) -> Iterator[str]:
    for query in ranking.queries:
        for item in sorted(ranking.relevant[query]):
            yield f"{query} 0 {item} 1"


def _run(ranking: Rankings, tag: str) -> Iterator[str]:
    for query, found, scores in zip(ranking.queries, ranking.found.tolist(), ranking.scores, strict=True):
        for rank, (item, score) in enumerate(zip(found, scores, strict=True), start=1):
            yield f"{query} Q0 {ranking.items[item]} {rank} {score!s} {tag}"


def with_positives(rankings: Mapping[Direction, Rankings], file: Path) -> dict[Direction, Rankings]:
    """Add the positives of a file of judgements, whose queries are images or captions; 0 means not relevant.

    Raises:
        InputError: the file cannot be read, or adds no positive to these rankings.
    """
    pairs = set()
    text = read_regular(file, _LINE).decode("utf-8", "replace")
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        if len(fields) != 4 or re.fullmatch(r"-?\d+", fields[3]) is None:
            raise InputError(f"{file}: line {number}", line, _LINE)
        if int(fields[3]) > 0:
            pairs.add((fields[0], fields[2]))
    added: dict[Direction, Rankings] = {}
    for way, ranking in rankings.items():
        relevant, items = {query: set(own) for query, own in ranking.relevant.items()}, set(ranking.items)
        for query, item in pairs:
            if query in relevant and item in items:
                relevant[query].add(item)
        kept = {query: frozenset(own) for query, own in relevant.items()}
        added[way] = Rankings(ranking.queries, ranking.items, ranking.found, ranking.scores, kept)
    if all(added[way].relevant == ranking.relevant for way, ranking in rankings.items()):
        allowed = "judgements of evaluated items, named as in i2t.qrels and t2i.qrels"
        raise InputError(str(file), "no further positives", allowed)
    return added


def scores_of(ranking: Rankings) -> dict[str, float]:
    """Recall at 1, 5 and 10, R-precision and mAP@R of one direction, means over its queries.

    With R the number of a query's relevant items, R-precision is their fraction among the first R, and mAP@R the mean
    over these R places of the precision at each that holds a relevant item (Musgrave et al., ECCV 2020).

    Raises:
        InputError: a query has more relevant items than its ranking has places.
    """
    most, places = max(map(len, ranking.relevant.values())), ranking.found.shape[1]
    if most > places:
        raise InputError("--top", places, f"{most} or more, the number of items relevant to one of the queries")
    values: dict[str, list[float]] = defaultdict(list)
    for query, found in zip(ranking.queries, ranking.found.tolist(), strict=True):
        relevant = ranking.relevant[query]
        count = len(relevant)
        hits = np.array([ranking.items[item] in relevant for item in found[: max(count, *RECALLS)]], dtype=np.float64)
        for k in RECALLS:
            values[f"R@{k}"].append(float(hits[:k].any()))
        first = hits[:count]
        values["R-precision"].append(float(first.sum()) / count)
        values["mAP@R"].append(float((first * first.cumsum() / np.arange(1, len(first) + 1)).sum()) / count)
    return {name: float(np.mean(each)) for name, each in values.items()}
