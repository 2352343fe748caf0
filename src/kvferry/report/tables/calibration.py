"""Tables of what the fit depends on: strength and scale of λ, number of calibration sequences, domain. Knows three sweeps."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from kvferry.records import NEXT_TOKEN_KL, PERPLEXITY, TOP1_AGREEMENT
from kvferry.report import compare
from kvferry.report.inputs import Pair, Results, Sweep
from kvferry.report.items import Items
from kvferry.report.labels import Recipe
from kvferry.report.paper import ABLATED
from kvferry.report.papers_recipe import COUPLED, LINEAR, RIDGE, STRIPPED
from kvferry.report.stats import mean_of
from kvferry.report.tables.cells import PAPER, Row, cells, frame_of
from kvferry.report.tables.geometry import fit_quality
from kvferry.report.tables.scores import items_of_sweep, scores_on
from kvferry.report.wanted import DOMAIN, LAMBDA, SEQUENCES

VARIED = {LAMBDA: "lambda", SEQUENCES: "sequences", DOMAIN: "corpus"}
# The paper's sweeps over λ and sequences start from a RoPE-coupled recipe, ours may; with λ = 0 ridge is OLS.
PAPERS: dict[str, dict[str, tuple[str, ...]]] = {
    LAMBDA: {"methods": LINEAR, "ropes": (STRIPPED, COUPLED)},
    SEQUENCES: {"methods": (RIDGE,), "ropes": (STRIPPED, COUPLED)},
    DOMAIN: {},
}
# What the paper calls corpora of config/corpora.yaml; the passages of BoolQ there are not its Wikipedia.
PAPERS_DOMAINS = {"fineweb-edu": "FineWeb-Edu", "wikipedia-en": "Wikipedia", "codealpaca": "CodeAlpaca"}
SHOWN = ("hellaswag", PERPLEXITY, NEXT_TOKEN_KL, TOP1_AGREEMENT)


def table8_calibration(results: Results) -> pd.DataFrame:
    """A row for each variant of the sweeps over λ, sequences and domain: its setting, scores and R²."""
    sweeps = [results.sweep(name) for name in VARIED if name in results.sweeps]
    return frame_of(
        [row for sweep in sweeps for pair in results.pairs_of(sweep) for row in _setting_rows(results, sweep, pair)]
    )


def _setting_rows(results: Results, sweep: Sweep, pair: Pair) -> list[Row]:
    items = items_of_sweep(results, pair, sweep)
    shown = {name: items.get(name) for name in SHOWN}
    return [_setting_row(results, sweep, pair, variant, shown) for variant in sweep.variants]


def _setting_row(results: Results, sweep: Sweep, pair: Pair, variant: str, items: Mapping[str, Items | None]) -> Row:
    recipe, setting = results.recipe(pair.name, variant), _setting(sweep, results.recipe(pair.name, variant))
    row: Row = {"varied": sweep.name, "pair": pair.name, "system": variant, "k": results.k(pair.name, variant)}
    row |= {"setting": setting, "scale": _scale(recipe)}
    known = results.comparable(pair, variant, **PAPERS[sweep.name])

    def paper(name: str) -> float | None:
        wanted = {"pair": known, "varied": sweep.name, "setting": _papers_setting(sweep, setting)}
        return None if known is None else results.paper.where("table8", name, **wanted)

    return row | scores_on(results, pair, variant, items, paper) | fit_quality(results.manifests[pair.name, variant])


def _setting(sweep: Sweep, recipe: Recipe) -> str:
    """As a word, so that every table shows 0.0001 in full."""
    value = recipe[VARIED[sweep.name]]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _papers_setting(sweep: Sweep, setting: str) -> str | None:
    return PAPERS_DOMAINS.get(setting.casefold()) if sweep.name == DOMAIN else setting


def _scale(recipe: Recipe) -> str:
    """What λ multiplies; nothing where it is 0."""
    return recipe["lambda_scale"] if recipe["method"] == "ridge" and recipe["lambda"] else "none"


def table9_domain(results: Results) -> pd.DataFrame:
    """Accuracies by domain of the calibration text, a row a variant, and their mean over the benchmarks of the sweep."""
    sweep = results.sweep(DOMAIN)
    return frame_of([row for pair in results.pairs_of(sweep) for row in _domain_rows(results, sweep, pair)])


def _domain_rows(results: Results, sweep: Sweep, pair: Pair) -> list[Row]:
    shared = items_of_sweep(results, pair, sweep)
    items = {name: shared[name] for name in sweep.benchmarks}
    return [_domain_row(results, pair, variant, items) for variant in sweep.variants]


def _domain_row(results: Results, pair: Pair, variant: str, items: Mapping[str, Items]) -> Row:
    domain = results.recipe(pair.name, variant)["corpus"]
    known = PAPERS_DOMAINS.get(domain.casefold()) if results.comparable(pair, variant) == ABLATED else None

    def paper(name: str) -> float | None:
        return None if known is None else results.paper.value("table9", known, name)

    row: Row = {"pair": pair.name, "domain": domain, "system": variant}
    row |= scores_on(results, pair, variant, items, paper)
    own = {name: compare.together(results, pair, (variant,), name, ids)[0] for name, ids in items.items()}
    # The paper's own mean is over seven benchmarks; ours stands beside the mean of the same ones.
    values = [paper(name) for name in items]
    theirs = None if not values or None in values else sum(value for value in values if value is not None) / len(values)
    return row | cells("mean", mean_of(own)) | {"mean" + PAPER: theirs}
