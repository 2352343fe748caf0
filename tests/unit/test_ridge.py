"""The ridge mapper against least squares of numpy and scikit-learn, on data where the answer is known."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from small_fits import (
    SOURCE,
    TARGET,
    affine,
    assert_close,
    fitted,
    layer_rows,
    moments_of,
    pair_rows,
    pooled_r2,
    recipe,
    width,
)

from kvferry.errors import KvferryError
from kvferry.fit.ridge import Penalty, Solver, fit_ridge
from kvferry.fit.systems import CutSystems
from kvferry.fit.weights import RowRule
from kvferry.kv.mapper import Affine, HeadLocal

SELECTED = [[2, 0], [1, 2]]
RANKED = [[2, 0, 1], [1, 2, 0]]
EQUAL = {"layers": 3, "kv_heads": 2, "head_dim": 3}
KINDS = pytest.mark.parametrize("kind", ["k", "v"])
SCALES = pytest.mark.parametrize("scale", ["sum", "token", "trace"])
SUPPORTS = pytest.mark.parametrize("support", ["all_heads", "same_head"])


def solve(gram, cross, shift, where):
    """The solution of one whole system."""
    return Solver().nested(gram, cross, [len(gram)], shift, where)[len(gram)]


def fit_of(rows, ranking=SELECTED, **how):
    """The fit of one recipe on given rows, stored in float64 unless it says otherwise."""
    return fitted(moments_of(rows), ranking, recipe(**{"k": 3, "lambda_scale": "sum", "dtype": "float64"} | how))


@pytest.mark.parametrize("value", [0.0, 0.01, 1.0, 50.0])
@SCALES
@KINDS
def test_coefficients_are_those_of_least_squares_on_augmented_rows(value, scale, kind):
    rows = pair_rows()
    fit = fit_of(rows, value=value, lambda_scale=scale)
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
    rows = pair_rows()
    fit = fit_of(rows, value=alpha)
    for layer, chosen in enumerate(SELECTED):
        model = Ridge(alpha=alpha, solver="cholesky").fit(*layer_rows(rows, kind, layer, chosen))
        weight, bias = affine(fit, kind, layer)
        assert_close(weight, model.coef_.T, 1e-6)
        assert_close(bias, model.intercept_, 1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, 50.0])
@KINDS
def test_a_head_that_reads_the_same_head_is_a_regression_of_its_own(value, kind):
    rows = pair_rows(source=EQUAL, target=EQUAL)
    ranked = [[2, 0], [0, 1], [1, 2]]
    own = recipe(value, lambda_scale="sum", support="same_head", dtype="float64")
    fit = fitted(moments_of(rows, EQUAL, EQUAL), ranked, own)
    for layer, chosen in enumerate(ranked):
        x, y = layer_rows(rows, kind, layer, chosen, EQUAL, EQUAL)
        weight, bias = affine(fit, kind, layer)
        assert weight.shape == (2, 2 * 3, 3)
        scores = []
        for head in range(2):
            features, truth = x.reshape(60, 2, 2, 3)[:, :, head].reshape(60, -1), y.reshape(60, 2, 3)[:, head]
            model = Ridge(alpha=value, solver="svd").fit(features, truth)
            assert_close(weight[head], model.coef_.T, 1e-6)
            assert_close(bias.reshape(2, 3)[head], model.intercept_, 1e-6)
            scores.append(pooled_r2(truth, model.predict(features), 1))
        assert fit.r2[kind][layer] == pytest.approx(np.mean(scores), abs=1e-10)


@SUPPORTS
def test_each_support_has_its_kind_of_map(support):
    fit = fitted(moments_of(pair_rows(source=EQUAL, target=EQUAL), EQUAL, EQUAL), [[0]] * 3, recipe(support=support))
    wanted = {"all_heads": Affine, "same_head": HeadLocal}[support]
    assert {type(own) for own in [*fit.mapper.keys, *fit.mapper.values]} == {wanted}


@pytest.mark.parametrize("value", [0.0, 1.0, 100.0])
@KINDS
def test_r2_in_sample_is_that_of_the_predictions(value, kind):
    rows = pair_rows()
    fit = fit_of(rows, value=value)
    for layer, chosen in enumerate(SELECTED):
        x, y = layer_rows(rows, kind, layer, chosen)
        weight, bias = affine(fit, kind, layer)
        assert fit.r2[kind][layer] == pytest.approx(pooled_r2(y, x @ weight + bias, TARGET["kv_heads"]), abs=1e-10)


def assert_same_fit(found, wanted, tolerance=1e-9):
    assert found.mapper.selected == wanted.mapper.selected
    for kind in ("k", "v"):
        assert found.r2[kind] == pytest.approx(wanted.r2[kind], abs=tolerance)
        for layer in range(len(found.mapper.selected)):
            for one, other in zip(affine(found, kind, layer), affine(wanted, kind, layer), strict=True):
                assert_close(one, other, tolerance)


@SCALES
@SUPPORTS
def test_recipes_fitted_together_are_as_each_alone(scale, support):
    rows = pair_rows(source=EQUAL, target=EQUAL)
    ranked = [[2, 0, 1], [0, 1, 2], [1, 2, 0]]
    how = {"lambda_scale": scale, "support": support, "dtype": "float64"}
    recipes = {f"{k}, {value}": recipe(value, k=k, **how) for k in (1, 2, 3, "all") for value in (0.01, 2.0)}
    moments = moments_of(rows, EQUAL, EQUAL)
    together = fit_ridge(CutSystems(moments, RowRule()), ranked, recipes)
    assert list(together) == list(recipes)
    for name, own in recipes.items():
        assert_same_fit(together[name], fitted(moments, ranked, own))


def test_recipes_of_different_support_and_strength_are_fitted_together():
    rows, ranked = pair_rows(source=EQUAL, target=EQUAL), [[2, 0, 1], [0, 1, 2], [1, 2, 0]]
    recipes = {
        "one": recipe(0.1, k=3, dtype="float64"),
        "head": recipe(0.1, k=2, support="same_head", dtype="float64"),
        "summed": recipe(5.0, k=1, lambda_scale="sum", dtype="float64"),
        "free": recipe(0.0, k="all", dtype="float64", rope="not_reapplied"),
    }
    moments = moments_of(rows, EQUAL, EQUAL)
    together = fit_ridge(CutSystems(moments, RowRule()), ranked, recipes)
    for name, own in recipes.items():
        assert_same_fit(together[name], fitted(moments, ranked, own))
        assert together[name].mapper.rope == own["rope"]


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True),
    st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    st.integers(0, 1000),
)
def test_every_leading_block_of_a_nested_solve_is_its_own_solve(widths, shift, seed):
    random = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(40, columns, generator=random).double() for columns in (12, 3))
    x *= torch.logspace(-3, 3, 12).double()
    gram, cross = x.T @ x, x.T @ y
    found = Solver().nested(gram, cross, widths, shift, "here")
    assert sorted(found) == sorted(widths)
    for own in widths:
        wanted = torch.linalg.solve(gram[:own, :own] + shift * torch.eye(own).double(), cross[:own])
        # row by row, as columns differ in size
        unit = wanted.abs().amax(1, keepdim=True)
        assert ((found[own] - wanted).abs() / unit).max() < 1e-9


def test_all_layers_in_their_own_order_are_a_direct_solve():
    rows = pair_rows()
    fit = fit_of(rows, RANKED, k="all", value=2.0)
    assert fit.mapper.selected == [[0, 1, 2]] * 2
    for kind in ("k", "v"):
        for layer in range(2):
            model = Ridge(alpha=2.0, solver="svd").fit(*layer_rows(rows, kind, layer, [0, 1, 2]))
            assert_close(affine(fit, kind, layer)[0], model.coef_.T, 1e-9)
            assert_close(affine(fit, kind, layer)[1], model.intercept_, 1e-9)


def test_target_layers_that_read_all_source_layers_share_two_factors(monkeypatch):
    sizes = []
    factor = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: sizes.append(len(matrix)) or factor(matrix))
    recipes = {"one": recipe(k=1), "two": recipe(k=2), "all": recipe(k="all")}
    fit_ridge(CutSystems(moments_of(pair_rows()), RowRule()), RANKED, recipes)
    per_layer = SOURCE["kv_heads"] * SOURCE["head_dim"]
    # the larger k a target layer and kind, and all layers a kind
    assert sorted(sizes) == [2 * per_layer] * 4 + [3 * per_layer] * 2


def test_a_solver_does_not_take_one_system_for_another():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 20, 4, generator=random).double()
    grams, cross = [own.T @ own for own in x], torch.randn(4, 2, generator=random).double()
    solver = Solver()
    for shift in (1.0, 2.0, 1.0):
        for gram in (*grams, grams[0] * 2):
            for own in (4, 3, 4):
                found = solver.nested(gram, cross, [own], shift, "here")[own]
                torch.testing.assert_close(found, solve(gram[:own, :own], cross[:own], shift, "here"))


@given(st.floats(1e-3, 1e3), st.sampled_from(["token", "trace"]))
def test_the_scale_of_the_weights_makes_no_difference_to_a_penalty_a_token(factor, scale):
    rows = pair_rows()
    weights = torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    own = recipe(0.1, lambda_scale=scale, dtype="float64")
    one, other = (fitted(moments_of(rows, weights=scaled), RANKED, own) for scaled in (weights, weights * factor))
    assert_same_fit(one, other)


@KINDS
def test_weighted_rows_are_fitted_as_scikit_learn_weighs_them(kind):
    rows = pair_rows()
    weights = torch.rand(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    fit = fitted(moments_of(rows, weights=weights), SELECTED, recipe(0.1, dtype="float64"))
    for layer, chosen in enumerate(SELECTED):
        model = Ridge(alpha=0.1 * float(weights.sum()), solver="cholesky")
        model.fit(*layer_rows(rows, kind, layer, chosen), sample_weight=weights.numpy())
        assert_close(affine(fit, kind, layer)[0], model.coef_.T, 1e-6)
        assert_close(affine(fit, kind, layer)[1], model.intercept_, 1e-6)


def test_light_weights_do_not_make_a_system_singular():
    # 60 rows for 8 features, though their weights add up to less
    rows = pair_rows()
    weights = torch.full((60,), 0.01, dtype=torch.float64)
    own = recipe(0.0, dtype="float64")
    assert_same_fit(*(fitted(moments_of(rows, weights=each), SELECTED, own) for each in (weights, None)))


def test_heavy_weights_do_not_make_more_rows_of_few():
    # With the mean taken, 8 rows leave 7 for 8 features, whatever they weigh.
    for seed in range(30):
        moments = moments_of(pair_rows(8, seed), weights=torch.full((8,), 16.0))
        with pytest.raises(KvferryError, match="target layer 0, k: the normal equations are singular"):
            fitted(moments, SELECTED, recipe(0.0))


def test_columns_of_very_different_size_are_solved_as_well_as_equal_ones():
    rows = pair_rows()
    sizes = torch.logspace(-5, 5, width(SOURCE)).double()
    scaled = {kind: (x * sizes, y) for kind, (x, y) in rows.items()}
    one, other = (fit_of(each, [[0, 1, 2]] * 2, value=0.0) for each in (rows, scaled))
    for kind in ("k", "v"):
        assert other.r2[kind] == pytest.approx(one.r2[kind], abs=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@SUPPORTS
def test_a_mapper_has_the_dtype_that_is_asked_for(dtype, support):
    rows = pair_rows(source=EQUAL, target=EQUAL)
    own, ranked = recipe(1.0, lambda_scale="sum", support=support), [[0, 1]] * 3
    fit, exact = (
        fitted(moments_of(rows, EQUAL, EQUAL), ranked, own | {"dtype": stored}) for stored in (dtype, "float64")
    )
    assert fit.mapper.dtype == getattr(torch, dtype)
    for kind in ("k", "v"):
        for one, other in zip(affine(fit, kind, 0), affine(exact, kind, 0), strict=True):
            assert_close(one, other, torch.finfo(getattr(torch, dtype)).eps)


def with_duplicates(rows):
    """The same rows, but for the first layer's first head, which repeats its second."""
    return {kind: (torch.cat([x[:, 2:4], x[:, 2:]], 1), y) for kind, (x, y) in rows.items()}


@pytest.mark.parametrize("kept", [[0, 2], [2, 0], [1, 2, 0]])
@pytest.mark.parametrize(
    "make",
    [
        lambda seed: pair_rows(5, seed),
        # the mean takes one row, so 8 are too few for 8 features
        lambda seed: pair_rows(8, seed),
        lambda seed: with_duplicates(pair_rows(seed=seed)),
    ],
    ids=["n < p", "n = p", "duplicates"],
)
def test_a_singular_system_stops_and_names_the_layer(make, kept):
    # Rounding may leave a pivot of a singular Gram above zero, so one sample says little.
    for seed in range(30):
        rows = make(seed)
        with pytest.raises(
            KvferryError, match="target layer 0, k: the normal equations are singular or not finite; use a"
        ):
            fit_of(rows, [kept, [1]], value=0.0)


def test_columns_that_are_nearly_equal_are_still_solved():
    rows = pair_rows()
    for x, _ in rows.values():
        x[:, :2] = x[:, 2:4] + 1e-4 * x[:, :2]
    fit = fit_of(rows, [[0, 2], [1]], value=0.0)
    for kind in ("k", "v"):
        x, y = layer_rows(rows, kind, 0, [0, 2])
        errors = y - y.mean(0) - (x - x.mean(0)) @ np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=None)[0]
        assert fit.r2[kind][0] == pytest.approx(pooled_r2(y, y - errors, TARGET["kv_heads"]), abs=1e-6)


def test_a_layer_that_is_singular_later_is_named_too():
    with pytest.raises(KvferryError, match="target layer 1, k: "):
        fit_of(with_duplicates(pair_rows()), [[1], [0]], value=0.0)


def test_a_kind_that_is_singular_is_named():
    rows = pair_rows()
    with pytest.raises(KvferryError, match="target layer 1, v: the normal equations are singular"):
        fit_of(rows | {"v": with_duplicates(rows)["v"]}, [[1], [0]], value=0.0)


def test_a_head_that_is_singular_alone_stops_too():
    rows = pair_rows(source=EQUAL, target=EQUAL)
    x, _ = rows["v"]
    x[:, 4] = x[:, 5]
    with pytest.raises(KvferryError, match="target layer 1, v: the normal equations are singular"):
        fitted(moments_of(rows, EQUAL, EQUAL), [[1], [0], [2]], recipe(0.0, support="same_head"))


@pytest.mark.parametrize(
    "make", [lambda: with_duplicates(pair_rows()), lambda: pair_rows(6)], ids=["duplicates", "n < p"]
)
def test_a_penalty_makes_a_singular_system_solvable(make):
    rows = make()
    fit = fit_of(rows, [[0, 2], [1, 0]], value=1.0)
    for kind in ("k", "v"):
        model = Ridge(alpha=1.0, solver="svd").fit(*layer_rows(rows, kind, 0, [0, 2]))
        assert_close(affine(fit, kind, 0)[0], model.coef_.T, 1e-6)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("role", [0, 1], ids=["source", "target"])
@SCALES
@KINDS
def test_a_single_number_in_the_rows_that_is_not_finite_is_refused(number, role, scale, kind):
    rows = pair_rows()
    rows[kind][role][7, 0] = number
    with pytest.raises(KvferryError, match=f"target layer 0, {kind}: "):
        fit_of(rows, [[0, 1], [1]], value=1.0, lambda_scale=scale)


@pytest.mark.parametrize("field", ["xx", "xy", "mean_x", "mean_y", "yy"])
@SCALES
def test_moments_that_are_not_finite_are_refused(field, scale):
    moments = moments_of(pair_rows())
    getattr(moments.full["k"], field)[..., 0] = float("nan")
    with pytest.raises(KvferryError, match="target layer 0, k: "):
        fitted(moments, [[0, 1], [1]], recipe(1.0, lambda_scale=scale))


def test_a_feature_that_never_changes_needs_a_penalty():
    gram, cross = torch.diag(torch.tensor([1.0, 0.0])).double(), torch.tensor([[2.0], [0.0]]).double()
    with pytest.raises(KvferryError, match="here: "):
        solve(gram, cross, 0.0, "here")
    assert solve(gram, cross, 1.0, "here").flatten().tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize(("scale", "shift"), [("sum", 0.5), ("token", 15.0), ("trace", 2.0)])
def test_what_is_added_to_the_diagonal(scale, shift):
    assert Penalty(0.5, scale).shift(torch.tensor([2.0, 6.0]), 30) == shift
