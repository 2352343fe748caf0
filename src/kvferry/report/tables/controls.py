"""Table of controls: what a hand-off that must be perfect, or that carries nothing of the text, scores beside the headline.

Knows the systems that are controls. Does not know how one is run.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from kvferry.errors import KvferryError
from kvferry.records import (
    IDENTITY,
    NATIVE_INJECTED,
    NEXT_TOKEN_KL,
    PERPLEXITY,
    RANDOM_MAPPER,
    TOP1_AGREEMENT,
    WRONG_DOCUMENT,
    ZERO_CACHE,
)
from kvferry.report import compare
from kvferry.report.inputs import SOURCE, Pair, Results
from kvferry.report.items import TARGET, Items, has_record, record_of, shared_items
from kvferry.report.names import GAINED
from kvferry.report.tables.cells import N, Row, cells, empty, frame_of
from kvferry.report.tables.scores import scores_on
from kvferry.report.tables.transfer import mcnemar_columns

HELLASWAG = "hellaswag"
MEASURED = (PERPLEXITY, NEXT_TOKEN_KL, TOP1_AGREEMENT, HELLASWAG)
COMPARED = {NEXT_TOKEN_KL: 1.0, HELLASWAG: 100.0}  # and what differences to the headline are multiplied by
# The zero cache alone is run on every pair, so it makes none a pair with controls.
TELLING = (RANDOM_MAPPER, WRONG_DOCUMENT)
DIFFERING = "items_differing"


def controls(results: Results) -> pd.DataFrame:
    """A row for each system of a pair with controls, from the target down to what should be worthless.

    All systems of a pair are compared on the items that all of them answered. `items_differing` counts the items of all
    benchmarks that the target's own cache, injected, answers unlike the target; it must be 0.

    Raises:
        KvferryError: no pair has records of controls, or samples are not nested.
    """
    pairs = [pair for pair in results.pairs if any(has_record(results, pair, name, PERPLEXITY) for name in TELLING)]
    if not pairs:
        raise KvferryError("controls.pairs: no pair has records of its controls; name one, or leave the table out")
    return frame_of([row for pair in pairs for row in _rows(results, pair)])


def _rows(results: Results, pair: Pair) -> list[Row]:
    order = (
        TARGET,
        NATIVE_INJECTED,
        IDENTITY,
        results.headline(pair),
        SOURCE,
        ZERO_CACHE,
        RANDOM_MAPPER,
        WRONG_DOCUMENT,
    )
    there = {name: [own for own in order if has_record(results, pair, own, name)] for name in MEASURED}
    items = {name: shared_items(results, pair, own, name) for name, own in there.items() if own}
    return [_row(results, pair, system, there, items) for system in order if system in there[PERPLEXITY]]


def _row(results: Results, pair: Pair, system: str, there: Mapping[str, list[str]], items: Mapping[str, Items]) -> Row:
    row: Row = {"pair": pair.name, "system": system} | _differing(results, pair, system)
    for name in MEASURED:
        row |= scores_on(results, pair, system, {name: items[name] if system in there[name] else None})
    for name, scale in COMPARED.items():
        row |= _against_headline(results, pair, system, name, scale, there[name], items)
    return row


def _differing(results: Results, pair: Pair, system: str) -> Row:
    """How many answers of the injected cache differ from the target's own."""
    if system != NATIVE_INJECTED:
        return {DIFFERING: None, DIFFERING + N: None}
    told = [_answers(results, pair, name) for name in (TARGET, NATIVE_INJECTED)]
    shared = told[0].keys() & told[1].keys()
    return {DIFFERING: sum(told[0][key] != told[1][key] for key in shared), DIFFERING + N: len(shared)}


def _answers(results: Results, pair: Pair, system: str) -> dict[tuple[str, str], object]:
    """Score by (benchmark, item), with the text where the answer is one; log-likelihoods may differ in their last bits."""
    records = [
        record_of(results, pair, system, name)[1]
        for name in results.benchmarks
        if has_record(results, pair, system, name)
    ]
    return {
        (record.benchmark, item.id): (item.score, item.response if isinstance(item.response, str) else None)
        for record in records
        for item in record.items
    }


def _against_headline(
    results: Results,
    pair: Pair,
    system: str,
    name: str,
    scale: float,
    there: list[str],
    items: Mapping[str, Items],
) -> Row:
    """The paired difference to the headline; for an accuracy McNemar's test as well."""
    headline = results.headline(pair)
    comparable = system != headline and system in there and headline in there
    row = empty(name + GAINED)
    if comparable:
        row = cells(name + GAINED, compare.gained(results, pair, system, headline, name, items[name]), scale)
    if name == HELLASWAG and comparable:
        row |= mcnemar_columns("headline", compare.mcnemar(results, pair, system, headline, name, items[name]))
    return row
