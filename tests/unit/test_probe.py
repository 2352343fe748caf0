"""The probe against scikit-learn's least squares, one head at a time, on the rows of tiny dumps."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from small_fits import SIDES, dump_of

from kvferry.fit.moments import Moments
from kvferry.fit.pair import PROBED, Extent, PairMoments, accumulate
from kvferry.fit.probe import probe
from kvferry.fit.rows import paired_shards

GEOMETRIES = {
    "small": {"layers": 2, "kv_heads": 2, "head_dim": 4},
    "big": {"layers": 3, "kv_heads": 4, "head_dim": 8},
    "few": {"layers": 2, "kv_heads": 1, "head_dim": 8},
}


@pytest.fixture(scope="module")
def dumps(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dumps")
    return {
        name: dump_of(tiny_model("llama", seed=seed, heads=4, **geometry), directory, name)
        for seed, (name, geometry) in enumerate(GEOMETRIES.items())
    }


def summed(source, target, k="all"):
    """Moments over all columns, for k = "all", or a head at a time, for a small k."""
    return accumulate(source, target, Extent(len(SIDES["fit"]), 0, k, 1000))


def rows_of(source, target):
    """For each kind the fit rows of both dumps, float64 `[rows, layers, kv_heads, head_dim]`."""
    pairs = list(paired_shards(source, target, "fit"))

    def parts(role, kind):
        shards = [pair[role] for pair in pairs]
        layers = range(len(shards[0].keys))
        read = {
            "k_rope": lambda shard, layer: shard.keys[layer],
            "k_stripped": lambda shard, layer: shard.stripped_keys(layer),
            "v": lambda shard, layer: shard.values[layer],
        }[kind]
        return torch.stack([torch.cat([read(shard, layer) for shard in shards]) for layer in layers], 1).double()

    return {kind: (parts(0, kind), parts(1, kind)) for kind in PROBED}


def in_float64(rows, source, target):
    """Moments of rows in float64, so that what is tested is the probe and not the rounding of float32 products."""
    x_rope, y_rope = rows["k_rope"]
    heads = y_rope.shape[2]
    full = {kind: Moments.of(*(part.flatten(1) for part in rows[of])) for kind, of in (("k", "k_stripped"), ("v", "v"))}
    rope = [
        Moments.of(x_rope[:, :, head * x_rope.shape[2] // heads].flatten(1), y_rope[:, :, head].flatten(1))
        for head in range(heads)
    ]
    return PairMoments(GEOMETRIES[source], GEOMETRIES[target], len(x_rope), full, None, {"k_rope": rope})


def reference(x, y):
    """R² [source layer, target layer] by scikit-learn: a regression a head, pooled over coordinates, mean over heads."""
    out = np.zeros((x.shape[1], y.shape[1]))
    heads = y.shape[2]
    for own, other in np.ndindex(out.shape):
        scores = []
        for head in range(heads):
            features, truth = x[:, own, head * x.shape[2] // heads].numpy(), y[:, other, head].numpy()
            errors = truth - LinearRegression().fit(features, truth).predict(features)
            scores.append(1 - (errors**2).sum() / ((truth - truth.mean(0)) ** 2).sum())
        out[own, other] = np.mean(scores)
    return out


def grid(table, kind):
    return table[table["kind"] == kind].pivot(index="source_layer", columns="target_layer", values="r2").to_numpy()


PAIRS = [("small", "big"), ("big", "few"), ("big", "big")]


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("kind", PROBED)
def test_r2_is_that_of_scikit_learn(dumps, source, target, kind):
    rows = rows_of(dumps[source], dumps[target])
    wanted = reference(*rows[kind])
    found = grid(probe(in_float64(rows, source, target)), kind)
    assert found.shape == (GEOMETRIES[source]["layers"], GEOMETRIES[target]["layers"])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("kind", PROBED)
@pytest.mark.parametrize("k", [1, "all"], ids=["heads alone", "all columns"])
def test_r2_from_accumulated_moments_is_that_of_scikit_learn_but_for_float32_products(dumps, source, target, kind, k):
    moments = summed(dumps[source], dumps[target], k)
    assert bool(moments.full) == (k == "all")
    found = grid(probe(moments), kind)
    np.testing.assert_allclose(found, reference(*rows_of(dumps[source], dumps[target])[kind]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", PROBED)
def test_a_layer_explains_itself_and_no_other_so_well(dumps, kind):
    found = grid(probe(summed(dumps["big"], dumps["big"])), kind)
    np.testing.assert_allclose(found.diagonal(), 1, rtol=0, atol=1e-6)
    assert found[~np.eye(3, dtype=bool)].max() < 0.999


def test_stripped_keys_and_keys_with_rope_are_not_taken_for_each_other(dumps):
    table = probe(summed(dumps["small"], dumps["big"]))
    assert np.abs(grid(table, "k_rope") - grid(table, "k_stripped")).max() > 1e-3


def test_the_table_has_a_row_for_every_kind_and_pair_of_layers(dumps):
    table = probe(summed(dumps["small"], dumps["big"]))
    assert list(table.columns) == ["kind", "source_layer", "target_layer", "r2", "n", "p"]
    assert len(table) == len(table.drop_duplicates(["kind", "source_layer", "target_layer"])) == len(PROBED) * 2 * 3
    assert set(table["n"]) == {SIDES["fit"].numel()}
    assert set(table["p"]) == {GEOMETRIES["small"]["head_dim"]}
    assert table["r2"].between(0, 1).all()


def test_features_that_repeat_each_other_are_not_counted_twice():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(50, 1, 1, 2, generator=random).double()
    y = torch.randn(50, 1, 1, 2, generator=random).double() + x
    geometries = [{"layers": 1, "kv_heads": 1, "head_dim": dim} for dim in (4, 2)]
    repeated = Moments.of(torch.cat([x, x], -1).flatten(1), y.flatten(1))
    full = {"k": repeated, "v": repeated}
    table = probe(PairMoments(*geometries, len(x), full, None, {"k_rope": [repeated]}))
    np.testing.assert_allclose(table["r2"], reference(x, y).item(), rtol=0, atol=1e-8)
