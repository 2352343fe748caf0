"""What a LATENCY record says: times by length, what the hand-off saves, and from which length on. Knows no table and no torch.

`warm` counts the mapper alone, as the paper does: the source has read the text anyway. `cold` counts the source's prefill too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvferry.errors import KvferryError
from kvferry.records import LATENCY, LOAD, MAPPER, SOURCE_PREFILL, TARGET_PREFILL, Record
from kvferry.report.inputs import Pair, Results

LOW, HIGH = 10, 90  # percentiles
WARM, COLD = "warm", "cold"

Way = Literal["warm", "cold"]
Trials = dict[tuple[str, int], list[float]]


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile over trials, in ms."""

    median: float
    low: float
    high: float

    @classmethod
    def over(cls, trials: Sequence[float]) -> Spread:
        """Of milliseconds a trial; between two trials a percentile is interpolated."""
        low, median, high = np.percentile(trials, [LOW, 50, HIGH])
        return cls(float(median), float(low), float(high))


@dataclass(frozen=True)
class Speed:
    """The times of one length in tokens."""

    length: int
    trials: int
    mapper_ms: Spread
    source_prefill_ms: Spread
    target_prefill_ms: Spread

    @property
    def warm(self) -> float:
        """How many times faster the mapper is than the target's own prefill: medians."""
        return self.target_prefill_ms.median / self.mapper_ms.median

    @property
    def cold(self) -> float:
        """The same with the source's prefill counted on the side of the mapper."""
        return self.target_prefill_ms.median / (self.source_prefill_ms.median + self.mapper_ms.median)


def speeds(record: Record) -> list[Speed]:
    """Every length that was measured, ascending.

    Raises:
        KvferryError: the record is not one of latency, or a length lacks one of its times.
    """
    trials = trials_of(record)
    lengths = sorted({length for what, length in trials if what != LOAD})
    return [_speed(record, trials, length) for length in lengths]


def _speed(record: Record, trials: Trials, length: int) -> Speed:
    """Raises KvferryError if the numbers of trials differ: those of a round belong together."""
    own = [trials.get((what, length), []) for what in (MAPPER, SOURCE_PREFILL, TARGET_PREFILL)]
    if len({len(times) for times in own}) != 1:
        raise KvferryError(
            f"{record.pair} {record.system}: the {LATENCY} record has not as many trials of mapper and prefills at {length:,} "
            "tokens; delete it and run again"
        )
    return Speed(length, len(own[0]), *map(Spread.over, own))


def cold_ms(record: Record) -> dict[int, Spread]:
    """Source prefill and mapper together, by length: added trial by trial, as they were timed in the same rounds."""
    trials = trials_of(record)
    return {
        own.length: Spread.over(np.add(trials[SOURCE_PREFILL, own.length], trials[MAPPER, own.length]).tolist())
        for own in speeds(record)
    }


def pays_from(measured: Sequence[Speed], way: Way) -> int | None:
    """The least measured length from which on the target's prefill takes longer at every one; None if not at the longest."""
    found = None
    for own in sorted(measured, key=lambda own: own.length, reverse=True):
        if getattr(own, way) <= 1:
            break
        found = own.length
    return found


def load_ms(record: Record) -> Spread:
    """Reading the mapper from disk, checks included.

    Raises:
        KvferryError: the record does not say.
    """
    trials = trials_of(record).get((LOAD, 0))
    if not trials:
        raise KvferryError(
            f"{record.pair} {record.system}: the {LATENCY} record has no time of loading; delete it and run again"
        )
    return Spread.over(trials)


def trials_of(record: Record) -> Trials:
    """Milliseconds by (what, length in tokens), in the order of the rounds.

    Raises:
        KvferryError: an id is not of the form `what/length/trial`.
    """
    found: Trials = {}
    for item in record.items:
        what, _, rest = item.id.partition("/")
        length, _, trial = rest.partition("/")
        if not (length.isdigit() and trial.isdigit()):
            raise KvferryError(
                f"{record.pair} {record.system}: item {item.id!r} of the {record.benchmark} record is no trial "
                "(what/length/trial); delete it and run again"
            )
        found.setdefault((what, int(length)), []).append(item.score)
    return found


def of_kind(results: Results, name: str) -> Iterator[tuple[Pair, str, Record]]:
    """Pair, variant and record of every record of this name: pairs in the order of the report, variants in the config's."""
    order: Mapping[str, int] = {variant: number for number, variant in enumerate(results.variants)}
    for pair in results.pairs:
        own = [system for of, system, benchmark in results.transfers if of == pair.name and benchmark == name]
        for system in sorted(own, key=lambda system: (order.get(system, len(order)), system)):
            yield pair, system, results.transfers[pair.name, system, name]
