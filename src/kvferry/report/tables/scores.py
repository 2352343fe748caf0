"""Columns of one system's own score on a benchmark or measure, with its interval and n. Compares no systems.

Accuracies in percent with a Wilson interval; perplexity, KL (nats a token) and top-1 agreement (percent) with a bootstrap
interval over chunks, since the tokens of a chunk are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from kvferry.records import NEXT_TOKEN_KL, PERPLEXITY, TOP1_AGREEMENT, Record
from kvferry.report.compare import seed_of
from kvferry.report.inputs import SOURCE, Pair, Results, Sweep
from kvferry.report.items import TARGET, Items, limited, record_of, shared_items
from kvferry.report.stats import Sampled, bootstrap_means, wilson
from kvferry.report.tables.cells import AT_CHANCE, HIGH, LOW, PAPER, N, Row, cells

# Measured against the target's own next tokens: a model that answers on its own has no such record.
AGAINST_TARGET = (NEXT_TOKEN_KL, TOP1_AGREEMENT)
OVER_CHUNKS = (PERPLEXITY, *AGAINST_TARGET)
SCALES = {NEXT_TOKEN_KL: 1.0, TOP1_AGREEMENT: 100.0}


def score(results: Results, record: Record) -> Row:
    """Columns of the score that one record holds."""
    return _over_chunks(results, record) if record.benchmark in OVER_CHUNKS else _accuracy(record)


def blank(name: str) -> Row:
    """The columns of `score`, empty."""
    return dict.fromkeys(
        [name, name + LOW, name + HIGH, name + N] + ([] if name in OVER_CHUNKS else [name + AT_CHANCE])
    )


def items_of_sweep(results: Results, pair: Pair, sweep: Sweep, beside: Iterable[str] = ()) -> dict[str, Items]:
    """For each benchmark, then each measure: the items that target, source, all variants and those `beside` answered.

    Raises:
        KvferryError: a record is missing, or samples are not nested.
    """
    systems = list(dict.fromkeys([*beside, *sweep.variants]))
    return {
        name: shared_items(results, pair, systems + ([] if name in AGAINST_TARGET else [TARGET, SOURCE]), name)
        for name in (*sweep.benchmarks, *OVER_CHUNKS)
    }


def scores_on(
    results: Results,
    pair: Pair,
    system: str,
    items: Mapping[str, Items | None],
    paper: Callable[[str], float | None] | None = None,
) -> Row:
    """Scores of a system on these items of each benchmark or measure, empty where there are none or it can have none.

    `paper` gives the paper's value of a benchmark, to stand beside ours.
    """
    row: Row = {}
    for name, own in items.items():
        if own is None or (name in AGAINST_TARGET and system in (TARGET, SOURCE)):
            row |= blank(name)
        else:
            row |= score(results, limited(record_of(results, pair, system, name)[1], own))
        row |= {} if paper is None else {name + PAPER: paper(name)}
    return row


def _accuracy(record: Record) -> Row:
    name = record.benchmark
    low, high = wilson(sum(item.score for item in record.items), record.n)
    at_chance = record.chance is not None and low <= record.chance
    row = {name: 100 * record.value, name + LOW: 100 * low, name + HIGH: 100 * high, name + N: record.n}
    return row | {name + AT_CHANCE: "yes" if at_chance else "no"}


def _over_chunks(results: Results, record: Record) -> Row:
    name = record.benchmark
    scores = np.array([[item.score for item in record.items]])
    weights = np.array([item.weight for item in record.items])
    (mean,) = bootstrap_means(scores, weights, results.draws, seed_of(results, name))
    shown: Sampled = mean.map(np.exp) if name == PERPLEXITY else mean
    row = cells(name, shown, scale=SCALES.get(name, 1.0))
    return {key: value for key, value in row.items() if value is not None} | {name + N: record.n}
