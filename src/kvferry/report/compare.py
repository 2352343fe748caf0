"""Comparisons of systems on the same items: retention, floor-normalised retention, share of the gap recovered.

Resamples the items that systems share. Knows records and statistics; does not know how a table looks.
All results are fractions (1.0 is 100 %); averages are over the paper's five benchmarks, or others that are named. `items`
confines a comparison to these items; without it, it is on all items of the system's own record, which may be fewer than the
target's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvferry.errors import KvferryError
from kvferry.records import PERPLEXITY
from kvferry.report.inputs import SOURCE, Pair, Results
from kvferry.report.items import TARGET, Items, aligned_scores, record_of, shared_items
from kvferry.report.paper import FIVE
from kvferry.report.stats import Quantity, Sampled, Undefined, bootstrap_means, bootstrap_ratio, mcnemar_p, mean_of

Measure = Callable[[Results, Pair, str, str], Quantity]


@lru_cache(maxsize=512)
def together(
    results: Results, pair: Pair, systems: tuple[str, ...], benchmark: str, items: Items | None = None
) -> tuple[Sampled, ...]:
    """Mean scores of systems (accuracy, nats a token, share of tokens), with draws paired; the last one sets the items."""
    named = [record_of(results, pair, name, benchmark) for name in systems]
    scores, weights = aligned_scores(named, items)
    return tuple(bootstrap_means(scores, weights, results.draws, seed_of(results, benchmark)))


def paired(
    results: Results, pair: Pair, system: str, benchmark: str, items: Items | None = None
) -> tuple[Sampled, Sampled, Sampled]:
    """Mean scores of target, source and `system`, with paired draws."""
    target, source, own = together(results, pair, (TARGET, SOURCE, system), benchmark, items)
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


def retention(results: Results, pair: Pair, system: str, benchmark: str, items: Items | None = None) -> Quantity:
    """Accuracy of `system` over the target's own."""
    target, _, own = paired(results, pair, system, benchmark, items)
    return _of_target(own, target)


def retention_gained(
    results: Results, pair: Pair, system: str, other: str, benchmark: str, items: Items | None = None
) -> Quantity:
    """Retention of `system` less that of `other`."""
    target, base, own = together(results, pair, (TARGET, other, system), benchmark, items)
    return _of_target(own - base, target)


def _of_target(part: Sampled, target: Sampled) -> Quantity:
    return bootstrap_ratio(part, target, "the target scores 0", "the interval of the target's accuracy reaches 0")


def gained(
    results: Results, pair: Pair, system: str, other: str, benchmark: str, items: Items | None = None
) -> Sampled:
    """Mean score of `system` less that of `other`."""
    base, own = together(results, pair, (other, system), benchmark, items)
    return own - base


@dataclass(frozen=True)
class McNemar:
    """Right and wrong answers of two systems to the same `n` items: how many only one of them has right, and the test's p."""

    n: int
    only_own: int
    only_other: int

    @property
    def p(self) -> float:
        """Two-sided exact p; 1 where there is no discordant item."""
        return mcnemar_p(self.only_own, self.only_other)


def mcnemar(
    results: Results, pair: Pair, system: str, other: str, benchmark: str, items: Items | None = None
) -> McNemar:
    """McNemar's test of `system` against `other` on the items that both answered, or on `items`.

    Raises:
        KvferryError: a record is missing, samples are not nested, or a score is neither right (1) nor wrong (0).
    """
    named = [record_of(results, pair, name, benchmark) for name in (other, system)]
    scores, _ = aligned_scores(named, items or shared_items(results, pair, (other, system), benchmark))
    if not np.isin(scores, (0, 1)).all():
        raise KvferryError(f"{named[1][0]}: McNemar's test needs scores of 0 or 1, and these are others; compare means")
    base, own = scores > 0
    return McNemar(len(own), int((own & ~base).sum()), int((base & ~own).sum()))


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


def gap_recovered_on_average(results: Results, pair: Pair, system: str, names: Sequence[str] = FIVE) -> Quantity:
    """Share of the gap between the mean accuracies over these benchmarks."""
    missing = _not_run(results, pair, names)
    if missing:
        return missing
    trios = [paired(results, pair, system, name) for name in names]
    means = [mean_of({str(i): trio[part] for i, trio in enumerate(trios)}) for part in range(3)]
    target, source, own = (part for part in means if isinstance(part, Sampled))
    return _share(target, source, own)


def average(results: Results, pair: Pair, system: str, measure: Measure, names: Sequence[str] = FIVE) -> Quantity:
    """Mean of a measure over these benchmarks; undefined if one of them is, or was not run."""
    return _not_run(results, pair, names) or mean_of({name: measure(results, pair, system, name) for name in names})


def _not_run(results: Results, pair: Pair, names: Sequence[str]) -> Undefined | None:
    missing = [name for name in names if (pair.target, name) not in results.native]
    if not missing:
        return None
    return Undefined(f"an average needs all {len(names)} benchmarks, and these were not run: {', '.join(missing)}")
