"""What the records of native tokens say: KL and added time by number of tokens that the target computes, at the end or the start.

Knows these two records and how chunks are resampled. Knows no table and no figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.errors import KvferryError
from kvferry.records import FIRST, LAST, NATIVE_TOKENS, NATIVE_TOKENS_TIME, Item, Record
from kvferry.report.compare import seed_of
from kvferry.report.inputs import Pair, Results
from kvferry.report.speed import Spread, of_kind
from kvferry.report.stats import Sampled, bootstrap_means

# The count of each curve with nothing added: the last token must be read, no first one need be computed.
BASE = {LAST: 1, FIRST: 0}


@dataclass(frozen=True)
class Point:
    """One count of one curve.

    kl: nats a token; gained: kl less that of the curve's base point, on the same chunks; chunks: their number.
    ms: of the hand-off; added_ms: less the median of the base point, trial by trial; trials: their number.
    """

    where: str
    count: int
    kl: Sampled
    gained: Sampled
    chunks: int
    ms: Spread
    added_ms: Spread
    trials: int


def measured(results: Results) -> Iterator[tuple[Pair, str, list[Point], int]]:
    """Pair, variant, points (`last` before `first`, counts ascending) and length in tokens of the times.

    Raises:
        KvferryError: one of the two records is missing, lacks a curve's base point, or has other chunks at some point.
    """
    for pair, variant, record in of_kind(results, NATIVE_TOKENS):
        timed = results.transfers.get((pair.name, variant, NATIVE_TOKENS_TIME))
        if timed is None:
            raise KvferryError(
                f"records/pairs/{pair.name}/{variant}/{NATIVE_TOKENS_TIME}.json: there is no such record; run again"
            )
        yield pair, variant, points(results, record, timed), timed.settings["length"]


def points(results: Results, record: Record, timed: Record) -> list[Point]:
    """All points of a variant's two records. Raises as `measured` does."""
    chunks, trials = by_point(record), by_point(timed)
    if chunks.keys() != trials.keys() or not set(BASE.items()) <= chunks.keys():
        raise _broken(
            record, "the records of KL and of time have not the same points, or lack those of last/1 and first/0"
        )
    sampled = _sampled(results, record, chunks)
    found = []
    for where in (LAST, FIRST):
        base = where, BASE[where]
        start = float(np.median(_scores(trials[base])))
        for key in sorted(key for key in chunks if key[0] == where):
            own = _scores(trials[key])
            found.append(
                Point(
                    *key,
                    sampled[key],
                    sampled[key] - sampled[base],
                    len(chunks[key]),
                    Spread.over(own),
                    Spread.over([time - start for time in own]),
                    len(own),
                )
            )
    return found


def by_point(record: Record) -> dict[tuple[str, int], list[Item]]:
    """Items by (`last` or `first`, count), their ids without the point.

    Raises:
        KvferryError: an id is not of the form `last/count/…` or `first/count/…`.
    """
    found: dict[tuple[str, int], list[Item]] = {}
    for item in record.items:
        where, _, rest = item.id.partition("/")
        count, _, name = rest.partition("/")
        if where not in BASE or not count.isdigit():
            raise _broken(record, f"item {item.id!r} is of no point")
        found.setdefault((where, int(count)), []).append(Item(name, item.score, item.weight))
    return found


def _sampled(
    results: Results, record: Record, chunks: dict[tuple[str, int], list[Item]]
) -> dict[tuple[str, int], Sampled]:
    """KL of every point with draws of the same resampled chunks."""
    first = next(iter(chunks.values()))
    layout = [(item.id, item.weight) for item in first]
    if any([(item.id, item.weight) for item in items] != layout for items in chunks.values()):
        raise _broken(record, "its points were measured on different chunks")
    scores, weights = (
        np.array([_scores(items) for items in chunks.values()]),
        np.array([weight for _, weight in layout]),
    )
    means = bootstrap_means(scores, weights, results.draws, seed_of(results, NATIVE_TOKENS))
    return dict(zip(chunks, means, strict=True))


def _scores(items: list[Item]) -> list[float]:
    return [item.score for item in items]


def _broken(record: Record, reason: str) -> KvferryError:
    return KvferryError(f"{record.pair} {record.system} {record.benchmark}: {reason}; delete it and run again")
