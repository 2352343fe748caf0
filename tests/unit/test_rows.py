"""Rows of two dumps are those of the same tokens, columns by layer, head and coordinate; what is no pair is refused."""

import pytest
import torch
from small_fits import HOW, LENGTH, SIDES, dump_of, flip_a_byte

from kvferry.errors import KvferryError
from kvferry.files import write_json
from kvferry.fit.rows import (
    check_match,
    features,
    first_sequences,
    head_columns,
    layer_columns,
    paired_shards,
    source_head,
)
from kvferry.kv.dump import INDEX, read_index

GEOMETRY = {"layers": 3, "kv_heads": 4, "head_dim": 8}


@pytest.fixture(scope="module")
def models(tiny_model):
    return tiny_model("llama", 2, seed=1), tiny_model("llama", 3, seed=2, kv_heads=4)


@pytest.fixture(scope="module")
def dumps(models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dumps")
    return [dump_of(model, directory, name) for model, name in zip(models, ("small", "big"), strict=True)]


@pytest.fixture(scope="module")
def shard(dumps):
    return next(paired_shards(*dumps, "fit"))[1]


@pytest.mark.parametrize(
    ("own", "other", "heads"), [(3, 3, [0, 1, 2]), (2, 4, [0, 0, 1, 1]), (4, 2, [0, 2]), (1, 3, [0, 0, 0])]
)
def test_each_target_head_has_a_source_head(own, other, heads):
    assert [source_head(head, {"kv_heads": own}, {"kv_heads": other}) for head in range(other)] == heads


@pytest.mark.parametrize(("kind", "coupled"), [("k", False), ("k", True), ("v", False), ("v", True)])
def test_features_hold_the_layers_as_they_were_asked_for(shard, kind, coupled):
    found = features(shard, kind, [2, 0], coupled)
    assert found.dtype == torch.float32
    assert found.shape == (len(shard.ids), 2 * 4 * 8)
    for place, layer in enumerate((2, 0)):
        whole = {("k", False): shard.stripped_keys(layer), ("k", True): shard.keys[layer]}
        wanted = whole.get((kind, coupled), shard.values[layer])
        for head in range(4):
            start = place * 32 + head * 8
            assert torch.equal(found[:, start : start + 8], wanted[:, head])


def test_columns_of_layers_and_heads_cut_out_just_these(shard):
    whole = features(shard, "k", [0, 1, 2])
    assert torch.equal(whole[:, layer_columns(GEOMETRY, [2, 0])], features(shard, "k", [2, 0]))
    for head in range(4):
        wanted = torch.cat([shard.stripped_keys(layer)[:, head] for layer in range(2)], 1)
        assert torch.equal(whole[:, head_columns(GEOMETRY, head, 2)], wanted)


def test_a_pair_is_described_by_its_indices(dumps):
    indices = check_match(*dumps)
    assert indices == {"source": read_index(dumps[0]), "target": read_index(dumps[1])}


@pytest.mark.parametrize("side", ["fit", "held_out"])
def test_paired_shards_hold_every_row_of_a_side_once(dumps, side):
    pairs = list(paired_shards(*dumps, side))
    assert len(pairs) == 2
    for role in (0, 1):
        assert torch.equal(torch.cat([pair[role].ids for pair in pairs]), SIDES[side].flatten())


# shards hold 8 sequences
@pytest.mark.parametrize("count", [1, 7, 8, 9, 10])
def test_the_first_sequences_are_those_and_no_more(dumps, count):
    pieces = list(first_sequences(*dumps, count))
    assert len(pieces) == (1 if count <= 8 else 2)
    for role in (0, 1):
        ids = torch.cat([piece[role].ids[piece[2]] for piece in pieces])
        assert torch.equal(ids, SIDES["fit"][:count].flatten())


def test_more_sequences_than_there_are_are_refused(dumps):
    with pytest.raises(KvferryError, match="holds 10 sequences, 11 are asked for; delete it and run again") as caught:
        list(first_sequences(*dumps, 11))
    assert str(dumps[0]) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "another"}, "the models have different tokenizers"),
        ({"how": HOW | {"stride": 2}}, "dumped with different calibration settings"),
    ],
    ids=["tokenizer", "settings"],
)
def test_dumps_that_do_not_match_are_refused_and_both_named(models, dumps, tmp_path, changes, message):
    other = dump_of(models[1], tmp_path, "big", **changes)
    with pytest.raises(KvferryError, match=message) as caught:
        check_match(dumps[0], other)
    assert str(caught.value).startswith(f"{dumps[0]} and {other}: ")


def test_rows_of_other_tokens_are_refused_and_both_dumps_named(models, dumps, tmp_path):
    other = dump_of(models[1], tmp_path, "big", sides=SIDES | {"fit": SIDES["fit"].roll(1)})
    with pytest.raises(KvferryError, match="rows are of different tokens") as caught:
        list(paired_shards(dumps[0], other, "fit"))
    assert str(caught.value).startswith(f"{dumps[0]} and {other}: ")


def test_the_same_tokens_at_other_positions_are_no_pair(models, tmp_path):
    same = torch.full((2, LENGTH), 7)
    sides = ({"fit": same}, {"fit": same.view(4, -1)})
    dumps = [dump_of(model, tmp_path, str(i), sides=sides[i]) for i, model in enumerate(models)]
    with pytest.raises(KvferryError, match="rows are of different tokens"):
        list(paired_shards(*dumps, "fit"))


def test_an_altered_dump_is_refused(models, dumps, tmp_path):
    other = dump_of(models[1], tmp_path, "big")
    flip_a_byte(other / "fit-00001.safetensors")
    with pytest.raises(KvferryError, match=r"fit-00001\.safetensors: missing or altered since the dump"):
        list(paired_shards(dumps[0], other, "fit"))


def test_a_dump_with_a_shard_less_is_refused_and_not_paired_in_part(models, dumps, tmp_path):
    other = dump_of(models[1], tmp_path, "big")
    index = read_index(other)
    write_json(other / INDEX, index | {"shards": index["shards"][1:]})
    with pytest.raises(KvferryError, match="have different numbers of shards; delete both and run again"):
        next(paired_shards(dumps[0], other, "fit"))
