"""What a run has to fit and to answer, cut into jobs that share work. Knows the checked config; reads and computes nothing.

Variants that are fitted on the same rows share a fit job; those of a sweep share an evaluation job, and with it each prefill
of the source.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvferry.records import APPLY_TIME, NEXT_TOKEN_KL, PERPLEXITY, TOP1_AGREEMENT, ZERO_CACHE

if TYPE_CHECKING:
    from kvferry.config import Project

HEADLINE = "headline"
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
    """The name of the rows that a recipe is fitted on; weights by position can be changed without another pass over them."""
    parts = [recipe["corpus"], str(recipe["sequences"])]
    parts += ["coupled"] if recipe["rope"] == "coupled" else []
    parts += ["attention"] if recipe["row_weights"] == "attention" else []
    return "-".join(parts + (["mlp"] if recipe["method"] == "mlp" else []))


def main_rows(project: Project) -> str:
    """The name of the rows that the moments of a pair are summed over."""
    calibration = project.config["calibration"]
    return f"{calibration['corpus']}-{calibration['sequences']}"


def corpora_of(project: Project, pair: str) -> list[str]:
    """Corpora that a pair needs dumps of, the calibration's first."""
    own = [project.variant(name)["corpus"] for name in variants_of(project, pair)]
    return list(dict.fromkeys([project.config["calibration"]["corpus"], *own]))


def calibration_on(project: Project, corpus: str) -> dict[str, Any]:
    """How a corpus is dumped: the config's calibration, with as many sequences as the largest fit on that corpus takes."""
    calibration = project.config["calibration"]
    if corpus == calibration["corpus"]:
        return dict(calibration)
    recipes = project.config["variants"].values()
    most = max((recipe["sequences"] for recipe in recipes if recipe["corpus"] == corpus), default=1)
    return calibration | {"corpus": corpus, "sequences": most}


def early_positions(project: Project) -> int:
    """First positions of a sequence whose rows are kept apart from the moments, since some recipe weighs or leaves them out."""
    recipes = project.config["variants"].values()
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
        "early": early_positions(project),
        "k": "all" if wide or "all" in ks else max(ks, default=1),
        "memory_mb": project.config["fit"]["memory_mb"],
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
    """job → system → benchmark → number of items (None: all): the headline and the zeroed cache, then a job a sweep."""
    evaluation, headline = project.config["evaluation"], project.config["headline"]
    full = {name: None if evaluation["full"] else how["limit"] for name, how in evaluation["benchmarks"].items()}
    jobs: dict[str, dict[str, Limits]] = {HEADLINE: {headline: full, ZERO_CACHE: {}}}
    done = {headline}
    for name, sweep in _sweeps(project, pair).items():
        own = [variant for variant in sweep["variants"] if variant not in done]
        done |= set(own)
        if own:
            jobs[name] = {variant: limits_of(project, pair, variant) for variant in own}
    return jobs


def limits_of(project: Project, pair: str, variant: str) -> Limits:
    """The benchmarks of all sweeps that a variant is in, each with the largest limit."""
    limits: Limits = {}
    for sweep in _sweeps(project, pair).values():
        if variant in sweep["variants"]:
            for name, how in sweep["benchmarks"].items():
                limits[name] = max(how["limit"], limits.get(name) or 0)
    return limits


def measured(system: str, limits: Iterable[str]) -> list[str]:
    """All records of a system of a pair: its benchmarks, the measures of the next token, and the time of its mapper."""
    return [*limits, *MEASURES, *([] if system == ZERO_CACHE else [APPLY_TIME])]
