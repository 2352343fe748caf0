"""Sweeps: lists of variants that a table or figure compares, written out or as every combination of some values.

Turns a config's `over` into named variants before the config is checked, and gives recipes that are the same one name
afterwards. Does not know pairs' geometry, nor how a variant is fitted.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import product
from typing import Any

Recipe = dict[str, Any]
# Not a key that a config may have: what is written under `others` stays as it is.
UNLISTED = "unlisted"
# What a recipe has for k where it reads as many source layers as the headline of the pair.
OF_HEADLINE = "headline"
# What `over` takes: keys of a recipe with plain values, and what stands before a value in the name of a variant.
PREFIX = {
    "method": "",
    "k": "k",
    "lambda": "lambda",
    "lambda_scale": "",
    "rope": "",
    "support": "",
    "row_weights": "",
    "sink_positions": "sinks",
    "sink_weight": "weight",
    "corpus": "",
    "sequences": "n",
    "native_head": "head",
    "head_rows": "",
    "dtype": "",
}
BASE_KEYS = {*PREFIX, "mlp"}


def expanded(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """The config, unchecked as it still is, with a variant for every combination of each sweep's `over`.

    What is not of the form that the schema wants is left as it is, for the schema to refuse. A variant that is written out
    stays where `over` makes one of its name.
    """
    if not isinstance(config, dict):
        return config
    sweeps, variants = config.get("sweeps"), config.get("variants")
    if not isinstance(sweeps, dict) or not isinstance(variants, dict):
        return config
    made: dict[str, Recipe] = {}
    written: dict[str, Any] = {}
    for name, sweep in sweeps.items():
        recipes = _combinations(name, sweep) if _is_grid(sweep) else {}
        made |= recipes
        # A base that is there, even an empty one, gets a recipe's defaults from the schema.
        filled = {"base": sweep.get("base", {}), "variants": [*sweep.get("variants", []), *recipes]} if recipes else {}
        written[name] = sweep | filled if filled else sweep
    return config | {"sweeps": written, "variants": made | variants}


def _is_grid(sweep: Any) -> bool:
    """Whether a sweep has an `over`, and all that is combined is of the form that the schema wants."""
    over = sweep.get("over") if isinstance(sweep, dict) else None
    if not isinstance(over, dict) or not over or not over.keys() <= PREFIX.keys():
        return False
    base, variants = sweep.get("base", {}), sweep.get("variants", [])
    if not isinstance(base, dict) or not base.keys() <= BASE_KEYS or not isinstance(variants, list):
        return False
    return all(isinstance(values, list) and all(map(_is_plain, values)) for values in over.values())


def _is_plain(value: Any) -> bool:
    """Whether a value can stand in a variant's name."""
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _combinations(name: str, sweep: dict[str, Any]) -> dict[str, Recipe]:
    """The recipes of a sweep with an `over`, by name."""
    over, found = sweep["over"], {}
    for values in product(*over.values()):
        chosen = dict(zip(over, values, strict=True))
        label = "-".join([str(name), *(f"{PREFIX[key]}{value}" for key, value in chosen.items())])
        found[label] = {**sweep.get("base", {}), **chosen}
    return found


def made_by(sweep: str, config: dict[str, Any]) -> dict[str, Recipe]:
    """The complete recipes that the `over` of a sweep of a checked config makes, by the names that they are made under."""
    entry = config["sweeps"][sweep]
    recipes = _combinations(sweep, entry) if "over" in entry else {}
    return {name: _complete(recipe, config["calibration"]) for name, recipe in recipes.items()}


def settled(config: dict[str, Any]) -> dict[str, Any]:
    """The checked config with every recipe complete, one name a recipe, and every variant in use: in a sweep if nowhere else."""
    complete = {name: _complete(recipe, config["calibration"]) for name, recipe in config["variants"].items()}
    names = _one_name(complete, config)
    headline = _renamed(config["headline"], names)
    sweeps = {name: _settled_sweep(sweep, names, config["pairs"]) for name, sweep in config["sweeps"].items()}
    listed = {*headlines(headline).values(), *config.get("coqa", {"variants": []})["variants"]}
    listed |= {variant for sweep in sweeps.values() for variant in sweep["variants"]}
    kept = [name for name in complete if names[name] == name]
    rest = [name for name in kept if name not in listed]
    if rest:
        sweeps[UNLISTED] = {"pairs": list(config["pairs"]), "variants": rest, "benchmarks": {}}
    return config | {"headline": headline, "variants": {name: complete[name] for name in kept}, "sweeps": sweeps}


def headlines(headline: str | dict[str, Any]) -> dict[tuple[str, ...], str]:
    """The variants that are headlines, by the key of the config that names each."""
    if isinstance(headline, str):
        return {("headline",): headline}
    of_pairs = {("headline", "pairs", pair): name for pair, name in headline["pairs"].items()}
    return {("headline", "default"): headline["default"], **of_pairs}


def _renamed(headline: str | dict[str, Any], names: dict[str, str]) -> str | dict[str, Any]:
    """The headline, or each pair's, under the one name that its recipe has."""
    if isinstance(headline, str):
        return names.get(headline, headline)
    return {key: _renamed(value, names) for key, value in headline.items()}


def _complete(recipe: Recipe, calibration: dict[str, Any]) -> Recipe:
    """The recipe with what it takes from the calibration; methods without a penalty have lambda 0."""
    own = {"corpus": calibration["corpus"], "sequences": calibration["sequences"]} | recipe
    return own if own.get("method") == "ridge" else {"lambda": 0.0} | own


def _one_name(recipes: dict[str, Recipe], config: dict[str, Any]) -> dict[str, str]:
    """name → the first name of the same recipe, names that the config writes out before those that `over` made."""
    grids = {name: recipe for sweep in config["sweeps"] for name, recipe in made_by(sweep, config).items()}
    identities = {name: identity(recipe) for name, recipe in recipes.items()}
    made = {name for name, recipe in grids.items() if identity(recipe) == identities[name]}
    first: dict[Hashable, str] = {}
    for name in sorted(recipes, key=lambda name: name in made):
        first.setdefault(identities[name], name)
    # A variant that is written out keeps its name even where another one has the same recipe.
    return {name: first[identities[name]] if name in made else name for name in recipes}


def identity(recipe: Recipe) -> Hashable:
    """What is equal for recipes that are the same, whatever the order of their keys; 1 is 1.0."""
    parts = same(recipe).items()
    return frozenset((key, frozenset(part.items()) if isinstance(part, dict) else part) for key, part in parts)


def same(recipe: Recipe) -> Recipe:
    """The recipe without what makes no difference to it."""
    idle = []
    if recipe.get("method") != "mlp":
        idle += ["mlp"]
    if recipe["row_weights"] != "sink":
        idle += ["sink_positions", "sink_weight"]
    if not recipe["native_head"]:
        idle += ["head_rows"]
    if not recipe.get("lambda"):
        idle += ["lambda_scale", "method"] if recipe.get("method") != "mlp" else ["lambda_scale"]
    return {key: value for key, value in recipe.items() if key not in idle}


def _settled_sweep(sweep: dict[str, Any], names: dict[str, str], pairs: list[str]) -> dict[str, Any]:
    """With its pairs, and its variants under their one name; a name that is not there stays, to be refused."""
    variants = list(dict.fromkeys(names.get(name, name) for name in sweep["variants"]))
    return sweep | {"pairs": list(sweep.get("pairs", pairs)), "variants": variants}
