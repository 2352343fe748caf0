"""Sweeps: lists of variants that a table or figure compares, written out or as every combination of some values.

Turns a config's `over` into named variants before the config is checked, and gives recipes that are the same one name
afterwards. Does not know pairs' geometry, nor how a variant is fitted.
"""

from __future__ import annotations

from itertools import product
from typing import Any

Recipe = dict[str, Any]
OTHERS = "others"
PREFIX = {"k": "k", "native_head": "head", "sequences": "n", "lambda": "lambda"}


def expanded(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """The config, unchecked as it still is, with a variant for every combination of each sweep's `over`.

    What is not of the form that the schema wants is left as it is, for the schema to refuse.
    """
    sweeps, variants = (config or {}).get("sweeps"), (config or {}).get("variants")
    if not isinstance(sweeps, dict) or not isinstance(variants, dict):
        return config
    made: dict[str, Recipe] = {}
    written: dict[str, Any] = {}
    for name, sweep in sweeps.items():
        recipes = _combinations(name, sweep)
        made |= recipes
        written[name] = sweep | {"variants": [*sweep.get("variants", []), *recipes]} if recipes else sweep
    return config | {"sweeps": written, "variants": made | variants}


def _combinations(name: str, sweep: Any) -> dict[str, Recipe]:
    """The recipes of one sweep's `over`, by name."""
    over = sweep.get("over") if isinstance(sweep, dict) else None
    if not isinstance(over, dict) or not all(isinstance(values, list) for values in over.values()):
        return {}
    if not isinstance(sweep.get("base", {}), dict) or not isinstance(sweep.get("variants", []), list):
        return {}
    found = {}
    for values in product(*over.values()):
        chosen = dict(zip(over, values, strict=True))
        label = "-".join([str(name), *(f"{PREFIX.get(key, '')}{value}" for key, value in chosen.items())])
        found[label] = {**sweep.get("base", {}), **chosen}
    return found


def settled(config: dict[str, Any]) -> dict[str, Any]:
    """The checked config with every recipe complete, one name a recipe, and every variant in a sweep or the headline."""
    calibration = config["calibration"]
    complete = {name: _complete(recipe, calibration) for name, recipe in config["variants"].items()}
    names = _one_name(complete, config)
    sweeps = {name: _settled_sweep(sweep, names, config["pairs"]) for name, sweep in config["sweeps"].items()}
    listed = {variant for sweep in sweeps.values() for variant in sweep["variants"]}
    kept = [name for name in complete if names[name] == name]
    rest = [name for name in kept if name not in listed and name != config["headline"]]
    if rest:
        before = sweeps.get(OTHERS, {"variants": []})["variants"]
        sweeps[OTHERS] = {"pairs": list(config["pairs"]), "variants": [*before, *rest], "benchmarks": {}}
    return config | {"variants": {name: complete[name] for name in kept}, "sweeps": sweeps}


def _complete(recipe: Recipe, calibration: dict[str, Any]) -> Recipe:
    """The recipe with what it takes from the calibration; methods without a penalty have lambda 0."""
    own = {"corpus": calibration["corpus"], "sequences": calibration["sequences"]} | recipe
    return own if recipe["method"] == "ridge" else {"lambda": 0.0} | own


def _one_name(recipes: dict[str, Recipe], config: dict[str, Any]) -> dict[str, str]:
    """name → the first name of the same recipe, names that the config writes out before those that `over` made."""
    made = {name for sweep, entry in config["sweeps"].items() for name in _combinations(sweep, entry)}
    first: dict[str, str] = {}
    for name in sorted(recipes, key=lambda name: name in made):
        first.setdefault(repr(sorted(same(recipes[name]).items())), name)
    # A variant that is written out keeps its name even where another one has the same recipe.
    return {
        name: first[repr(sorted(same(recipe).items()))] if name in made else name for name, recipe in recipes.items()
    }


def same(recipe: Recipe) -> Recipe:
    """The recipe without what makes no difference to it."""
    idle = []
    if recipe["method"] != "mlp":
        idle += ["mlp"]
    if recipe["row_weights"] != "sink":
        idle += ["sink_positions", "sink_weight"]
    if not recipe["native_head"]:
        idle += ["head_rows"]
    if not recipe.get("lambda"):
        idle += ["lambda_scale", "method"] if recipe["method"] != "mlp" else ["lambda_scale"]
    return {key: value for key, value in recipe.items() if key not in idle}


def _settled_sweep(sweep: dict[str, Any], names: dict[str, str], pairs: list[str]) -> dict[str, Any]:
    """Its pairs, its variants under their one name (a name that is not there stays, to be refused), its benchmarks."""
    variants = list(dict.fromkeys(names.get(name, name) for name in sweep["variants"]))
    return {"pairs": list(sweep.get("pairs", pairs)), "variants": variants, "benchmarks": sweep["benchmarks"]}
