"""Records come back as they were written, and whatever was tampered with is refused in one line that names the file."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import KvferryError
from kvferry.records import FORMAT, Item, Record, read_record

ITEMS = [Item("a", 1.0, response="Paris"), Item("b", 0.0, response=[-1.5, -2.0]), Item("c", 1.0)]
RECORD = Record(
    system="ridge_k8",
    target="big",
    benchmark="arc_easy",
    metric="acc",
    items=ITEMS,
    pair="small-big",
    source="small",
    chance=0.25,
    seeds={"items": 1},
    settings={"hold_back": 1},
    data={"sha256": "ab"},
    versions={"torch": "2"},
    commit="c0ffee",
    seconds=1.5,
    peak_memory_bytes=1024,
)
scores = st.floats(0, 20, allow_nan=False)
weights = st.floats(0.5, 1000)


def written(tmp_path, record=RECORD):
    path = tmp_path / "record.json"
    record.write(path)
    return path


@pytest.fixture
def raw(tmp_path):
    """What RECORD looks like on disk."""
    return json.loads(written(tmp_path).read_text())


def test_a_record_comes_back_as_it_was(tmp_path):
    assert read_record(written(tmp_path)) == RECORD


@given(
    st.lists(st.builds(Item, st.text(), scores, weights), min_size=1, max_size=6),
    st.sampled_from(["acc", "perplexity"]),
)
def test_any_record_comes_back_as_it_was(tmp_path_factory, items, metric):
    record = Record("target", "big", "prose", metric, items)
    assert read_record(written(tmp_path_factory.mktemp("record"), record)) == record


def test_the_file_states_the_number_of_items_and_their_mean(raw):
    assert raw["n"] == 3
    assert raw["value"] == pytest.approx(2 / 3, rel=1e-15)
    assert raw["format"] == FORMAT


@given(st.lists(st.tuples(scores, weights), min_size=1, max_size=8))
def test_perplexity_is_exp_of_the_mean_weighted_by_tokens(pairs):
    items = [Item(str(number), *pair) for number, pair in enumerate(pairs)]
    total = math.fsum(weight for _, weight in pairs)
    mean = math.fsum(weight / total * score for score, weight in pairs)
    assert Record("target", "big", "prose", "perplexity", items).value == pytest.approx(math.exp(mean), rel=1e-10)


def test_accuracy_is_weighted_too():
    assert Record("target", "big", "mmlu", "acc", [Item("a", 1.0, 3.0), Item("b", 0.0, 1.0)]).value == 0.75


def test_a_value_that_is_not_a_number_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        written(tmp_path, Record("target", "big", "mmlu", "acc", [Item("a", math.nan)]))
    assert list(tmp_path.iterdir()) == []


def item_with(**changes):
    return lambda raw: raw["items"][0].update(changes)


TAMPERINGS = {
    "n is another": lambda raw: raw.update(n=4),
    "n is missing": lambda raw: raw.pop("n"),
    "value is another": lambda raw: raw.update(value=raw["value"] + 1e-6),
    "value is NaN": lambda raw: raw.update(value=math.nan),
    "value is missing": lambda raw: raw.pop("value"),
    "value is null": lambda raw: raw.update(value=None),
    "value is text": lambda raw: raw.update(value="0.667"),
    "an item is missing": lambda raw: raw["items"].pop(),
    "a score is another": item_with(score=0.0),
    "a score is NaN": item_with(score=math.nan),
    "a score is infinite": item_with(score=math.inf),
    "a score is null": item_with(score=None),
    "a score is text": item_with(score="1.0"),
    "a weight is NaN": item_with(weight=math.nan),
    "a weight is null": item_with(weight=None),
    "all weights are zero": lambda raw: [item.update(weight=0.0) for item in raw["items"]],
    "an item has an unknown field": item_with(correct=True),
    "an item lacks its id": lambda raw: raw["items"][0].pop("id"),
    "an item is no object": lambda raw: raw["items"].__setitem__(0, "a"),
    "there are no items": lambda raw: raw.update(items=[], n=0),
    "items are missing": lambda raw: raw.pop("items"),
    "items are null": lambda raw: raw.update(items=None),
    "a field is unknown": lambda raw: raw.update(colour="red"),
    "the metric is missing": lambda raw: raw.pop("metric"),
    "the format is a later one": lambda raw: raw.update(format=FORMAT + 1),
    "the format is null": lambda raw: raw.update(format=None),
}


def refused(path):
    """Whether reading `path` gives one line that names the file and says what to do."""
    with pytest.raises(KvferryError) as caught:
        read_record(path)
    message = str(caught.value)
    return message.startswith(f"{path}: ") and message.endswith("; delete it and run again") and "\n" not in message


@pytest.mark.parametrize("tampering", TAMPERINGS.values(), ids=TAMPERINGS)
def test_a_tampered_record_is_refused(tmp_path, raw, tampering):
    path = tmp_path / "record.json"
    tampering(raw)
    path.write_text(json.dumps(raw))
    assert refused(path)


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"3", b"{}", b"\xff\xfe"])
def test_what_is_no_record_is_refused(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    assert refused(path)


def test_a_missing_record_is_refused(tmp_path):
    assert refused(tmp_path / "record.json")


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_truncated_record_is_refused(tmp_path, kept):
    path = written(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    assert refused(path)
