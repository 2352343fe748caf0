"""The ridge mapper against least squares of numpy and scikit-learn, on data where the answer is known."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from test_moments import HOW, SIDES, dump_of

from kvferry.errors import KvferryError
from kvferry.files import sha256_file, write_json
from kvferry.fit.moments import Moments, PairMoments, accumulate, check_match, paired_shards
from kvferry.fit.ridge import Fit, Penalty, fit_artifact, fit_ridge, held_out_r2, solve
from kvferry.kv.dump import INDEX, read_index
from kvferry.kv.mapper import MANIFEST, WEIGHTS, load_mapper

SOURCE = {"layers": 3, "kv_heads": 2, "head_dim": 2}
TARGET = {"layers": 2, "kv_heads": 3, "head_dim": 2}
SELECTED = [[2, 0], [1, 2]]
KINDS = pytest.mark.parametrize("kind", ["k", "v"])


def width(geometry):
    return geometry["layers"] * geometry["kv_heads"] * geometry["head_dim"]


def random_rows(n=60, seed=0):
    """Source and target rows in float64, of keys and of values, that depend on each other and have means that are not zero."""
    random = torch.Generator().manual_seed(seed)
    rows = {}
    for kind in ("k", "v"):
        x = torch.randn(n, width(SOURCE), generator=random).double() * 2 + 1
        noise = torch.randn(n, width(TARGET), generator=random).double()
        rows[kind] = x, x @ torch.randn(width(SOURCE), width(TARGET), generator=random).double() + noise - 4
    return rows


def moments_of(rows, source=SOURCE, target=TARGET):
    return PairMoments(*(Moments.of(*rows[kind]) for kind in ("k", "v")), [], source, target)


def layer_rows(rows, kind, layer, chosen):
    """Features of the chosen source layers, in their order, and outputs of a target layer, as numpy arrays."""
    x, y = rows[kind]
    features = x.view(len(x), SOURCE["layers"], -1)[:, chosen].flatten(1)
    return features.numpy(), y.view(len(y), TARGET["layers"], -1)[:, layer].numpy()


def affine(fit: Fit, kind, layer):
    """Weight and bias of one map."""
    found = (fit.mapper.keys if kind == "k" else fit.mapper.values)[layer]
    return found.weight.double().numpy(), found.bias.double().numpy()


def pooled_r2(truth, predicted, heads):
    """1 − SSE/SST over all coordinates of a head together, averaged over heads, by scikit-learn."""
    pairs = zip(np.split(truth, heads, axis=1), np.split(predicted, heads, axis=1), strict=True)
    return np.mean([r2_score(*pair, multioutput="variance_weighted") for pair in pairs])


def assert_close(found, wanted, tolerance):
    """Errors relative to the largest entry."""
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("value", [0.0, 0.01, 1.0, 50.0])
@pytest.mark.parametrize("scale", ["sum", "token", "trace"])
@KINDS
def test_coefficients_are_those_of_least_squares_on_augmented_rows(value, scale, kind):
    rows = random_rows()
    fit = fit_ridge(moments_of(rows), SELECTED, Penalty(value, scale), torch.float64)
    for layer, chosen in enumerate(SELECTED):
        x, y = layer_rows(rows, kind, layer, chosen)
        centred = x - x.mean(0)
        unit = {"sum": 1, "token": len(x), "trace": (centred**2).sum() / centred.shape[1]}[scale]
        below = np.sqrt(value * unit) * np.eye(x.shape[1])
        augmented = np.vstack([centred, below]), np.vstack([y - y.mean(0), np.zeros((x.shape[1], y.shape[1]))])
        wanted = np.linalg.lstsq(*augmented, rcond=None)[0]
        weight, bias = affine(fit, kind, layer)
        assert_close(weight, wanted, 1e-6)
        assert_close(bias, y.mean(0) - x.mean(0) @ wanted, 1e-6)


@pytest.mark.parametrize("alpha", [0.01, 1.0, 50.0])
@KINDS
def test_coefficients_are_those_of_scikit_learn_for_the_summed_gram(alpha, kind):
    rows = random_rows()
    fit = fit_ridge(moments_of(rows), SELECTED, Penalty(alpha, "sum"), torch.float64)
    for layer, chosen in enumerate(SELECTED):
        model = Ridge(alpha=alpha, solver="cholesky").fit(*layer_rows(rows, kind, layer, chosen))
        weight, bias = affine(fit, kind, layer)
        assert_close(weight, model.coef_.T, 1e-6)
        assert_close(bias, model.intercept_, 1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 100.0])
@KINDS
def test_r2_in_sample_is_that_of_the_predictions(value, kind):
    rows = random_rows()
    fit = fit_ridge(moments_of(rows), SELECTED, Penalty(value, "sum"), torch.float64)
    for layer, chosen in enumerate(SELECTED):
        x, y = layer_rows(rows, kind, layer, chosen)
        weight, bias = affine(fit, kind, layer)
        assert fit.r2[kind][layer] == pytest.approx(pooled_r2(y, x @ weight + bias, TARGET["kv_heads"]), abs=1e-10)


def test_columns_of_very_different_size_are_solved_as_well_as_equal_ones():
    rows = random_rows()
    sizes = torch.logspace(-5, 5, width(SOURCE)).double()
    scaled = {kind: (x * sizes, y) for kind, (x, y) in rows.items()}
    one, other = (fit_ridge(moments_of(each), [[0, 1, 2]] * 2, Penalty(0.0, "sum")) for each in (rows, scaled))
    for kind in ("k", "v"):
        assert other.r2[kind] == pytest.approx(one.r2[kind], abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mapper_has_the_dtype_that_is_asked_for(dtype):
    fit = fit_ridge(moments_of(random_rows()), SELECTED, Penalty(1.0, "sum"), dtype)
    assert fit.mapper.dtype == dtype
    exact = fit_ridge(moments_of(random_rows()), SELECTED, Penalty(1.0, "sum"), torch.float64)
    for kind in ("k", "v"):
        assert_close(affine(fit, kind, 0)[0], affine(exact, kind, 0)[0], torch.finfo(dtype).eps)


def with_duplicates(rows):
    """The same rows, but for the first layer's first head, which repeats its second."""
    return {kind: (torch.cat([x[:, 2:4], x[:, 2:]], 1), y) for kind, (x, y) in rows.items()}


@pytest.mark.parametrize("kept", [[0, 2], [2, 0], [1, 2, 0]])
@pytest.mark.parametrize(
    "make",
    [
        lambda seed: random_rows(5, seed),
        # the mean takes one row, so 8 are too few for 8 features
        lambda seed: random_rows(8, seed),
        lambda seed: with_duplicates(random_rows(seed=seed)),
    ],
    ids=["n < p", "n = p", "duplicates"],
)
def test_a_singular_system_stops_and_names_the_layer(make, kept):
    # Rounding may leave a pivot of a singular Gram above zero, so one sample says little.
    for seed in range(30):
        moments = moments_of(make(seed))
        with pytest.raises(
            KvferryError, match="target layer 0, k: the normal equations are singular or not finite; use a"
        ):
            fit_ridge(moments, [kept, [1]], Penalty(0.0, "sum"))


def test_columns_that_are_nearly_equal_are_still_solved():
    rows = random_rows()
    for x, _ in rows.values():
        x[:, :2] = x[:, 2:4] + 1e-4 * x[:, :2]
    fit = fit_ridge(moments_of(rows), [[0, 2], [1]], Penalty(0.0, "sum"), torch.float64)
    for kind in ("k", "v"):
        x, y = layer_rows(rows, kind, 0, [0, 2])
        errors = y - y.mean(0) - (x - x.mean(0)) @ np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=None)[0]
        assert fit.r2[kind][0] == pytest.approx(pooled_r2(y, y - errors, TARGET["kv_heads"]), abs=1e-6)


def test_a_layer_that_is_singular_later_is_named_too():
    with pytest.raises(KvferryError, match="target layer 1, k: "):
        fit_ridge(moments_of(with_duplicates(random_rows())), [[1], [0]], Penalty(0.0, "sum"))


@pytest.mark.parametrize(
    "make", [lambda: with_duplicates(random_rows()), lambda: random_rows(6)], ids=["duplicates", "n < p"]
)
def test_a_penalty_makes_a_singular_system_solvable(make):
    rows = make()
    fit = fit_ridge(moments_of(rows), [[0, 2], [1, 0]], Penalty(1.0, "sum"), torch.float64)
    for kind in ("k", "v"):
        model = Ridge(alpha=1.0, solver="svd").fit(*layer_rows(rows, kind, 0, [0, 2]))
        assert_close(affine(fit, kind, 0)[0], model.coef_.T, 1e-6)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("role", [0, 1], ids=["source", "target"])
@KINDS
def test_a_single_number_in_the_rows_that_is_not_finite_is_refused(number, role, kind):
    rows = random_rows()
    rows[kind][role][7, 0] = number
    with pytest.raises(KvferryError, match=f"target layer 0, {kind}: "):
        fit_ridge(moments_of(rows), [[0, 1], [1]], Penalty(1.0, "sum"))


@pytest.mark.parametrize("field", ["xx", "xy", "mean_x", "mean_y", "yy"])
def test_moments_that_are_not_finite_are_refused(field):
    moments = moments_of(random_rows())
    getattr(moments.k, field)[..., 0] = float("nan")
    with pytest.raises(KvferryError, match="target layer 0, k: "):
        fit_ridge(moments, [[0, 1], [1]], Penalty(1.0, "sum"))


def test_a_feature_that_never_changes_needs_a_penalty():
    gram, cross = torch.diag(torch.tensor([1.0, 0.0])).double(), torch.tensor([[2.0], [0.0]]).double()
    with pytest.raises(KvferryError, match="here: "):
        solve(gram, cross, 0.0, "here")
    assert solve(gram, cross, 1.0, "here").flatten().tolist() == pytest.approx([1.0, 0.0])


def write_rows(directory: Path, rows, geometry):
    """A dump of given keys and values, `[rows, layers·kv_heads·head_dim]` a side and kind, with a rotation that does nothing."""
    shape = (-1, geometry["layers"], geometry["kv_heads"], geometry["head_dim"])
    shards = []
    directory.mkdir()
    for side, kinds in rows.items():
        parts = {kind: part.float().view(shape) for kind, part in kinds.items()}
        n, layers = parts["k"].shape[:2]
        tensors = {f"{kind}.{i}": part[:, i].contiguous() for kind, part in parts.items() for i in range(layers)}
        tensors |= {name: torch.arange(n) for name in ("ids", "positions", "sequences")}
        tensors |= {"cos": torch.ones(n, geometry["head_dim"]), "sin": torch.zeros(n, geometry["head_dim"])}
        path = directory / f"{side}.safetensors"
        save_file(tensors, path)
        shards.append({"file": path.name, "side": side, "sequences": 1, "sha256": sha256_file(path)})
    identity = {"model": directory.name, "tokenizer_sha256": "same"}
    write_json(directory / INDEX, {"identity": identity, "geometry": geometry, "calibration": HOW, "shards": shards})
    return directory


def test_noise_is_explained_in_sample_by_its_share_of_features_and_out_of_sample_not_at_all(tmp_path):
    n, held_out, p = 400, 200, 40
    source = {"layers": 2, "kv_heads": 2, "head_dim": 10}
    target = {"layers": 2, "kv_heads": 2, "head_dim": 4}
    random = torch.Generator().manual_seed(0)

    def noise(geometry):
        return {
            side: {kind: torch.randn(count, width(geometry), generator=random) for kind in ("k", "v")}
            for side, count in (("fit", n), ("held_out", held_out))
        }

    dumps = [write_rows(tmp_path / name, noise(g), g) for name, g in (("source", source), ("target", target))]
    fit = fit_ridge(accumulate(*dumps), [[0, 1], [1, 0]], Penalty(0.0, "sum"))
    outside, rows = held_out_r2(fit.mapper, *dumps)
    assert rows == held_out
    outputs = 2 * width(target)
    inside_mean = np.mean([fit.r2["k"], fit.r2["v"]])
    outside_mean = np.mean([outside["k"], outside["v"]])
    # In sample each output's R² is Beta(p/2, (n−1−p)/2): mean p/(n−1); the outputs are independent of each other.
    deviation = np.sqrt(2 * p * (n - 1 - p) / ((n - 1) ** 2 * (n + 1)) / outputs)
    assert abs(inside_mean - p / (n - 1)) < 5 * deviation
    # Out of sample the prediction adds p/(n−p−2) + 1/n of the variance; its product with the truth spreads it.
    excess = p / (n - p - 2) + 1 / n
    assert abs(outside_mean + excess) < 5 * np.sqrt(4 * excess / held_out / outputs)
    assert max(outside["k"] + outside["v"]) < 0


@pytest.fixture(scope="module")
def dumps(tiny_model, tmp_path_factory):
    """Dumps of a source of 3 layers with 2 heads and a target of 4 layers with 4."""
    directory = tmp_path_factory.mktemp("dumps")
    source, target = tiny_model("llama", 3, seed=1), tiny_model("llama", 4, seed=2, kv_heads=4)
    return dump_of(source, directory, "small"), dump_of(target, directory, "big")


@KINDS
def test_r2_out_of_sample_is_that_of_scikit_learn(dumps, kind):
    selected = [[2, 0], [1, 0], [0, 1], [2, 1]]
    fit = fit_ridge(accumulate(*dumps), selected, Penalty(1.0, "sum"))
    found, count = held_out_r2(fit.mapper, *dumps)
    assert count == SIDES["held_out"].numel()
    pairs = list(paired_shards(*dumps, "held_out"))
    assert len(pairs) == 2

    def rows(role, layer):
        shards = [pair[role] for pair in pairs]
        parts = [shard.stripped_keys(layer) if kind == "k" else shard.values[layer] for shard in shards]
        return torch.cat(parts).flatten(1).double().numpy()

    for layer, chosen in enumerate(selected):
        weight, bias = affine(fit, kind, layer)
        predicted = np.hstack([rows(0, own) for own in chosen]) @ weight + bias
        # the mapper predicts in float32
        assert found[kind][layer] == pytest.approx(pooled_r2(rows(1, layer), predicted, heads=4), abs=1e-5)


@pytest.mark.parametrize("k", [3, 4])
def test_a_model_mapped_to_itself_comes_back_in_and_out_of_sample(dumps, k):
    # Layers in orders that are not their own: with features mixed up, R² would fall.
    target = dumps[1]
    selected = [([layer] + [other for other in (2, 0, 3, 1) if other != layer])[:k][::-1] for layer in range(4)]
    fit = fit_ridge(accumulate(target, target), selected, Penalty(1e-8, "trace"))
    outside, _ = held_out_r2(fit.mapper, target, target)
    for scores in (fit.r2, outside):
        assert min(scores["k"] + scores["v"]) > 0.9999
        assert max(scores["k"] + scores["v"]) <= 1 + 1e-6


def test_layers_that_do_not_hold_the_target_explain_less(dumps):
    target = dumps[1]
    fit = fit_ridge(accumulate(target, target), [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]], Penalty(1e-8, "trace"))
    assert max(fit.r2["k"][1:] + fit.r2["v"][1:]) < 0.999


RECIPE = {"method": "ridge", "k": 2, "lambda": 0.01, "lambda_scale": "token"}
RANKING = [[2, 0, 1], [1, 0, 2], [0, 1, 2], [2, 1, 0]]


@pytest.fixture(scope="module")
def artifact(dumps, tmp_path_factory):
    directory = tmp_path_factory.mktemp("mappers") / "ridge_k2"
    fit_artifact(accumulate(*dumps), RANKING, RECIPE, *dumps, directory)
    return directory


def test_a_manifest_says_all_that_the_mapper_is(dumps, artifact):
    manifest = json.loads((artifact / MANIFEST).read_text())
    indices = check_match(*dumps)
    assert manifest["recipe"] == RECIPE
    assert manifest["source"] == indices["source"]["identity"]
    assert manifest["target"] == indices["target"]["identity"]
    assert {"config_sha256", "tokenizer_sha256", "weights_id", "model"} == set(manifest["source"])
    assert manifest["calibration"] == HOW
    assert len(manifest["calibration_sha256"]) == 64
    assert manifest["rows"] == SIDES["fit"].numel()
    assert manifest["features"] == 2 * 2 * 8
    assert manifest["held_out_rows"] == SIDES["held_out"].numel()
    assert manifest["weights_sha256"] == sha256_file(artifact / WEIGHTS)
    assert manifest["selected_layers"] == [layers[:2] for layers in RANKING]
    # 2·L_t·n_kv_t·(k·n_kv_s·d_s)·d_t
    assert manifest["parameters"] == 2 * 4 * 4 * (2 * 2 * 8) * 8
    assert manifest["dtype"] == "float32"


def test_a_manifest_holds_both_r2_of_every_layer(dumps, artifact):
    r2 = json.loads((artifact / MANIFEST).read_text())["r2"]
    fit = fit_ridge(accumulate(*dumps), [layers[:2] for layers in RANKING], Penalty(0.01, "token"))
    outside, _ = held_out_r2(fit.mapper, *dumps)
    for kind in ("k", "v"):
        assert r2["in_sample"][kind] == pytest.approx(fit.r2[kind], abs=1e-9)
        assert r2["held_out"][kind] == pytest.approx(outside[kind], abs=1e-6)


def test_an_artifact_loads_again_and_maps_as_before(dumps, artifact):
    cards = [read_index(dump)["identity"] for dump in dumps]
    mapper, manifest = load_mapper(artifact, *cards)
    fit = fit_ridge(accumulate(*dumps), [layers[:2] for layers in RANKING], Penalty(0.01, "token"))
    assert mapper.selected == manifest["selected_layers"] == fit.mapper.selected
    for one, other in zip(mapper.keys + mapper.values, fit.mapper.keys + fit.mapper.values, strict=True):
        torch.testing.assert_close(one.weight, other.weight)
        torch.testing.assert_close(one.bias, other.bias)


def test_all_layers_share_one_order_of_features(dumps, tmp_path):
    fit_artifact(accumulate(*dumps), RANKING, RECIPE | {"k": "all"}, *dumps, tmp_path / "all")
    manifest = json.loads((tmp_path / "all" / MANIFEST).read_text())
    assert manifest["selected_layers"] == [[0, 1, 2]] * 4
    assert manifest["features"] == 3 * 2 * 8


def test_another_calibration_has_another_fingerprint(tiny_model, dumps, artifact, tmp_path):
    sides = {"fit": SIDES["fit"] + 1, "held_out": SIDES["held_out"]}
    models = tiny_model("llama", 3, seed=1), tiny_model("llama", 4, seed=2, kv_heads=4)
    others = [dump_of(model, tmp_path, name, sides=sides) for model, name in zip(models, ("small", "big"), strict=True)]
    fit_artifact(accumulate(*others), RANKING, RECIPE, *others, tmp_path / "mapper")
    one, other = (json.loads((path / MANIFEST).read_text()) for path in (artifact, tmp_path / "mapper"))
    assert one["calibration_sha256"] != other["calibration_sha256"]


def test_a_fit_that_stops_leaves_no_artifact(dumps, tmp_path):
    moments = accumulate(*dumps)
    moments.v.xx[0, 0] = float("nan")
    with pytest.raises(KvferryError, match="target layer 2, v: "):
        fit_artifact(moments, [[1], [1], [0], [1]], RECIPE | {"k": 1}, *dumps, tmp_path / "mapper")
    assert list(tmp_path.iterdir()) == []
