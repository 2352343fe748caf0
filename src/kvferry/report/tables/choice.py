"""Table of the rules that choose k: the paper's, on the benchmarks themselves, beside two that see none of them.

Knows one sweep. Choices by attention cosine are made on held-out calibration sequences, choices by next-token KL on the
even-numbered chunks; the KL that is shown is of the odd-numbered ones, so it flatters no rule.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from kvferry.records import ATTENTION_COSINE_HELD_OUT, NEXT_TOKEN_KL
from kvferry.report.inputs import Pair, Results, Sweep
from kvferry.report.items import Items, every_other_chunk, has_record, record_of
from kvferry.report.stats import Undefined
from kvferry.report.tables.cells import REASON, UNDEFINED, N, Row, cell, empty, frame_of
from kvferry.report.tables.layers import CHOOSING, chosen_by_accuracy, lowest_kl, mean_accuracy, variants_by_k
from kvferry.report.tables.scores import blank, items_of_sweep, scores_on
from kvferry.report.wanted import BY_K

BY_ACCURACY = "mean accuracy (the paper's)"
BY_COSINE = "attention cosine, held out"
BY_KL = "next-token KL, even chunks"


def k_choice(results: Results) -> pd.DataFrame:
    """For each pair and rule the k that it chooses, with the mean accuracy of the choosing benchmarks and the KL there.

    The accuracy at the paper's choice was chosen on the same items, so it is flattered; the other two are not. The row of
    the cosine is empty where it was not measured.

    Raises:
        KvferryError: a record of the sweep is missing, or there are no chunks on one of the halves.
    """
    sweep = results.sweep(BY_K)
    return frame_of([row for pair in results.pairs_of(sweep) for row in _rows(results, sweep, pair)])


def _rows(results: Results, sweep: Sweep, pair: Pair) -> list[Row]:
    variants, items = variants_by_k(results, sweep, pair), items_of_sweep(results, pair, sweep)
    even = every_other_chunk(items[NEXT_TOKEN_KL], 0)
    rules: dict[str, int | Undefined | None] = {
        BY_ACCURACY: chosen_by_accuracy(results, pair, variants, items),
        BY_COSINE: _highest_cosine(results, pair, variants),
        BY_KL: lowest_kl(results, pair, variants, even),
    }
    return [{"pair": pair.name, "rule": rule} | _at(results, pair, k, variants, items) for rule, k in rules.items()]


def _highest_cosine(results: Results, pair: Pair, variants: Mapping[int, str]) -> int | Undefined | None:
    """The k of the highest mean cosine, the smaller one where two are equal; None where no variant was measured."""
    measured = [k for k, name in variants.items() if has_record(results, pair, name, ATTENTION_COSINE_HELD_OUT)]
    if not measured:
        return None
    if len(measured) < len(variants):
        return Undefined("the attention cosine was not measured on every variant of the sweep")
    cosines = {k: record_of(results, pair, variants[k], ATTENTION_COSINE_HELD_OUT)[1].value for k in measured}
    return max(cosines, key=lambda k: (cosines[k], -k))


def _at(
    results: Results, pair: Pair, k: int | Undefined | None, variants: Mapping[int, str], items: Mapping[str, Items]
) -> Row:
    """The choice and what is measured there."""
    odd = every_other_chunk(items[NEXT_TOKEN_KL], 1)
    asked = sum(len(items[name]) for name in CHOOSING if name in items)
    if not isinstance(k, int):
        choice = {"k": None, "k" + REASON: None} if k is None else cell("k", k)
        return choice | {"system": None} | empty("mean_accuracy") | {"mean_accuracy" + N: None} | blank(NEXT_TOKEN_KL)
    row = cell("k", k) | {"system": variants[k]}
    row |= mean_accuracy(results, pair, variants[k], items)
    row |= {"mean_accuracy" + N: None if row["mean_accuracy"] == UNDEFINED else asked}
    return row | scores_on(results, pair, variants[k], {NEXT_TOKEN_KL: odd})
