"""What a run has to fit and to answer, cut into jobs that share work. Knows the checked config; reads and computes nothing.

Variants that are fitted on the same rows share a fit job. Systems of a pair share evaluation jobs, and with them each prefill of
the source and the target's own reading; a job has only so many that several cores get some.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvferry.records import APPLY_TIME, NEXT_TOKEN_KL, PERPLEXITY, TOP1_AGREEMENT, ZERO_CACHE

if TYPE_CHECKING:
    from kvferry.config import Project

MEASURES = (PERPLEXITY, NEXT_TOKEN_KL, TOP1_AGREEMENT)

Limits = dict[str, int | None]


def variants_of(project: Project, pair: str) -> list[str]:
    """The variants that are run on a pair: the headline, then those of its sweeps."""
    listed = (name for sweep in _sweeps(project, pair).values() for name in sweep["variants"])
    return list(dict.fromkeys([project.config["headline"], *listed]))


def _sweeps(project: Project, pair: str) -> dict[str, Any]:
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
    if corpus == calibration["corpus"]:
        return dict(calibration)
    recipes = project.config["variants"].values()
    most = max((recipe["sequences"] for recipe in recipes if recipe["corpus"] == corpus), default=1)
    return calibration | {"corpus": corpus, "sequences": most}


def early_positions(project: Project, pair: str) -> int:
    """First positions of a sequence whose rows are kept apart from the moments, since some recipe weighs or leaves them out."""
    recipes = [project.variant(name) for name in variants_of(project, pair)]
    weighed = [recipe["sink_positions"] for recipe in recipes if recipe["row_weights"] == "sink"]
    dropped = [recipe["native_head"] for recipe in recipes if recipe["head_rows"] == "left_out"]
    return max([0, *weighed, *dropped])


def moments_of(project: Project, pair: str) -> dict[str, Any]:
    """What the moments of a pair are summed for; greedy selection, and several ways to weigh rows, want every column."""
    recipes = [project.variant(name) for name in fit_jobs(project, pair).get(main_rows(project), [])]
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


def evaluation_jobs(project: Project, pair: str) -> dict[str, dict[str, Limits]]:
    """job → system → benchmark → number of items (None: all); the headline on everything, a zeroed cache on no benchmark."""
    evaluation, headline = project.config["evaluation"], project.config["headline"]
    full = {name: None if evaluation["full"] else how["limit"] for name, how in evaluation["benchmarks"].items()}
    asked: dict[str, Limits] = {headline: full, ZERO_CACHE: {}}
    asked |= {name: limits_of(project, pair, name) for name in variants_of(project, pair) if name != headline}
    return {
        str(number): dict(part) for number, part in enumerate(_even(list(asked.items()), evaluation["systems_a_job"]))
    }


def _even(things: list[Any], most: int) -> list[list[Any]]:
    """Lists of nearly the same length, `most` at most, dealt out in turns: neighbours in a sweep cost about the same."""
    count = -(-len(things) // most)
    return [things[start::count] for start in range(count)]


def limits_of(project: Project, pair: str, variant: str) -> Limits:
    """The benchmarks of all sweeps that a variant is in, each with the largest limit; without one where the run is a full one."""
    limits: Limits = {}
    for sweep in _sweeps(project, pair).values():
        if variant in sweep["variants"]:
            for name, how in sweep["benchmarks"].items():
                limits[name] = max(how["limit"], limits.get(name) or 0)
    return dict.fromkeys(limits) if project.config["evaluation"]["full"] else limits


def measured(system: str, limits: Iterable[str]) -> list[str]:
    """All records of a system of a pair: its benchmarks, the measures of the next token, and the time of its mapper."""
    return [*limits, *MEASURES, *([] if system == ZERO_CACHE else [APPLY_TIME])]
