"""What a run has to fit, cut into jobs that share work: variants that are fitted on the same rows share one.

Knows the checked config; reads and computes nothing. Does not know what the variants answer afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.config import Project


def variants_of(project: Project, pair: str) -> list[str]:
    """The variants that are run on a pair: the headline, those of its sweeps, and those that go on with its conversations."""
    listed = [name for sweep in sweeps_of(project, pair).values() for name in sweep["variants"]]
    coqa = project.config.get("coqa") or {"pairs": []}
    talking = coqa["variants"] if pair in coqa["pairs"] else []
    return list(dict.fromkeys([project.headline(pair), *listed, *talking]))


def sweeps_of(project: Project, pair: str) -> dict[str, Any]:
    """The sweeps that are run on a pair, by name."""
    return {name: sweep for name, sweep in project.config["sweeps"].items() if pair in sweep["pairs"]}


def fit_jobs(project: Project, pair: str) -> dict[str, list[str]]:
    """Variants by what they are fitted on: the name of the job says corpus, sequences, and what else sets the rows apart."""
    jobs: dict[str, list[str]] = {}
    for name in variants_of(project, pair):
        jobs.setdefault(rows_of(project.variant(name)), []).append(name)
    return jobs


def rows_of(recipe: dict[str, Any]) -> str:
    """The name of the rows that a recipe is fitted on; weights by position and RoPE take no further pass over them."""
    parts = [recipe["corpus"], str(recipe["sequences"])]
    parts += ["attention"] if recipe["row_weights"] == "attention" else []
    return "-".join(parts + (["mlp"] if recipe["method"] == "mlp" else []))


def main_rows(project: Project) -> str:
    """The name of the rows that the moments of a pair are summed over."""
    calibration = project.config["calibration"]
    return f"{calibration['corpus']}-{calibration['sequences']}"


def calibration_on(project: Project, corpus: str) -> dict[str, Any]:
    """How a corpus is dumped: the config's calibration, with as many sequences as the largest fit on that corpus takes."""
    calibration = project.config["calibration"]
    recipes = project.config["variants"].values()
    asked = [recipe["sequences"] for recipe in recipes if recipe["corpus"] == corpus]
    asked += [calibration["sequences"]] if corpus == calibration["corpus"] else []
    return calibration | {"corpus": corpus, "sequences": max(asked, default=1)}


def early_positions(project: Project, pair: str) -> int:
    """First positions of a sequence whose rows are kept apart from the moments, since some recipe weighs or leaves them out."""
    recipes = [project.variant(name) for name in variants_of(project, pair)]
    weighed = [recipe["sink_positions"] for recipe in recipes if recipe["row_weights"] == "sink"]
    dropped = [recipe["native_head"] for recipe in recipes if recipe["head_rows"] == "left_out"]
    return max([0, *weighed, *dropped])


def moments_of(project: Project, pair: str) -> dict[str, Any]:
    """What the moments of a pair are summed for; greedy selection, and several ways to weigh rows, want every column."""
    recipes = [project.recipe(pair, name) for name in fit_jobs(project, pair).get(main_rows(project), [])]
    ways = {(recipe["row_weights"], recipe["native_head"] * (recipe["head_rows"] == "left_out")) for recipe in recipes}
    wide = len(ways) > 1 or pair in project.config.get("greedy", {}).get("pairs", [])
    ks = [recipe["k"] for recipe in recipes]
    return {
        "sequences": project.config["calibration"]["sequences"],
        "early": early_positions(project, pair),
        "k": "all" if wide or "all" in ks else max(ks, default=1),
        "memory_mb": project.config["fit"]["memory_mb"],
        "coupled": any(recipe["rope"] == "coupled" for recipe in recipes),
    }


def weighs_attention(project: Project, model: str, corpus: str) -> bool:
    """Whether a model is the target of a fit on this corpus with rows weighed by its attention."""
    return any(
        recipe["row_weights"] == "attention" and recipe["corpus"] == corpus
        for pair in project.config["pairs"]
        if project.pair(pair)["target"] == model
        for recipe in map(project.variant, variants_of(project, pair))
    )
