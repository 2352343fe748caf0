"""One record from those of the shards of a benchmark: the same as if one job had answered all items. Knows records only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvferry.errors import KvferryError
from kvferry.records import Item, Record, read_record

SHARD = "shard"
# Of settings: what may differ between the machines of a cluster without making another measurement.
MACHINE = ("device_name", "threads")


def merge_shards(paths: Sequence[Path], output: Path) -> None:
    """Write the record of all shards; `paths` in order of their numbers.

    Raises:
        KvferryError: a record is unreadable, is another shard than its place says, or differs from the first in anything but its
            items, or an item was answered twice.
    """
    shards = [read_record(path) for path in paths]
    for number, (path, shard) in enumerate(zip(paths, shards, strict=True)):
        if shard.settings.get(SHARD) != [number, len(paths)]:
            raise KvferryError(f"{path}: is not shard {number} of {len(paths)}; delete it and run again")
        if _common(shard) != _common(shards[0]):
            raise KvferryError(
                f"{path} and {paths[0]}: were answered under other conditions; delete both and run again"
            )
    items = [item for shard in shards for item in shard.items]
    if len({item.id for item in items}) != len(items):
        raise KvferryError(f"{paths[0].parent}: an item was answered in two shards; delete the folder and run again")
    _merged(shards, items).write(output)


def _said(shards: Sequence[Record], key: str) -> Any:
    """The value that all shards have, or the different ones in words."""
    values = list(dict.fromkeys(shard.settings.get(key) for shard in shards))
    return values[0] if len(values) == 1 else ", ".join(map(str, values))


def _common(shard: Record) -> Record:
    """What all shards of a record have in common; they may come from different machines."""
    settings = {key: value for key, value in shard.settings.items() if key not in (SHARD, *MACHINE)}
    return replace(shard, items=[], settings=settings, seconds=0.0, peak_memory_bytes=0, commit="")


def _merged(shards: Sequence[Record], items: list[Item]) -> Record:
    """Items in the order of the shards, which is that of the whole; the time of all, the memory of the largest, every machine."""
    common = _common(shards[0])
    machines = {key: _said(shards, key) for key in MACHINE if key in shards[0].settings}
    return replace(
        common,
        items=items,
        settings=common.settings | machines,
        commit=shards[0].commit,
        seconds=sum(shard.seconds for shard in shards),
        peak_memory_bytes=max(shard.peak_memory_bytes for shard in shards),
    )
