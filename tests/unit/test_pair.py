"""Moments of two dumps are those of plain forwards, rows of first positions apart or not; altered files are refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_fits import HOW, SIDES, dump_of, farthest, flip_a_byte, plain_cache, worst

from kvferry.errors import KvferryError
from kvferry.files import read_json, sha256_file
from kvferry.fit import pair
from kvferry.fit.moments import FIELDS
from kvferry.fit.pair import KINDS, PROBED, Extent, accumulate, load_moments, save_moments
from kvferry.fit.rows import features, paired_shards
from kvferry.fit.weights import RowRule

COUNT = len(SIDES["fit"])
EARLY = 5
PLENTY = 1000
# Float32 products of the same rows, cut in other places.
ROUNDING = 1e-6
RULES = {
    "uniform": RowRule(),
    "sink": RowRule("sink", 4, 16.0),
    "left out": RowRule(left_out=3),
    "sink and left out": RowRule("sink", 5, 2.0, left_out=2),
}


@pytest.fixture(scope="module")
def models(tiny_model):
    return tiny_model("llama", 2, seed=1), tiny_model("llama", 3, seed=2, kv_heads=4)


@pytest.fixture(scope="module")
def dumps(models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dumps")
    return [dump_of(model, directory, name) for model, name in zip(models, ("small", "big"), strict=True)]


@pytest.fixture(scope="module")
def moments(dumps):
    """Over all columns, with rows of the first positions apart."""
    return accumulate(*dumps, Extent(COUNT, EARLY, "all", PLENTY))


@pytest.fixture(scope="module")
def narrow(dumps):
    """Without moments over all columns, which for one source layer are dearer than layer by layer."""
    return accumulate(*dumps, Extent(COUNT, EARLY, 1, PLENTY))


def fit_rows(dumps, kind, coupled=False):
    """Features and outputs of all fit rows, and positions."""
    pairs = list(paired_shards(*dumps, "fit"))
    assert len(pairs) == 2
    x, y = (
        torch.cat([features(shards[role], kind, list(range(len(shards[role].keys))), coupled) for shards in pairs])
        for role in (0, 1)
    )
    return x, y, torch.cat([own.positions for own, _ in pairs])


def test_moments_of_two_dumps_are_those_of_plain_forwards(models, moments):
    (rope_x, k_x, v_x), (rope_y, k_y, v_y) = (plain_cache(model, SIDES["fit"]) for model in models)
    assert moments.rows == SIDES["fit"].numel()
    # float32 forwards of another batch size, stripping and products, so 1e-4 of the largest entry; another order of columns,
    # another head or a key too few would be wrong in the first digit.
    for kind, x, y in (("k", k_x, k_y), ("v", v_x, v_y)):
        whole = moments.weighed(kind, RowRule())
        assert whole.n == moments.rows
        assert worst(whole, x.flatten(1), y.flatten(1)) < 1e-4
    assert len(moments.of_heads("k_rope")) == 4
    for head, part in enumerate(moments.of_heads("k_rope")):
        assert worst(part, rope_x[:, :, head // 2].flatten(1), rope_y[:, :, head].flatten(1)) < 1e-4


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_weighed_moments_are_direct_weighted_sums_over_the_rows(dumps, moments, kind, rule):
    x, y, positions = fit_rows(dumps, kind)
    weights = RULES[rule].by_position(positions)
    weighed = moments.weighed(kind, RULES[rule])
    assert weighed.n == pytest.approx(float(weights.sum()))
    assert worst(weighed, x, y, weights) < ROUNDING


@pytest.mark.parametrize("rule", RULES)
def test_weighing_leaves_the_moments_as_they_were(moments, rule):
    before = moments.full["k"].copy()
    moments.weighed("k", RULES[rule])
    assert all(torch.equal(getattr(moments.full["k"], name), getattr(before, name)) for name in FIELDS)


@pytest.mark.parametrize("early", [0, 1, 24])
def test_rows_kept_apart_change_no_total(dumps, moments, early):
    other = accumulate(*dumps, Extent(COUNT, early, "all", PLENTY))
    assert (other.rows, other.apart) == (moments.rows, early)
    assert (other.early is None) == (early == 0)
    for kind in KINDS:
        assert farthest(other.weighed(kind, RowRule()), moments.weighed(kind, RowRule())) < ROUNDING


def test_rows_apart_are_those_before_the_position(dumps, moments):
    assert moments.early.positions.tolist() == list(range(EARLY)) * COUNT
    for kind in KINDS:
        x, y, positions = fit_rows(dumps, kind)
        assert torch.equal(moments.early.x[kind], x[positions < EARLY])
        assert torch.equal(moments.early.y[kind], y[positions < EARLY])


@pytest.mark.parametrize("rule", [RowRule("sink", EARLY + 1, 2.0), RowRule(left_out=EARLY + 1)])
def test_a_rule_that_reaches_further_than_what_was_kept_apart_is_refused(moments, rule):
    with pytest.raises(KvferryError, match="moments keep 5 first positions apart, 6 are asked for; sum them again"):
        moments.weighed("k", rule)


@pytest.mark.parametrize("count", [3, 8, 9])
def test_fewer_sequences_are_as_a_dump_of_just_these(models, dumps, tmp_path, count):
    sides = SIDES | {"fit": SIDES["fit"][:count]}
    short = [dump_of(model, tmp_path, name, sides=sides) for model, name in zip(models, ("small", "big"), strict=True)]
    found, wanted = (accumulate(*own, Extent(count, EARLY, "all", PLENTY)) for own in (dumps, short))
    assert found.rows == wanted.rows == count * SIDES["fit"].shape[1]
    for kind in KINDS:
        assert farthest(found.weighed(kind, RULES["sink"]), wanted.weighed(kind, RULES["sink"])) < ROUNDING
    for one, other in zip(found.of_heads("k_rope"), wanted.of_heads("k_rope"), strict=True):
        assert farthest(one, other) < ROUNDING


def test_moments_know_both_geometries(moments):
    assert moments.source == {"layers": 2, "kv_heads": 2, "head_dim": 8}
    assert moments.target == {"layers": 3, "kv_heads": 4, "head_dim": 8}


def test_held_out_rows_are_not_in_the_moments(models, dumps, moments, tmp_path):
    sides = {"fit": SIDES["fit"], "held_out": SIDES["held_out"] + 1}
    others = [dump_of(model, tmp_path, name, sides=sides) for model, name in zip(models, ("small", "big"), strict=True)]
    again = accumulate(*others, Extent(COUNT, EARLY, "all", PLENTY))
    assert torch.equal(again.full["k"].xx, moments.full["k"].xx)


# All columns of both kinds need 861,696 bytes, and less arithmetic than all source layers for each target layer would.
@pytest.mark.parametrize(("k", "memory", "full"), [("all", 861_696, True), ("all", 861_695, False), (1, 10**9, False)])
def test_without_the_memory_or_where_it_is_dearer_heads_alone_are_summed(dumps, monkeypatch, k, memory, full):
    monkeypatch.setattr(pair, "MB", 1)
    moments = accumulate(*dumps, Extent(COUNT, EARLY, k, memory))
    assert sorted(moments.full) == (sorted(KINDS) if full else [])
    assert sorted(moments.heads) == (["k_rope"] if full else sorted(PROBED))
    assert moments.apart == (EARLY if full else 0)
    assert (moments.early is not None) == full
    assert moments.rows == SIDES["fit"].numel()


@pytest.mark.parametrize("kind", PROBED)
def test_heads_alone_are_those_cut_from_all_columns(moments, narrow, kind):
    pairs = zip(narrow.of_heads(kind), moments.of_heads(kind), strict=True)
    assert max(farthest(one, other) for one, other in pairs) < ROUNDING


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": "another"}, "the models have different tokenizers"),
        ({"how": HOW | {"stride": 2}}, "dumped with different calibration settings"),
        ({"sides": SIDES | {"fit": SIDES["fit"].roll(1)}}, "rows are of different tokens"),
    ],
    ids=["tokenizer", "settings", "tokens"],
)
def test_dumps_that_are_no_pair_are_not_summed(models, dumps, tmp_path, changes, message):
    other = dump_of(models[1], tmp_path, "big", **changes)
    with pytest.raises(KvferryError, match=message) as caught:
        accumulate(dumps[0], other, Extent(COUNT, 0, "all", PLENTY))
    assert str(caught.value).startswith(f"{dumps[0]} and {other}: ")


def test_more_sequences_than_there_are_are_not_summed(dumps):
    with pytest.raises(KvferryError, match="holds 10 sequences, 11 are asked for"):
        accumulate(*dumps, Extent(COUNT + 1, 0, "all", PLENTY))


@pytest.mark.parametrize("which", ["moments", "narrow"])
def test_moments_come_back_from_disk_as_they_were(request, tmp_path, which):
    moments = request.getfixturevalue(which)
    save_moments(moments, tmp_path / "moments.safetensors")
    back = load_moments(tmp_path / "moments.safetensors")
    for name in ("source", "target", "rows", "apart"):
        assert getattr(back, name) == getattr(moments, name)
    assert list(back.full) == list(moments.full)
    assert sorted(back.heads) == sorted(moments.heads)
    pairs = [(back.full[kind], moments.full[kind]) for kind in moments.full]
    for kind in moments.heads:
        pairs += zip(back.heads[kind], moments.heads[kind], strict=True)
    for one, other in pairs:
        assert one.n == other.n
        for name in FIELDS:
            assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert sorted(file.name for file in tmp_path.iterdir()) == ["moments.json", "moments.safetensors"]


@pytest.mark.parametrize("rule", RULES)
def test_moments_from_disk_weigh_as_before(moments, tmp_path, rule):
    save_moments(moments, tmp_path / "moments.safetensors")
    back = load_moments(tmp_path / "moments.safetensors")
    for kind in KINDS:
        assert farthest(back.weighed(kind, RULES[rule]), moments.weighed(kind, RULES[rule])) == 0


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
    assert facts["rows"] == moments.rows
