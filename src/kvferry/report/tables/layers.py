"""Tables of the number of source layers k: what it does to the fit, and which k is chosen. Knows one sweep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd

from kvferry.records import NEXT_TOKEN_KL
from kvferry.report import compare
from kvferry.report.inputs import Pair, Results, Sweep
from kvferry.report.items import Items, limited, record_of
from kvferry.report.names import BENCHMARKS, OF_ALL
from kvferry.report.papers_recipe import is_papers
from kvferry.report.stats import Undefined, mean_of
from kvferry.report.tables.cells import PAPER, Row, cell, cells, frame_of
from kvferry.report.tables.geometry import fit_quality
from kvferry.report.tables.scores import items_of_sweep
from kvferry.report.wanted import BY_K

CHOOSING = ("hellaswag", "mmlu", "arc_challenge")
NEAR_TIE = 0.5  # percentage points: within it the larger k is taken (the paper)
ROUNDING = 1e-9


def variants_by_k(results: Results, sweep: Sweep, pair: Pair) -> dict[int, str]:
    """The variants of a sweep by their number of source layers, ascending; the first where `all` equals a number."""
    found: dict[int, str] = {}
    for variant in sweep.variants:
        found.setdefault(results.k(pair.name, variant), variant)
    return dict(sorted(found.items()))


def table7_r2_vs_k(results: Results) -> pd.DataFrame:
    """R² of keys and values against k, in sample and held out, with p/n and its share of that of all source layers."""
    sweep = results.sweep(BY_K)
    return frame_of([row for pair in results.pairs_of(sweep) for row in _fit_rows(results, sweep, pair)])


def _fit_rows(results: Results, sweep: Sweep, pair: Pair) -> list[Row]:
    variants, layers = variants_by_k(results, sweep, pair), results.cards[pair.source]["layers"]
    fits = {k: fit_quality(results.manifests[pair.name, variant]) for k, variant in variants.items()}
    rows = []
    for k, variant in variants.items():
        manifest = results.manifests[pair.name, variant]
        row: Row = {"pair": pair.name, "system": variant, "k": k, "source_layers": layers, "rows": manifest["rows"]}
        row |= {"p_over_n": manifest["features"] / manifest["rows"]}
        for name, value in fits[k].items():
            row |= {name: value} | cell(name + OF_ALL, _share(value, fits.get(layers, {}).get(name)))
            row |= {name + PAPER: _paper(results, pair, variant, name)} if name.endswith("in_sample") else {}
        rows.append(row)
    return rows


def _share(value: float, of_all: float | None) -> float | Undefined:
    """R² in percent of that with all source layers."""
    if of_all is None:
        return Undefined("the sweep has no variant with all source layers")
    return 100 * value / of_all if of_all > 0 else Undefined("the R² with all source layers is not above 0")


def _paper(results: Results, pair: Pair, variant: str, name: str) -> float | None:
    paper, k = _papers_pair(results, pair, [variant]), results.k(pair.name, variant)
    return None if paper is None else results.paper.where("table7", name.removesuffix("_in_sample"), pair=paper, k=k)


def _papers_pair(results: Results, pair: Pair, variants: Iterable[str]) -> str | None:
    """The paper's name of a pair, if all these variants are of the paper's shape."""
    return pair.paper if all(is_papers(results.recipe(pair.name, variant)) for variant in variants) else None


def table17_loo_k(results: Results) -> pd.DataFrame:
    """The k that the mean accuracy chooses, also with one benchmark left out, and the k that the next-token KL chooses.

    A row a pair; accuracies and the largest move in percent and percentage points.
    """
    sweep = results.sweep(BY_K)
    return frame_of([_choice_row(results, sweep, pair) for pair in results.pairs_of(sweep)])


def _choice_row(results: Results, sweep: Sweep, pair: Pair) -> Row:
    variants, items = variants_by_k(results, sweep, pair), items_of_sweep(results, pair, sweep)
    names = _choosing(items)
    by_k = {k: _accuracies(results, pair, variant, names, items) for k, variant in variants.items()}
    row: Row = {"pair": pair.name, "items": ", ".join(f"{BENCHMARKS[name]} {len(items[name])}" for name in names)}
    chosen = _chosen(by_k, names)
    without = {left: _without(by_k, names, left) for left in CHOOSING}
    choices = {"k": chosen} | {f"k_without_{left}": k for left, k in without.items()}
    known = _papers_pair(results, pair, variants.values())
    for name, k in (choices | {"largest_move_pp": _largest_move(by_k, names, chosen, list(without.values()))}).items():
        paper = None if known is None else results.paper.value("table17", known, name)
        row |= cell(name, k) | {name + PAPER: paper}
    by_kl = lowest_kl(results, pair, variants, items[NEXT_TOKEN_KL])
    row |= {"k_by_kl": by_kl, "chunks": len(items[NEXT_TOKEN_KL])}
    for name, k in (("mean_accuracy", chosen), ("mean_accuracy_by_kl", by_kl)):
        row |= cells(name, k) if isinstance(k, Undefined) else mean_accuracy(results, pair, variants[k], items, name)
    return row


def chosen_by_accuracy(
    results: Results, pair: Pair, variants: Mapping[int, str], items: Mapping[str, Items]
) -> int | Undefined:
    """The k that the paper's rule chooses on these items; undefined if none of its benchmarks is among them."""
    names = _choosing(items)
    by_k = {k: _accuracies(results, pair, variant, names, items) for k, variant in variants.items()}
    return _chosen(by_k, names)


def _choosing(items: Mapping[str, Items]) -> list[str]:
    """The benchmarks that the paper chooses k by, as far as there are items of them."""
    return [name for name in CHOOSING if name in items]


def _accuracies(
    results: Results, pair: Pair, variant: str, names: list[str], items: Mapping[str, Items]
) -> dict[str, float]:
    """Accuracies in percent."""
    return {name: 100 * limited(record_of(results, pair, variant, name)[1], items[name]).value for name in names}


def _mean(accuracies: Mapping[str, float], names: list[str]) -> float:
    return sum(accuracies[name] for name in names) / len(names)


def _chosen(by_k: Mapping[int, Mapping[str, float]], names: list[str]) -> int | Undefined:
    """The largest k whose mean accuracy is within a near tie of the best."""
    if not names:
        return Undefined(f"the sweep ran none of {', '.join(BENCHMARKS[name] for name in CHOOSING)}")
    means = {k: _mean(accuracies, names) for k, accuracies in by_k.items()}
    best = max(means.values())
    return max(k for k, mean in means.items() if mean >= best - NEAR_TIE - ROUNDING)


def _without(by_k: Mapping[int, Mapping[str, float]], names: list[str], left: str) -> int | Undefined:
    if left not in names:
        return Undefined(f"the sweep did not run {BENCHMARKS[left]}")
    rest = [name for name in names if name != left]
    return _chosen(by_k, rest) if rest else Undefined("no benchmark is left to choose by")


def _largest_move(
    by_k: Mapping[int, Mapping[str, float]],
    names: list[str],
    chosen: int | Undefined,
    others: list[int | Undefined],
) -> float | Undefined:
    """The most that mean accuracy over all benchmarks moves when a choice without one of them replaces the choice with all."""
    if isinstance(chosen, Undefined):
        return chosen
    base = _mean(by_k[chosen], names)
    moves = [abs(_mean(by_k[k], names) - base) for k in others if not isinstance(k, Undefined)]
    return max(moves) if moves else Undefined("no benchmark is left to choose by")


def lowest_kl(results: Results, pair: Pair, variants: Mapping[int, str], items: Items) -> int:
    """The k of the lowest KL, the smaller one where two are equal."""
    return min(variants, key=lambda k: limited(record_of(results, pair, variants[k], NEXT_TOKEN_KL)[1], items).value)


def mean_accuracy(
    results: Results, pair: Pair, variant: str, items: Mapping[str, Items], name: str = "mean_accuracy"
) -> Row:
    """Columns of the mean accuracy of a variant over the choosing benchmarks, in percent, on these items of each."""
    benchmarks = _choosing(items)
    if not benchmarks:
        return cells(name, Undefined(f"the sweep ran none of {', '.join(BENCHMARKS[each] for each in CHOOSING)}"))
    own = {each: compare.together(results, pair, (variant,), each, items[each])[0] for each in benchmarks}
    return cells(name, mean_of(own))
