"""Moments against direct sums in float64, in any sharding and order; and dumps that cannot be a pair are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvferry.errors import KvferryError
from kvferry.files import read_json, sha256_file, write_json
from kvferry.fit.moments import (
    FIELDS,
    Moments,
    accumulate,
    check_match,
    joined,
    load_moments,
    paired_shards,
    save_moments,
    source_head,
    stripped,
)
from kvferry.kv.dump import INDEX, write_dump
from kvferry.kv.rope import rotation

HOW = {"stride": 1, "seed": 3}
LENGTH = 24
SIDES = {
    "fit": torch.randint(3, 260, (10, LENGTH), generator=torch.Generator().manual_seed(1)),
    "held_out": torch.randint(3, 260, (9, LENGTH), generator=torch.Generator().manual_seed(2)),
}


def dump_of(model, directory, name="model", how=HOW, sides=SIDES, tokenizer="same"):
    """Dump `model` to `directory / name`, with a card as far as a dump needs one."""
    config = model.config
    card = {
        "model": name,
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "config_sha256": f"config of {name}",
        "tokenizer_sha256": tokenizer,
        "weights_id": f"weights of {name}",
    }
    write_dump(model, card, sides, how, directory / name)
    return directory / name


def direct(x, y):
    """The definition, in float64: mean first, then centred products."""
    x, y = x.double(), y.double()
    centred_x, centred_y = x - x.mean(0), y - y.mean(0)
    return {
        "mean_x": x.mean(0),
        "mean_y": y.mean(0),
        "xx": centred_x.T @ centred_x,
        "xy": centred_x.T @ centred_y,
        "yy": centred_y.square().sum(0),
    }


def worst(moments, x, y):
    """Largest error of any field against the definition, relative to the largest entry of the field."""
    wanted = direct(x, y)
    return max(float((getattr(moments, name) - wanted[name]).abs().max() / wanted[name].abs().max()) for name in FIELDS)


def random_rows(n, p=5, q=3, seed=0, dtype=torch.float64):
    """Correlated rows x `[n, p]`, y `[n, q]` with means that are not zero."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, p, generator=random, dtype=torch.float64) @ torch.randn(p, p, generator=random).double() + 2
    y = x @ torch.randn(p, q, generator=random).double() + torch.randn(n, q, generator=random, dtype=torch.float64) - 3
    return x.to(dtype), y.to(dtype)


def added(parts):
    moments = Moments.empty(parts[0][0].shape[1], parts[0][1].shape[1])
    for x, y in parts:
        moments.add(x, y)
    return moments


def test_moments_of_small_whole_numbers_are_exact_in_float32():
    # 16 rows of whole numbers below 8: means are multiples of 1/16, products of centred values need 14 bits and their
    # sums 18, so float32, with its 24, rounds nowhere and the sums must be those of float64.
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 8, (48, width), generator=random).float() for width in (5, 3))
    moments = added(list(zip(x.split(16), y.split(16), strict=True)))
    assert moments.n == 48
    assert worst(moments, x, y) < 1e-10


@given(st.lists(st.integers(1, 7), min_size=1, max_size=8), st.integers(0, 1000), st.randoms())
def test_any_sharding_and_order_gives_the_same_moments(sizes, seed, random):
    # Rows in float64, so that products are as precise as sums, and what is left is the algebra of merging.
    x, y = random_rows(sum(sizes) + 1, seed=seed)
    parts = list(zip(x.split([*sizes, 1]), y.split([*sizes, 1]), strict=True))
    random.shuffle(parts)
    moments = added(parts)
    assert moments.n == len(x)
    assert worst(moments, x, y) < 1e-10


@pytest.mark.parametrize("features", [1023, 1025, 2050])
def test_many_columns_are_all_multiplied(features):
    x, y = random_rows(4, p=features)
    assert worst(added([(x, y)]), x, y) < 1e-10


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 1000))
def test_merging_is_adding_the_rows(first, second, seed):
    x, y = random_rows(first + second, seed=seed)
    moments = Moments.of(x[:first], y[:first])
    moments.merge(Moments.of(x[first:], y[first:]))
    assert worst(moments, x, y) < 1e-10


@pytest.mark.parametrize("empty_first", [True, False])
def test_merging_with_no_rows_changes_nothing(empty_first):
    x, y = random_rows(7)
    wanted, full, empty = Moments.of(x, y), Moments.of(x, y), Moments.empty(5, 3)
    moments = empty if empty_first else full
    moments.merge(full if empty_first else empty)
    assert moments.n == 7
    for name in FIELDS:
        assert torch.equal(getattr(moments, name), getattr(wanted, name)), name


def test_no_rows_and_no_rows_are_no_rows():
    moments = Moments.empty(5, 3)
    moments.merge(Moments.empty(5, 3))
    assert moments.n == 0
    assert all(not getattr(moments, name).any() for name in FIELDS)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 1e6])
@pytest.mark.parametrize("chunk", [1, 7, 500])
def test_a_large_mean_costs_no_precision(offset, chunk):
    # float32 rows of spread 1 about `offset`; a raw-moment subtraction in float32 would lose offset² · 6e-8: 6 at 1e4.
    x, y = random_rows(2000, dtype=torch.float32)
    x, y = x + offset, y + offset
    moments = added(list(zip(x.split(chunk), y.split(chunk), strict=True)))
    wanted = direct(x, y)
    for name in ("xx", "xy", "yy"):
        error = (getattr(moments, name) - wanted[name]).abs().max() / wanted[name].abs().max()
        # sums of up to 500 float32 products: 500 · 6e-8 at worst, about its square root in practice
        assert error < 2e-6, name
    assert (moments.mean_x - wanted["mean_x"]).abs().max() < 1e-10 * max(1, abs(offset))


@pytest.mark.parametrize(
    ("own", "other", "heads"), [(3, 3, [0, 1, 2]), (2, 4, [0, 0, 1, 1]), (4, 2, [0, 2]), (1, 3, [0, 0, 0])]
)
def test_each_target_head_has_a_source_head(own, other, heads):
    assert [source_head(head, {"kv_heads": own}, {"kv_heads": other}) for head in range(other)] == heads


@pytest.fixture(scope="module")
def models(tiny_model):
    return tiny_model("llama", 2, seed=1), tiny_model("llama", 3, seed=2, kv_heads=4)


@pytest.fixture(scope="module")
def dumps(models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dumps")
    return [dump_of(model, directory, name) for model, name in zip(models, ("small", "big"), strict=True)]


@pytest.fixture(scope="module")
def moments(dumps):
    return accumulate(*dumps)


def plain_cache(model, ids):
    """Keys with RoPE, keys without and values, float64 `[rows, layers, kv_heads, head_dim]`, from one plain forward."""
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True)["cache"]
    turned = rotation(model, torch.arange(ids.shape[1])[None])
    cos, sin = (table[0].double() for table in (turned.cos, turned.sin))
    keys, values = (
        torch.stack([getattr(layer, kind) for layer in cache.layers]).double().permute(1, 3, 0, 2, 4)
        for kind in ("keys", "values")
    )
    first, second = keys.chunk(2, dim=-1)
    cos, sin = (table[None, :, None, None, : first.shape[-1]] for table in (cos, sin))
    without = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
    return [part.flatten(0, 1) for part in (keys, without, values)]


def test_moments_of_two_dumps_are_those_of_plain_forwards(models, moments):
    (rope_x, k_x, v_x), (rope_y, k_y, v_y) = (plain_cache(model, SIDES["fit"]) for model in models)
    assert moments.k.n == SIDES["fit"].numel()
    # float32 forwards of another batch size, stripping and products, so 1e-4 of the largest entry; another order of columns,
    # another head or a key too few would be wrong in the first digit.
    assert worst(moments.k, k_x.flatten(1), k_y.flatten(1)) < 1e-4
    assert worst(moments.v, v_x.flatten(1), v_y.flatten(1)) < 1e-4
    assert len(moments.k_rope) == 4
    for head, part in enumerate(moments.k_rope):
        assert worst(part, rope_x[:, :, head // 2].flatten(1), rope_y[:, :, head].flatten(1)) < 1e-4


def test_moments_of_two_dumps_are_direct_sums_over_their_rows(dumps, moments):
    pairs = list(paired_shards(*dumps, "fit"))
    assert len(pairs) == 2
    for part, rows in ((moments.k, stripped), (moments.v, lambda shard: joined(shard.values))):
        x, y = (torch.cat([rows(pair[role]) for pair in pairs]) for role in (0, 1))
        assert worst(part, x, y) < 1e-6


def test_moments_know_both_geometries(moments):
    assert moments.source == {"layers": 2, "kv_heads": 2, "head_dim": 8}
    assert moments.target == {"layers": 3, "kv_heads": 4, "head_dim": 8}


def test_held_out_rows_are_not_in_the_moments(models, dumps, moments, tmp_path):
    sides = {"fit": SIDES["fit"], "held_out": SIDES["held_out"] + 1}
    others = [dump_of(model, tmp_path, name, sides=sides) for model, name in zip(models, ("small", "big"), strict=True)]
    assert torch.equal(accumulate(*others).k.xx, moments.k.xx)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "another"}, "the models have different tokenizers"),
        ({"how": {"stride": 2, "seed": 3}}, "dumped with different calibration settings"),
        ({"sides": {"fit": SIDES["fit"].roll(1), "held_out": SIDES["held_out"]}}, "rows are of different tokens"),
    ],
    ids=["tokenizer", "settings", "tokens"],
)
def test_dumps_that_are_no_pair_are_refused_and_both_named(models, dumps, tmp_path, changes, message):
    other = dump_of(models[1], tmp_path, "big", **changes)
    with pytest.raises(KvferryError, match=message) as caught:
        accumulate(dumps[0], other)
    assert str(caught.value).startswith(f"{dumps[0]} and {other}: ")


def test_the_same_tokens_at_other_positions_are_no_pair(models, tmp_path):
    same = torch.full((2, LENGTH), 7)
    sides = ({"fit": same}, {"fit": same.view(4, -1)})
    dumps = [dump_of(model, tmp_path, str(i), sides=sides[i]) for i, model in enumerate(models)]
    with pytest.raises(KvferryError, match="rows are of different tokens"):
        accumulate(*dumps)


def test_a_pair_is_described_by_its_indices(dumps):
    indices = check_match(*dumps)
    assert indices == {"source": read_json(dumps[0] / INDEX), "target": read_json(dumps[1] / INDEX)}


def test_moments_come_back_from_disk_as_they_were(moments, tmp_path):
    save_moments(moments, tmp_path / "moments.safetensors")
    back = load_moments(tmp_path / "moments.safetensors")
    assert (back.source, back.target) == (moments.source, moments.target)
    for one, other in zip([back.k, back.v, *back.k_rope], [moments.k, moments.v, *moments.k_rope], strict=True):
        assert one.n == other.n
        for name in FIELDS:
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert sorted(file.name for file in tmp_path.iterdir()) == ["moments.json", "moments.safetensors"]


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-8])


def change_a_number(path):
    tensors = load_file(path)
    tensors["k.xx"][0, 0] += 1
    save_file(tensors, path)


@pytest.mark.parametrize("alter", [flip_a_byte, cut, change_a_number, lambda path: path.unlink()])
def test_altered_moments_are_refused(moments, tmp_path, alter):
    path = tmp_path / "moments.safetensors"
    save_moments(moments, path)
    alter(path)
    with pytest.raises(KvferryError, match=r"moments\.safetensors: missing or altered since it was written"):
        load_moments(path)


def test_moments_without_their_facts_are_refused(moments, tmp_path):
    path = tmp_path / "moments.safetensors"
    save_moments(moments, path)
    path.with_suffix(".json").unlink()
    with pytest.raises(KvferryError, match=r"moments\.json: unreadable moments"):
        load_moments(path)


def test_the_facts_beside_the_moments_hold_their_checksum(moments, tmp_path):
    path = tmp_path / "moments.safetensors"
    save_moments(moments, path)
    facts = read_json(path.with_suffix(".json"))
    assert facts["sha256"] == sha256_file(path)
    assert facts["rows"] == moments.k.n


def test_an_altered_dump_is_refused(models, tmp_path):
    own, other = (dump_of(model, tmp_path, name) for model, name in zip(models, ("small", "big"), strict=True))
    flip_a_byte(other / "fit-00001.safetensors")
    with pytest.raises(KvferryError, match=r"fit-00001\.safetensors: missing or altered since the dump"):
        accumulate(own, other)


def test_a_dump_with_a_shard_less_is_refused_and_not_paired_in_part(models, tmp_path):
    own, other = (dump_of(model, tmp_path, name) for model, name in zip(models, ("small", "big"), strict=True))
    index = read_json(other / INDEX)
    write_json(other / INDEX, index | {"shards": index["shards"][1:]})
    with pytest.raises((KvferryError, ValueError)):
        accumulate(own, other)
