"""Merging shards: the whole of them, of one kind, each once."""

from dataclasses import replace

import pytest

from kvferry.errors import KvferryError
from kvferry.evaluate.shards import merge_shards
from kvferry.records import Item, Record, read_record

RECORD = Record(
    "ridge", "big", "mmlu", "acc", [Item("a/1", 1.0), Item("a/2", 0.0)], settings={"shard": [0, 2]}, seconds=2.0
)
SECOND = replace(RECORD, items=[Item("b/0", 1.0)], settings={"shard": [1, 2]}, seconds=3.0, peak_memory_bytes=7)


@pytest.fixture
def merged(tmp_path):
    """Merges these records; returns the result."""

    def go(*records):
        paths = [tmp_path / f"{number}.json" for number in range(len(records))]
        for path, record in zip(paths, records, strict=True):
            record.write(path)
        merge_shards(paths, tmp_path / "whole.json")
        return read_record(tmp_path / "whole.json")

    return go


def test_items_keep_their_order_and_times_add_up(merged):
    whole = merged(RECORD, SECOND)
    assert [item.id for item in whole.items] == ["a/1", "a/2", "b/0"]
    assert (whole.seconds, whole.peak_memory_bytes, whole.settings) == (5.0, 7, {})
    assert whole.value == pytest.approx(2 / 3)


def test_shards_of_different_machines_are_merged_and_all_are_named(merged):
    machines = [{"device_name": name, "threads": 4} for name in ("one", "other")]
    parts = [replace(part, settings=part.settings | own) for part, own in zip((RECORD, SECOND), machines, strict=True)]
    assert merged(*parts).settings == {"device_name": "one, other", "threads": 4}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (replace(SECOND, settings={"shard": [0, 2]}), "1.json: is not shard 1 of 2"),
        (replace(SECOND, settings={"shard": [1, 3]}), "1.json: is not shard 1 of 2"),
        (replace(SECOND, settings={}), "1.json: is not shard 1 of 2"),
        (replace(SECOND, system="ols"), "under other conditions"),
        (replace(SECOND, settings={"shard": [1, 2], "hold_back": 4}), "under other conditions"),
        (replace(SECOND, items=[Item("a/2", 0.0)]), "an item was answered in two shards"),
    ],
)
def test_what_is_no_part_of_the_whole_is_refused(second, said, merged, tmp_path):
    with pytest.raises(KvferryError, match=said):
        merged(RECORD, second)
    assert not (tmp_path / "whole.json").exists()
