"""Table of the MLP fallback against ridge with as many source layers. Knows one sweep."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from kvferry.errors import KvferryError
from kvferry.records import NEXT_TOKEN_KL, PERPLEXITY
from kvferry.report import compare
from kvferry.report.inputs import Pair, Results, Sweep
from kvferry.report.items import Items
from kvferry.report.papers_recipe import NETWORK, RIDGE
from kvferry.report.tables.cells import PAPER, N, Row, cells, empty, frame_of
from kvferry.report.tables.geometry import fit_quality
from kvferry.report.tables.scores import items_of_sweep, scores_on
from kvferry.report.wanted import MLP

HELLASWAG = "hellaswag"
OVER_RIDGE = "_vs_ridge"


def table3_mlp(results: Results) -> pd.DataFrame:
    """Two rows for each pair and MLP of the sweep: a ridge, then the MLP with what it gains over it.

    The ridge is the first of the sweep with the same k, else the headline if it has it, else the sweep's first.

    Retention and what the MLP gains in percent of the target's accuracy, on the same items.

    Raises:
        KvferryError: the sweep has no MLP, or nothing to compare it with, or a record is missing.
    """
    sweep = results.sweep(MLP)
    rows = []
    for pair in results.pairs_of(sweep):
        for ridge, mlp in matched(results, sweep, pair):
            items = items_of_sweep(results, pair, sweep, [ridge])
            rows += [_row(results, pair, ridge, None, items), _row(results, pair, mlp, ridge, items)]
    return frame_of(rows)


def matched(results: Results, sweep: Sweep, pair: Pair) -> list[tuple[str, str]]:
    """(ridge, MLP) for each MLP of the sweep.

    Raises:
        KvferryError: the sweep has no MLP, or nothing to compare it with.
    """
    names = list(dict.fromkeys([*sweep.variants, results.headline(pair)]))
    mlps = [name for name in sweep.variants if results.recipe(pair.name, name)["method"] == NETWORK]
    others = [name for name in names if results.recipe(pair.name, name)["method"] != NETWORK]
    if not mlps or not others:
        raise KvferryError(
            f"sweeps.{MLP}: compares ridge with method {NETWORK}, and one of the two is not there; add it"
        )
    k = {name: results.k(pair.name, name) for name in names}
    return [(next((other for other in others if k[other] == k[mlp]), others[0]), mlp) for mlp in mlps]


def _row(results: Results, pair: Pair, system: str, ridge: str | None, items: Mapping[str, Items]) -> Row:
    manifest = results.manifests[pair.name, system]
    row: Row = {"pair": pair.name, "system": system, "method": manifest["recipe"]["method"]}
    row |= {"k": results.k(pair.name, system), "parameters": manifest["parameters"]}
    if HELLASWAG in items:
        row |= _hellaswag(results, pair, system, ridge, items[HELLASWAG])
    row |= scores_on(results, pair, system, {name: items[name] for name in (PERPLEXITY, NEXT_TOKEN_KL)})
    if ridge is None:
        row |= empty(NEXT_TOKEN_KL + OVER_RIDGE)
    else:
        gained = compare.gained(results, pair, system, ridge, NEXT_TOKEN_KL, items[NEXT_TOKEN_KL])
        row |= cells(NEXT_TOKEN_KL + OVER_RIDGE, gained, scale=1)
    return row | fit_quality(manifest)


def _hellaswag(results: Results, pair: Pair, system: str, ridge: str | None, items: Items) -> Row:
    name = HELLASWAG + "_retention"
    row = cells(name, compare.retention(results, pair, system, HELLASWAG, items)) | {name + N: len(items)}
    column = RIDGE if ridge is None else NETWORK
    paper = results.comparable(pair, system, methods=(column,))
    row |= {name + PAPER: None if paper is None else results.paper.value("table3", paper, column)}
    if ridge is None:
        return row | empty(HELLASWAG + OVER_RIDGE)
    return row | cells(HELLASWAG + OVER_RIDGE, compare.retention_gained(results, pair, system, ridge, HELLASWAG, items))
