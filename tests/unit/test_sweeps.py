"""Sweeps become named variants: every combination once, one name a recipe, nothing lost."""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.sweeps import BASE_KEYS, PREFIX, expanded, identity, settled
from kvferry.yamlfile import read_yaml

SCHEMA = Path(__file__).parents[2] / "workflow/schemas/config.schema.yaml"
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
    """A config as it is after its check; recipes and what they have in common are filled here."""
    written = {
        "pairs": ["a", "b"],
        "calibration": {"corpus": "prose", "sequences": 64},
        "headline": headline,
        "variants": {"main": {**BASE, "k": 8}, **dict(variants)},
        "sweeps": {name: {"variants": [], "benchmarks": {}, **sweep} for name, sweep in sweeps.items()},
    }
    made = expanded(written)
    recipes = {name: {**DEFAULTS, **recipe} for name, recipe in made["variants"].items()}
    filled = {
        name: sweep | ({"base": {**DEFAULTS, **sweep["base"]}} if "base" in sweep else {})
        for name, sweep in made["sweeps"].items()
    }
    return made | {"variants": recipes, "sweeps": filled}


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
        ({"method": ["ridge", "ols"], "lambda": [0]}, 1),
        ({"lambda": [0, 0.0]}, 1),
        ({"lambda": [1, 1.0, 2]}, 2),
        ({"row_weights": ["sink"], "sink_weight": [2, 2.0]}, 1),
    ],
)
def test_what_makes_no_difference_makes_no_variant(over, count):
    assert len(names({"base": {**BASE, "k": 4}, "over": over})) == count


def test_variants_of_no_sweep_are_run_on_every_pair_and_change_no_sweep():
    others = {"pairs": ["b"], "variants": ["own"], "benchmarks": {"mmlu": {"limit": 2}}}
    found = settled(config({"others": others}, {"own": {**BASE, "k": 1}, "spare": {**BASE, "k": 2}}))
    assert found["sweeps"] == {
        "others": others,
        "unlisted": {"pairs": ["a", "b"], "variants": ["spare"], "benchmarks": {}},
    }


def test_where_every_variant_is_in_a_sweep_none_is_added():
    assert set(settled(config({"k": {"variants": ["own"]}}, {"own": {**BASE, "k": 2}}))["sweeps"]) == {"k"}


def test_a_headline_that_over_made_goes_by_the_name_that_its_recipe_has():
    found = settled(config({"k": {"base": BASE, "over": {"k": [8]}}}, headline="k-k8"))
    assert found["headline"] == "main"
    assert list(found["variants"]) == ["main"]


def test_a_written_variant_of_a_made_name_and_another_recipe_is_not_merged():
    twin = {"k-k4": {**BASE, "k": 8}}
    found = settled(config({"k": {"base": BASE, "over": {"k": [4]}}}, twin))
    assert found["variants"]["k-k4"]["k"] == 8


@pytest.mark.parametrize("recipe", [{**BASE, "k": 4}, {**BASE, "k": 4, "rope": "stripped"}])
def test_a_written_variant_of_a_made_name_and_its_recipe_is_that_variant(recipe):
    found = settled(config({"k": {"base": BASE, "over": {"k": [4]}}}, {"k-k4": recipe}))
    assert set(found["variants"]) == {"main", "k-k4"}


def test_settling_again_changes_nothing():
    found = settled(config({"k": {"base": BASE, "over": {"k": [4, 8]}}}))
    assert settled(expanded(found)) == found


@pytest.mark.parametrize(
    "over",
    [{}, {"kk": [1]}, {1: [1]}, {"k": 1}, {"k": [[1]]}, {"k": [True]}, {"k": [None]}, {"mlp": [{"width": 8}]}, None],
)
def test_an_over_that_the_schema_refuses_makes_nothing(over):
    whole = {"variants": {"main": {}}, "sweeps": {"k": {"base": BASE, "over": over}}}
    assert expanded(whole) == whole


def test_over_takes_what_the_schema_says():
    schemas = read_yaml(SCHEMA)["$defs"]
    sweep = schemas["sweep"]["properties"]
    assert set(sweep["over"]["properties"]) - {"mlp"} == set(PREFIX)
    assert set(schemas["variant"]["properties"]) == set(sweep["base"]["properties"]) == BASE_KEYS


def test_combinations_have_names_of_their_own():
    over = {"sink_positions": [1, 2], "sink_weight": [1, 2], "native_head": [1, 2], "row_weights": ["sink"]}
    assert len(expanded({"variants": {}, "sweeps": {"k": {"base": BASE, "over": over}}})["variants"]) == 8


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
    recipe = {**DEFAULTS, **BASE, "method": "mlp", "k": 4, "mlp": {"width": 8, "batch": 4}}
    turned = dict(reversed(recipe.items())) | {"mlp": {"batch": 4.0, "width": 8}}
    assert identity(recipe) == identity(turned)
    assert identity(recipe) != identity(turned | {"mlp": {"batch": 4, "width": 9}})
