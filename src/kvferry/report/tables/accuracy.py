"""Tables of the benchmarks themselves and of every system's own scores. Knows records; compares no systems."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from kvferry.records import NATIVE_INJECTED, PERPLEXITY, Record
from kvferry.report.inputs import Pair, Results
from kvferry.report.tables.cells import PAPER, Row, frame_of
from kvferry.report.tables.scores import blank, score


def table11_benchmarks(results: Results) -> pd.DataFrame:
    """How each benchmark was run: a row each, more than one only where models were asked differently."""
    rows = [
        _benchmark_row(results, results.native[model, name])
        for name in (*results.benchmarks, PERPLEXITY)
        for model in results.models
    ]
    return frame_of(rows).drop_duplicates(ignore_index=True)


def _benchmark_row(results: Results, record: Record) -> Row:
    settings, data = record.settings, record.data
    return {
        "benchmark": record.benchmark,
        "metric": record.metric,
        "metric" + PAPER: results.paper.words("table11", record.benchmark, "metric"),
        "shots": settings.get("num_fewshot"),
        "shots" + PAPER: results.paper.value("table11", record.benchmark, "shots"),
        "n": record.n,
        "items_total": settings.get("items_total"),
        "unit": "chunks" if record.benchmark == PERPLEXITY else "items",
        "chance": None if record.chance is None else 100 * record.chance,
        "chance" + PAPER: results.paper.value("table11", record.benchmark, "chance"),
        "origin": _word(data.get("origin")),
        "task_version": _word(settings.get("task_version")),
        "sha256": _word(data.get("sha256")),
    }


def _word(value: object) -> str | None:
    return None if value is None else str(value)


def table13_accuracy(results: Results) -> pd.DataFrame:
    """Scores of every model alone, of its own cache injected where that was run, and of every transfer.

    Accuracies in percent with a Wilson interval; perplexities with a bootstrap interval over chunks.
    """
    return frame_of([row for rows in (_native_rows(results), _transfer_rows(results)) for row in rows])


def _native_rows(results: Results) -> list[Row]:
    rows = []
    for model in results.models:
        name = _paper_model(results, model)
        alone = [record for (owner, _), record in results.native.items() if owner == model]
        injected = [
            r for (system, owner, _), r in results.injected.items() if (system, owner) == (NATIVE_INJECTED, model)
        ]
        for system, found in (("alone", alone), ("own cache injected", injected)):
            label = {"name": model, "system": system, "k": None}
            rows += [label | _scores(results, found, name if system == "alone" else None)] if found else []
    return rows


def _transfer_rows(results: Results) -> list[Row]:
    return [_transfer_row(results, pair, system) for pair in results.pairs for system in results.systems(pair.name)]


def _transfer_row(results: Results, pair: Pair, system: str) -> Row:
    found = [r for (name, own, _), r in results.transfers.items() if (name, own) == (pair.name, system)]
    k = results.k(pair.name, system) if system in results.variants else None
    paper = results.comparable(pair) if system == results.headline(pair) else None
    return {"name": pair.name, "system": system, "k": k} | _scores(results, found, paper)


def _paper_model(results: Results, model: str) -> str | None:
    """The paper's name of a model, through any pair that is in the paper and that the model belongs to."""
    for pair in results.pairs:
        if pair.paper is not None and model in (pair.source, pair.target):
            source, target = results.paper.models(pair.paper)
            return source if model == pair.source else target
    return None


def _scores(results: Results, records: Sequence[Record], paper: str | None) -> Row:
    by_name = {record.benchmark: record for record in records}
    row: Row = {}
    for name in (*results.benchmarks, PERPLEXITY):
        own = by_name.get(name)
        row |= blank(name) if own is None else score(results, own)
        row |= {name + PAPER: None if paper is None else results.paper.value("table13", paper, name)}
    return row
