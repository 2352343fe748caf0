"""Comparisons of systems on the same items: retention, floor-normalised retention, share of the gap recovered.

Pairs records by item id and resamples items. Knows records and statistics; does not know how a table looks.
All results are fractions (1.0 is 100 %); averages are over the paper's five benchmarks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from kvferry.errors import KvferryError
from kvferry.records import PERPLEXITY, Record
from kvferry.report.inputs import SOURCE, Pair, Results
from kvferry.report.paper import FIVE
from kvferry.report.stats import Quantity, Sampled, Undefined, bootstrap_means, bootstrap_ratio, mean_of

TARGET = "target"


def record_of(results: Results, pair: Pair, system: str, benchmark: str) -> tuple[str, Record]:
    """The record of a system and its place under the results root; `system` may be TARGET or SOURCE.

    Raises:
        KvferryError: that system was not run on that benchmark.
    """
    if system in (TARGET, SOURCE):
        model = pair.target if system == TARGET else pair.source
        place, record = f"records/native/{model}/{benchmark}.json", results.native.get((model, benchmark))
    else:
        place = f"records/pairs/{pair.name}/{system}/{benchmark}.json"
        record = results.transfers.get((pair.name, system, benchmark))
    if record is None:
        raise KvferryError(f"{place}: there is no such record; run its evaluation first")
    return place, record


def aligned_scores(named: Sequence[tuple[str, Record]]) -> tuple[np.ndarray, np.ndarray]:
    """Scores [records, items] and weights [items], item by item in the order of the first record.

    Raises:
        KvferryError: the records differ in metric, item ids or weights, or repeat an id; both places are named.
    """
    (first_place, first), *others = named
    ids, weights = [item.id for item in first.items], np.array([item.weight for item in first.items])
    if len(set(ids)) != len(ids):
        raise KvferryError(f"{first_place}: an item id occurs twice; delete it and run again")
    rows = [[item.score for item in first.items]]
    for place, other in others:
        by_id = {item.id: item for item in other.items}
        same = len(by_id) == other.n and by_id.keys() == set(ids) and other.metric == first.metric
        if not same or any(by_id[i].weight != w for i, w in zip(ids, weights, strict=True)):
            raise KvferryError(
                f"{first_place} and {place}: {first.benchmark} was answered on different items or by another metric, "
                "so they cannot be compared; delete both and run again"
            )
        rows.append([by_id[i].score for i in ids])
    return np.array(rows, dtype=float), weights


@lru_cache(maxsize=512)
def paired(results: Results, pair: Pair, system: str, benchmark: str) -> tuple[Sampled, Sampled, Sampled]:
    """Mean scores of target, source and `system` (accuracy, or nats a token), with paired draws."""
    named = [record_of(results, pair, name, benchmark) for name in (TARGET, SOURCE, system)]
    scores, weights = aligned_scores(named)
    target, source, own = bootstrap_means(scores, weights, results.draws, seed_of(results, benchmark))
    return target, source, own


def seed_of(results: Results, benchmark: str) -> list[int]:
    """Seed of the resampling of a benchmark's items: another for each benchmark, the same for every pair and system."""
    return [results.seed, zlib.crc32(benchmark.encode())]


def chance_of(results: Results, pair: Pair, benchmark: str) -> float:
    """Accuracy of guessing, a fraction.

    Raises:
        KvferryError: the target's record does not say.
    """
    place, record = record_of(results, pair, TARGET, benchmark)
    if record.chance is None:
        raise KvferryError(f"{place}: the record states no chance accuracy; delete it and run again")
    return record.chance


def retention(results: Results, pair: Pair, system: str, benchmark: str) -> Quantity:
    """Accuracy of `system` over the target's own."""
    target, _, own = paired(results, pair, system, benchmark)
    return bootstrap_ratio(own, target, "the target scores 0", "the interval of the target's accuracy reaches 0")


def floor_normalised(results: Results, pair: Pair, system: str, benchmark: str) -> Quantity:
    """As `retention`, after taking chance off both accuracies."""
    target, _, own = paired(results, pair, system, benchmark)
    chance = chance_of(results, pair, benchmark)
    return bootstrap_ratio(
        own - chance,
        target - chance,
        "the target is at or below chance",
        "the interval of the target's accuracy includes chance",
    )


def gap_recovered(results: Results, pair: Pair, system: str, benchmark: str, *, log: bool = False) -> Quantity:
    """(system − source) / (target − source), for accuracies or for perplexity.

    Args:
        results: what was run.
        pair: which models.
        system: a mapper variant, a control, or SOURCE (then zero by construction).
        benchmark: one of the five or prefix perplexity.
        log: for perplexity, compare nats a token and not perplexities.
    """
    target, source, own = paired(results, pair, system, benchmark)
    if benchmark == PERPLEXITY:
        target, source, own = (_as_goodness(part, log=log) for part in (target, source, own))
    return _share(target, source, own)


def _as_goodness(nats: Sampled, *, log: bool) -> Sampled:
    """Turn lower-is-better into higher-is-better, so that one definition of the gap serves all."""
    return nats.map(np.negative) if log else nats.map(lambda value: -np.exp(value))


def _share(target: Sampled, source: Sampled, own: Sampled) -> Quantity:
    return bootstrap_ratio(
        own - source,
        target - source,
        "the target is not better than the source: there is no gap",
        "the interval of the gap between target and source includes 0",
    )


def gap_recovered_on_average(results: Results, pair: Pair, system: str) -> Quantity:
    """Share of the gap between the mean accuracies over the five benchmarks."""
    missing = _not_run(results)
    if missing:
        return missing
    trios = [paired(results, pair, system, name) for name in FIVE]
    means = [mean_of({str(i): trio[part] for i, trio in enumerate(trios)}) for part in range(3)]
    target, source, own = (part for part in means if isinstance(part, Sampled))
    return _share(target, source, own)


def average(
    results: Results, pair: Pair, system: str, measure: Callable[[Results, Pair, str, str], Quantity]
) -> Quantity:
    """Mean of a measure over the five benchmarks; undefined if one of them is, or was not run."""
    return _not_run(results) or mean_of({name: measure(results, pair, system, name) for name in FIVE})


def _not_run(results: Results) -> Undefined | None:
    missing = [name for name in FIVE if name not in results.benchmarks]
    return (
        Undefined(f"an average needs all five benchmarks, and these were not run: {', '.join(missing)}")
        if missing
        else None
    )
