"""Intervals: Wilson for one accuracy, paired bootstrap over items for everything that compares systems; McNemar's test.

Works on arrays. Does not know records, benchmarks, or which system is which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Z95 = 1.959963984540054
BLOCK_CELLS = 4_000_000  # resampled items held at once, so that memory does not grow with the number of draws


@dataclass(frozen=True)
class Sampled:
    """A value and its bootstrap draws, shape [draws]; a draw that has no value is NaN."""

    value: float
    draws: np.ndarray

    def __sub__(self, other: Sampled | float) -> Sampled:
        """Difference draw by draw: right only for draws of the same resampled items."""
        if isinstance(other, Sampled):
            return Sampled(self.value - other.value, self.draws - other.draws)
        return Sampled(self.value - other, self.draws - other)

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Sampled:
        """`function` of the value and of every draw."""
        return Sampled(float(function(np.asarray(self.value))), function(self.draws))

    def interval(self) -> tuple[float, float]:
        """95 % percentile interval over the draws that have a value."""
        low, high = np.nanpercentile(self.draws, [2.5, 97.5])
        return float(low), float(high)


@dataclass(frozen=True)
class Undefined:
    """A quantity that has no value, and why."""

    reason: str


Quantity = Sampled | Undefined


def wilson(correct: float, n: int) -> tuple[float, float]:
    """95 % Wilson score interval of a proportion, both ends in [0, 1].

    Raises:
        ValueError: n is not positive or `correct` is not within [0, n].
    """
    if n <= 0 or not 0 <= correct <= n:
        raise ValueError(f"wilson needs 0 <= correct <= n and n > 0, got {correct} of {n}")
    share, spread = correct / n, Z95**2 / n
    centre = (share + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    # The ends are exact where nothing or everything is right; the formula leaves rounding there.
    return (0.0 if correct == 0 else centre - half), (1.0 if correct == n else centre + half)


def mcnemar_p(first: int, second: int) -> float:
    """Two-sided p of McNemar's exact test that two systems are right equally often, from their discordant items.

    Under that hypothesis each discordant item falls to either system like a fair coin: the binomial with one half, doubled
    tail, at most 1. Without a discordant item nothing speaks against it, so p is 1.

    Args:
        first: items that one system alone has right.
        second: items that the other alone has right.

    Raises:
        ValueError: a count is negative.
    """
    if min(first, second) < 0:
        raise ValueError(f"mcnemar_p needs counts of items, got {first} and {second}")
    n, term, tail = first + second, 1, 0
    for successes in range(min(first, second) + 1):
        tail += term
        term = term * (n - successes) // (successes + 1)
    return min(1.0, 2 * tail / 2**n)  # of whole numbers, so exact until this division


def bootstrap_means(scores: np.ndarray, weights: np.ndarray, draws: int, seed: Sequence[int]) -> list[Sampled]:
    """Weighted mean of each row, with the same resampled items for every row: the draws are paired.

    Args:
        scores: [systems, items].
        weights: [items], positive.
        draws: number of bootstrap resamples.
        seed: of the resampling; equal seeds and item counts give equal resamples.

    Returns:
        One `Sampled` a row.
    """
    table = np.vstack([scores * weights, weights[None]])
    sums = _resampled_sums(table, draws, np.random.default_rng(list(seed)))
    values = scores @ weights / weights.sum()
    return [Sampled(float(value), row / sums[-1]) for value, row in zip(values, sums[:-1], strict=True)]


def _resampled_sums(table: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    """Sums of each row of `table` [rows, items] over resampled items: [rows, draws]."""
    items = table.shape[1]
    block = max(1, BLOCK_CELLS // items)
    parts = [_counts(items, min(block, draws - first), rng) @ table.T for first in range(0, draws, block)]
    return np.concatenate(parts).T


def _counts(items: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """How often each item is taken in each draw, as floats: [draws, items]."""
    taken = rng.integers(items, size=(draws, items)) + np.arange(draws)[:, None] * items
    return np.bincount(taken.ravel(), minlength=draws * items).reshape(draws, items).astype(float)


def bootstrap_ratio(numerator: Sampled, denominator: Sampled, not_positive: str, unclear: str) -> Quantity:
    """Ratio draw by draw, if the denominator is clearly above zero.

    A denominator whose interval reaches zero gives a ratio without a bounded interval, so there is no number to report.
    Draws in which a sound denominator is not positive (at most 2.5 %) have no ratio and are left out of the interval.

    Args:
        numerator: paired with `denominator`, draw by draw.
        denominator: as above.
        not_positive: the reason given when the denominator is zero or below.
        unclear: the reason given when its interval reaches zero.
    """
    if denominator.value <= 0:
        return Undefined(not_positive)
    if denominator.interval()[0] <= 0:
        return Undefined(unclear)
    below = np.where(denominator.draws > 0, denominator.draws, np.nan)
    return Sampled(numerator.value / denominator.value, numerator.draws / below)


def mean_of(parts: Mapping[str, Quantity]) -> Quantity:
    """Mean of named quantities, draw by draw; undefined as soon as one part is, naming every part that is."""
    missing = [name for name, part in parts.items() if isinstance(part, Undefined)]
    if missing or not parts:
        return Undefined(f"an average needs every part, and these are undefined: {', '.join(missing) or 'all'}")
    sampled = [part for part in parts.values() if isinstance(part, Sampled)]
    value = sum(part.value for part in sampled) / len(sampled)
    return Sampled(value, np.mean([part.draws for part in sampled], axis=0))
