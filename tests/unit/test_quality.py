"""R² of maps as they are stored, applied to rows, against scikit-learn and against what is known of noise and of identities."""

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score
from small_fits import SIDES, dump_of, plain_cache, pooled_r2, recipe, width, write_rows

from kvferry.fit.pair import KINDS, Extent, accumulate
from kvferry.fit.quality import applied_r2
from kvferry.fit.ridge import fit_ridge
from kvferry.fit.systems import CutSystems, SummedSystems
from kvferry.fit.weights import RowRule

COUNT = len(SIDES["fit"])
RANKED = [[2, 0, 1], [1, 0, 2], [0, 1, 2], [2, 1, 0]]
RECIPES = {
    "k2": recipe(1.0, lambda_scale="sum"),
    "all": recipe(k="all"),
    "weak": recipe(1.0, k=1),
    "not reapplied": recipe(rope="not_reapplied"),
}


@pytest.fixture(scope="module")
def models(tiny_model):
    return tiny_model("llama", 3, seed=1), tiny_model("llama", 4, seed=2, kv_heads=4)


@pytest.fixture(scope="module")
def dumps(models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dumps")
    return [dump_of(model, directory, name) for model, name in zip(models, ("small", "big"), strict=True)]


@pytest.fixture(scope="module")
def mappers(dumps):
    fits = fit_on(dumps, RANKED, RECIPES)
    return {name: fit.mapper for name, fit in fits.items()} | {"coupled": coupled_mapper(dumps)}


def fit_on(dumps, ranked, recipes, count=COUNT):
    moments = accumulate(*dumps, Extent(count, 0, "all", 1000))
    return fit_ridge(CutSystems(moments, RowRule()), ranked, recipes)


def coupled_mapper(dumps):
    systems = SummedSystems(*dumps, COUNT, RowRule(), RANKED, [[0, 1, 2, 3]], coupled=True)
    return fit_ridge(systems, RANKED, {"own": recipe(rope="coupled")})["own"].mapper


def caches(models, side):
    """By form of keys, and for values: rows of source and target `[rows, layers, kv_heads, head_dim]` from plain forwards."""
    own, other = (plain_cache(model, SIDES[side]) for model in models)
    return dict(zip(("with rope", "stripped", "values"), zip(own, other, strict=True), strict=True))


def predictions(mapper, rows, kind, layer):
    """True and mapped rows of a target layer, by numpy."""
    form = "values" if kind == "v" else "with rope" if mapper.rope == "coupled" else "stripped"
    own, other = rows[form]
    found = (mapper.keys if kind == "k" else mapper.values)[layer]
    features = own[:, mapper.selected[layer]].flatten(1).numpy()
    predicted = features @ found.weight.double().numpy() + found.bias.double().numpy()
    return other[:, layer].flatten(1).numpy(), predicted


@pytest.mark.parametrize("name", [*RECIPES, "coupled"])
@pytest.mark.parametrize("side", ["fit", "held_out"])
def test_r2_is_that_of_scikit_learn_for_each_head_of_plain_caches(models, dumps, mappers, name, side):
    scores, count = applied_r2(mappers, *dumps, COUNT if side == "fit" else None)
    assert count == SIDES[side].numel()
    rows = caches(models, side)
    for kind in KINDS:
        for layer in range(4):
            truth, predicted = predictions(mappers[name], rows, kind, layer)
            # the mapper predicts in float32, the dump's forwards are of another batch size
            assert scores[name][kind][layer] == pytest.approx(pooled_r2(truth, predicted, heads=4), abs=1e-4)


def test_keys_with_and_without_rotation_are_not_taken_for_each_other(dumps, mappers):
    coupled = mappers["coupled"]
    scores, _ = applied_r2({"coupled": coupled, "k2": mappers["k2"]}, *dumps)
    difference = np.abs(np.subtract(scores["coupled"]["k"], scores["k2"]["k"]))
    assert difference.min() > 1e-3


@pytest.mark.parametrize("name", [*RECIPES, "coupled"])
def test_mappers_scored_together_are_as_each_alone(dumps, mappers, name):
    together, _ = applied_r2(mappers, *dumps)
    assert list(together) == list(mappers)
    alone, _ = applied_r2({name: mappers[name]}, *dumps)
    assert together[name] == alone[name]


def test_no_mappers_have_no_scores(dumps):
    assert applied_r2({}, *dumps) == ({}, SIDES["held_out"].numel())


@pytest.mark.parametrize("name", RECIPES)
def test_on_the_rows_of_the_fit_it_is_the_r2_that_moments_give(dumps, mappers, name):
    fit = fit_on(dumps, RANKED, {name: RECIPES[name]})[name]
    scores, count = applied_r2({name: mappers[name]}, *dumps, COUNT)
    assert count == SIDES["fit"].numel()
    for kind in KINDS:
        assert scores[name][kind] == pytest.approx(fit.r2[kind], abs=1e-5)


# shards hold 8 sequences
@pytest.mark.parametrize("sequences", [5, 9])
def test_on_fewer_sequences_too(dumps, sequences):
    fit = fit_on(dumps, RANKED, {"own": RECIPES["k2"]}, sequences)["own"]
    scores, count = applied_r2({"own": fit.mapper}, *dumps, sequences)
    assert count == SIDES["fit"][:sequences].numel()
    for kind in KINDS:
        assert scores["own"][kind] == pytest.approx(fit.r2[kind], abs=1e-5)


def test_a_head_that_reads_the_same_head_is_scored_by_that_alone(models, dumps):
    target = dumps[1]
    fit = fit_on([target, target], [[1, 2], [0, 3], [3, 1], [0, 2]], {"own": recipe(support="same_head")})["own"]
    scores, _ = applied_r2({"own": fit.mapper}, target, target)
    _, keys, values = plain_cache(models[1], SIDES["held_out"])
    for kind, rows in (("k", keys), ("v", values)):
        for layer, chosen in enumerate(fit.mapper.selected):
            found = (fit.mapper.keys if kind == "k" else fit.mapper.values)[layer]
            each = []
            for head in range(4):
                bias = found.bias.view(4, -1)[head].double()
                predicted = rows[:, chosen, head].flatten(1) @ found.weight[head].double() + bias
                each.append(r2_score(rows[:, layer, head], predicted, multioutput="variance_weighted"))
            assert scores["own"][kind][layer] == pytest.approx(np.mean(each), abs=1e-4)


def test_a_map_is_scored_in_the_number_format_that_it_is_stored_in(dumps, mappers):
    exact, rounded = mappers["k2"], mappers["k2"].astype(torch.bfloat16)
    scores, _ = applied_r2({"exact": exact, "rounded": rounded}, *dumps)
    for kind in KINDS:
        assert scores["rounded"][kind] != scores["exact"][kind]
        assert scores["rounded"][kind] == pytest.approx(scores["exact"][kind], abs=0.02)


def test_noise_is_explained_in_sample_by_its_share_of_features_and_out_of_sample_not_at_all(tmp_path):
    n, held_out, p = 400, 200, 40
    source = {"layers": 2, "kv_heads": 2, "head_dim": 10}
    target = {"layers": 2, "kv_heads": 2, "head_dim": 4}
    random = torch.Generator().manual_seed(0)

    def noise(geometry):
        return {
            side: {kind: torch.randn(count, width(geometry), generator=random) for kind in KINDS}
            for side, count in (("fit", n), ("held_out", held_out))
        }

    dumps = [write_rows(tmp_path / name, noise(g), g) for name, g in (("source", source), ("target", target))]
    fit = fit_on(dumps, [[0, 1], [1, 0]], {"ols": recipe(0.0)}, count=1)["ols"]
    scores, rows = applied_r2({"ols": fit.mapper}, *dumps)
    outside = scores["ols"]
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


@pytest.mark.parametrize("k", [3, 4])
def test_a_model_mapped_to_itself_comes_back_in_and_out_of_sample(dumps, k):
    # Layers in orders that are not their own: with features mixed up, R² would fall.
    target = dumps[1]
    selected = [([layer] + [other for other in (2, 0, 3, 1) if other != layer])[:k][::-1] for layer in range(4)]
    fit = fit_on([target, target], selected, {"own": recipe(1e-8, k=k, lambda_scale="trace")})["own"]
    outside, _ = applied_r2({"own": fit.mapper}, target, target)
    for scores in (fit.r2, outside["own"]):
        assert min(scores["k"] + scores["v"]) > 0.9999
        assert max(scores["k"] + scores["v"]) <= 1 + 1e-6


def test_layers_that_do_not_hold_the_target_explain_less(dumps):
    target = dumps[1]
    ranked = [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    fit = fit_on([target, target], ranked, {"own": recipe(1e-8, k=3, lambda_scale="trace")})["own"]
    assert max(fit.r2["k"][1:] + fit.r2["v"][1:]) < 0.999
