"""Which record a system has, and on which items systems are compared: always the same ones, matched by id.

Knows records and how samples are nested (a smaller limit gives a subset). Does not know statistics or tables.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvferry.errors import KvferryError
from kvferry.records import IDENTITY, NATIVE_INJECTED, Record
from kvferry.report.inputs import SOURCE, Pair, Results

TARGET = "target"
OF_TARGET = (NATIVE_INJECTED, IDENTITY)  # controls that a target model has whatever the source is
CHUNK = re.compile(r"chunk-(\d+)-")

Items = frozenset[str]


def record_of(results: Results, pair: Pair, system: str, benchmark: str) -> tuple[str, Record]:
    """The record of a system and its place under the results root; `system` may be TARGET, SOURCE or one of OF_TARGET.

    Raises:
        KvferryError: that system was not run on that benchmark.
    """
    place, record = _looked_up(results, pair, system, benchmark)
    if record is None:
        raise KvferryError(f"{place}: there is no such record; run its evaluation first")
    return place, record


def has_record(results: Results, pair: Pair, system: str, benchmark: str) -> bool:
    """Whether a system, as in `record_of`, was run on a benchmark."""
    return _looked_up(results, pair, system, benchmark)[1] is not None


def _looked_up(results: Results, pair: Pair, system: str, benchmark: str) -> tuple[str, Record | None]:
    if system in (TARGET, SOURCE):
        model = pair.target if system == TARGET else pair.source
        return f"records/native/{model}/{benchmark}.json", results.native.get((model, benchmark))
    if system in OF_TARGET:
        place = f"records/{system}/{pair.target}/{benchmark}.json"
        return place, results.injected.get((system, pair.target, benchmark))
    place = f"records/pairs/{pair.name}/{system}/{benchmark}.json"
    return place, results.transfers.get((pair.name, system, benchmark))


def shared_items(results: Results, pair: Pair, systems: Sequence[str], benchmark: str) -> Items:
    """The items that all of these systems answered: those of the record with the fewest.

    Raises:
        KvferryError: a record is missing, or one lacks an item of the smallest; both places are named.
    """
    named = [record_of(results, pair, system, benchmark) for system in systems]
    smallest, fewest = min(named, key=lambda entry: entry[1].n)
    items = _ids(fewest)
    for place, record in named:
        if not items <= _ids(record):
            raise _other_items(place, smallest, benchmark)
    return items


def limited(record: Record, items: Items) -> Record:
    """The record of these items alone, in its own order."""
    return replace(record, items=[item for item in record.items if item.id in items])


def aligned_scores(named: Sequence[tuple[str, Record]], items: Items | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Scores [records, items] and weights [items], item by item in the order of the first record.

    Compared are `items`, or all items of the last record; the other records may hold more.

    Raises:
        KvferryError: the records differ in metric or weights, lack one of the items, or repeat an id; both places are
            named.
    """
    (first_place, first), *others = named
    compared = _ids(named[-1][1]) if items is None else items
    chosen = [item for item in first.items if item.id in compared]
    if len(_ids(first)) != first.n:
        raise KvferryError(f"{first_place}: an item id occurs twice; delete it and run again")
    if len(chosen) != len(compared):
        raise _other_items(first_place, named[-1][0], first.benchmark)
    rows = [[item.score for item in chosen]]
    for place, other in others:
        by_id = {item.id: item for item in other.items}
        same = len(by_id) == other.n and compared <= by_id.keys() and other.metric == first.metric
        if not same or any(by_id[item.id].weight != item.weight for item in chosen):
            raise _other_items(first_place, place, first.benchmark)
        rows.append([by_id[item.id].score for item in chosen])
    return np.array(rows, dtype=float), np.array([item.weight for item in chosen])


def every_other_chunk(items: Items, remainder: int) -> Items:
    """The chunks with an even (`remainder` 0) or an odd (1) number.

    Raises:
        KvferryError: an id is not that of a chunk, or there is no such chunk.
    """
    half = frozenset(name for name in items if _number(name) % 2 == remainder)
    if not half:
        raise KvferryError("perplexity.chunks: choosing on half of the chunks needs at least two; set a larger number")
    return half


def _number(name: str) -> int:
    found = CHUNK.match(name)
    if found is None:
        raise KvferryError(
            f"item {name!r} of a record is no chunk (chunk-NUMBER-HASH); delete the record and run again"
        )
    return int(found[1])


def _ids(record: Record) -> Items:
    return frozenset(item.id for item in record.items)


def _other_items(first: str, second: str, benchmark: str) -> KvferryError:
    return KvferryError(
        f"{first} and {second}: {benchmark} was answered on different items or by another metric, "
        "so they cannot be compared; delete both and run again"
    )
