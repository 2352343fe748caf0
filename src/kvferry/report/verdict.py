"""The verdict on a pair: which tier its headline hand-off is in, and everything that a serving engineer asks of it.

Judged from records alone; knows no sentence and no table. The tiers are ours: the paper has none. They look at two things:
the share of the target's accuracy that is kept (mean of the paper's five benchmarks, or HellaSwag where not all were run), and
the attention-output cosine, which the paper finds to go with retention while R² does not. Both must be good enough, and both
with their whole 95 % interval: where an interval leaves two tiers open, the samples have not decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.records import ATTENTION_COSINE, LATENCY, NEXT_TOKEN_KL, PERPLEXITY, RANDOM_MAPPER
from kvferry.report import compare
from kvferry.report.best import best_recipe
from kvferry.report.inputs import SOURCE, Pair, Results
from kvferry.report.items import Items, every_other_chunk, has_record, record_of, shared_items
from kvferry.report.paper import FIVE
from kvferry.report.speed import Speed, Spread, load_ms, pays_from, speeds
from kvferry.report.stats import Quantity, Sampled, Undefined, mean_of
from kvferry.report.wanted import IMPROVED

HELLASWAG = "hellaswag"
NOT_DECIDED = "not decided by these samples"
NO_BENCHMARK = Undefined("neither all five benchmarks nor HellaSwag were run")


@dataclass(frozen=True)
class Tier:
    """A grade: its name, and the least retention and attention cosine (both fractions) that it takes."""

    name: str
    retention: float
    cosine: float


# From best to worst. Of the paper's six pairs (retention 97.6, 87.5, 76.2, 72.8, 44.2 and 41.6 %) one would be in the first and
# one in the second; in the third the source alone keeps more than the hand-off by 11 points and over. The paper prints no
# cosines, so their bounds are a guess until more pairs are measured.
TIERS = (
    Tier("keeps the quality", 0.95, 0.90),
    Tier("keeps part of the quality", 0.80, 0.70),
    Tier("loses the quality", -math.inf, -math.inf),
)


@dataclass(frozen=True)
class Kept:
    """Retention on one benchmark, over `n` items."""

    retention: Quantity
    n: int


@dataclass(frozen=True)
class Pace:
    """Times at the longest measured length, and the least ones from which on a hand-off is faster; None: not at the longest."""

    longest: Speed
    warm_from: int | None
    cold_from: int | None
    load: Spread


@dataclass(frozen=True)
class Recipe:
    """The best recipe of the sweep of recipes, and its KL less the headline's on the chunks that did not choose it."""

    name: str
    gained: Sampled


@dataclass(frozen=True)
class Verdict:
    """What is known of the headline on a pair; a part that was not measured is None.

    names: the benchmarks that the judgement is of; none if neither all five nor HellaSwag were run. possible: the worst and the
    best tier that the intervals leave open. beside_source: mean accuracy less that of the source alone, a fraction.
    beside_random: next-token KL less that of a random mapper, nats a token.
    """

    pair: Pair
    system: str
    names: Sequence[str]
    possible: tuple[Tier, Tier]
    retention: Quantity
    source_retention: Quantity
    beside_source: Quantity
    gap: Quantity
    gap_in_perplexity: Quantity
    kl: Sampled
    beside_random: Sampled | None
    cosine: Sampled | None
    by_benchmark: Mapping[str, Kept]
    pace: Pace | None
    recipe: Recipe | None

    @property
    def tier(self) -> str:
        """The tier's name, or that the samples have not decided."""
        worst, best = self.possible
        return best.name if worst is best else NOT_DECIDED

    @property
    def weakest(self) -> str | None:
        """The benchmark with the least retention, of those that have one and lose accuracy."""
        values = {
            name: kept.retention.value
            for name, kept in self.by_benchmark.items()
            if isinstance(kept.retention, Sampled) and kept.retention.value < 1
        }
        return min(values, key=lambda name: values[name]) if values else None


def verdict_of(results: Results, pair: Pair) -> Verdict:
    """The verdict on the headline of a pair.

    Raises:
        KvferryError: a record that every run has is missing, or one is broken.
    """
    system, names = results.headline(pair), _judged_by(results)
    retention, cosine = _average(results, pair, system, names), _cosine(results, pair, system)
    return Verdict(
        pair,
        system,
        names,
        _possible(retention, cosine),
        retention,
        _average(results, pair, SOURCE, names),
        mean_of({name: compare.gained(results, pair, system, SOURCE, name) for name in names})
        if names
        else NO_BENCHMARK,
        compare.gap_recovered_on_average(results, pair, system, names) if names else NO_BENCHMARK,
        compare.gap_recovered(results, pair, system, PERPLEXITY, log=True),
        compare.together(results, pair, (system,), NEXT_TOKEN_KL)[0],
        _beside_random(results, pair, system),
        cosine,
        {name: _kept(results, pair, system, name) for name in (*results.benchmarks, *results.held_out_benchmarks)},
        _pace(results, pair, system),
        _recipe(results, pair),
    )


def _judged_by(results: Results) -> tuple[str, ...]:
    if set(FIVE) <= set(results.benchmarks):
        return FIVE
    return (HELLASWAG,) if HELLASWAG in results.benchmarks else ()


def _average(results: Results, pair: Pair, system: str, names: Sequence[str]) -> Quantity:
    """Mean retention over the benchmarks that the judgement is of."""
    return compare.average(results, pair, system, compare.retention, names) if names else NO_BENCHMARK


def _kept(results: Results, pair: Pair, system: str, name: str) -> Kept:
    return Kept(compare.retention(results, pair, system, name), record_of(results, pair, system, name)[1].n)


def _cosine(results: Results, pair: Pair, system: str) -> Sampled | None:
    """Mean over texts, layers and heads on HellaSwag's tokens."""
    if not has_record(results, pair, system, ATTENTION_COSINE):
        return None
    return compare.together(results, pair, (system,), ATTENTION_COSINE)[0]


def _beside_random(results: Results, pair: Pair, system: str) -> Sampled | None:
    """None where the controls were not run on this pair."""
    if not has_record(results, pair, RANDOM_MAPPER, NEXT_TOKEN_KL):
        return None
    return compare.gained(results, pair, system, RANDOM_MAPPER, NEXT_TOKEN_KL)


def _possible(retention: Quantity, cosine: Sampled | None) -> tuple[Tier, Tier]:
    """The worst and the best tier that both intervals leave open; the lower of the two criteria counts."""
    parts = [_open(retention, [tier.retention for tier in TIERS])]
    if cosine is not None:
        parts.append(_open(cosine, [tier.cosine for tier in TIERS]))
    worst, best = (max(part[end] for part in parts) for end in (0, 1))
    return TIERS[worst], TIERS[best]


def _open(value: Quantity, bounds: Sequence[float]) -> tuple[int, int]:
    """Numbers of the worst and the best tier that an interval reaches into; every one where there is no value."""
    if isinstance(value, Undefined):
        return len(bounds) - 1, 0
    worst, best = (next(i for i, bound in enumerate(bounds) if end >= bound) for end in value.interval())
    return worst, best


def _pace(results: Results, pair: Pair, system: str) -> Pace | None:
    if not has_record(results, pair, system, LATENCY):
        return None
    _, record = record_of(results, pair, system, LATENCY)
    measured = speeds(record)
    if not measured:
        return None
    return Pace(measured[-1], pays_from(measured, "warm"), pays_from(measured, "cold"), load_ms(record))


def _recipe(results: Results, pair: Pair) -> Recipe | None:
    """None where the sweep of recipes was not run on this pair."""
    sweep = results.sweeps.get(IMPROVED)
    if sweep is None or pair.name not in sweep.pairs or not sweep.variants:
        return None
    name = best_recipe(results, pair, sweep)
    if name is None:
        return None
    return Recipe(
        name, compare.gained(results, pair, name, results.headline(pair), NEXT_TOKEN_KL, _odd(results, pair, name))
    )


def _odd(results: Results, pair: Pair, name: str) -> Items:
    """The chunks that the choice did not see."""
    return every_other_chunk(shared_items(results, pair, (results.headline(pair), name), NEXT_TOKEN_KL), 1)
