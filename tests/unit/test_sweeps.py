"""Sweeps become named variants: every combination once, one name a recipe, nothing lost."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.sweeps import expanded, same, settled

DEFAULTS = {
    "lambda_scale": "token",
    "rope": "stripped",
    "support": "all_heads",
    "row_weights": "uniform",
    "sink_positions": 4,
    "sink_weight": 16,
    "native_head": 0,
    "head_rows": "kept",
    "dtype": "float32",
    "mlp": {"width": 1024},
}
BASE = {"method": "ridge", "lambda": 0.01}


def config(sweeps, variants=(), headline="main"):
    """A config as it is after its check, but for recipes, which are filled here."""
    written = {
        "pairs": ["a", "b"],
        "calibration": {"corpus": "prose", "sequences": 64},
        "headline": headline,
        "variants": {"main": {**BASE, "k": 8}, **dict(variants)},
        "sweeps": {name: {"variants": [], "benchmarks": {}, **sweep} for name, sweep in sweeps.items()},
    }
    made = expanded(written)
    return made | {"variants": {name: {**DEFAULTS, **recipe} for name, recipe in made["variants"].items()}}


def names(sweep, **sweeps):
    return settled(config({"k": sweep, **sweeps}))["sweeps"]["k"]["variants"]


def test_every_combination_becomes_a_variant():
    found = settled(config({"k": {"base": BASE, "over": {"k": [1, 2], "lambda": [0.1, 1]}}}))
    recipes = [found["variants"][name] for name in found["sweeps"]["k"]["variants"]]
    assert [(recipe["k"], recipe["lambda"]) for recipe in recipes] == list(product([1, 2], [0.1, 1]))
    assert all(recipe["corpus"] == "prose" and recipe["sequences"] == 64 for recipe in recipes)


def test_a_recipe_that_is_written_out_keeps_its_name():
    assert names({"base": BASE, "over": {"k": [4, 8]}}) == ["k-k4", "main"]


def test_two_names_written_out_for_one_recipe_both_stay():
    found = settled(config({"k": {"variants": ["main", "twin"]}}, {"twin": {**BASE, "k": 8}}))
    assert found["sweeps"]["k"]["variants"] == ["main", "twin"]


def test_sweeps_share_a_variant():
    found = settled(config({name: {"base": BASE, "over": {"k": [4]}} for name in ("k", "improved")}))
    assert found["sweeps"]["k"]["variants"] == found["sweeps"]["improved"]["variants"] == ["k-k4"]
    assert set(found["variants"]) == {"main", "k-k4"}


@pytest.mark.parametrize(
    ("over", "count"),
    [
        ({"lambda": [0], "lambda_scale": ["sum", "token", "trace"]}, 1),
        ({"lambda": [1], "lambda_scale": ["sum", "token", "trace"]}, 3),
        ({"native_head": [0], "head_rows": ["kept", "left_out"]}, 1),
        ({"native_head": [4], "head_rows": ["kept", "left_out"]}, 2),
        ({"row_weights": ["uniform"], "sink_weight": [2, 16]}, 1),
        ({"row_weights": ["sink"], "sink_weight": [2, 16]}, 2),
        ({"mlp": [{"width": 8}, {"width": 16}]}, 1),
        ({"method": ["ridge", "ols"], "lambda": [0]}, 1),
    ],
)
def test_what_makes_no_difference_makes_no_variant(over, count):
    assert len(names({"base": {**BASE, "k": 4}, "over": over})) == count


def test_variants_of_no_sweep_are_run_on_every_pair():
    found = settled(config({"k": {"variants": ["main"]}}, {"spare": {**BASE, "k": 2}}))
    assert found["sweeps"]["others"] == {"pairs": ["a", "b"], "variants": ["spare"], "benchmarks": {}}


def test_a_name_that_is_not_there_stays_to_be_refused():
    assert names({"variants": ["nobody"]}) == ["nobody"]


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_what_has_another_form_is_left_for_the_schema(value):
    whole = {"variants": {"main": {}}, "sweeps": {"k": value}}
    assert expanded(whole)["variants"].items() >= whole["variants"].items()
    assert expanded({"sweeps": value, "variants": value}) is not None


def test_the_same_recipe_is_the_same_whatever_the_order_of_its_keys():
    recipe = {**DEFAULTS, **BASE, "k": 4, "corpus": "prose", "sequences": 64}
    assert same(recipe) == same(dict(reversed(recipe.items())))
