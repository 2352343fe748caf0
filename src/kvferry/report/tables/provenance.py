"""Table of where the numbers come from: packages, code, machines, seeds, time, models, data.

Every word is out of records, cards and manifests. Knows no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from kvferry import records as named
from kvferry.records import Record
from kvferry.report.inputs import Results
from kvferry.report.paper import FIVE
from kvferry.report.tables.cells import Row, frame_of
from kvferry.report.wanted import HELD_OUT

NOT_RECORDED = "not recorded"
GIB = 2**30
# Measures by what their time is spent on.
STAGES = {
    "benchmarks": (*FIVE, *HELD_OUT),
    "next token": (named.PERPLEXITY, named.NEXT_TOKEN_KL, named.TOP1_AGREEMENT),
    "time of the mapper": (named.APPLY_TIME,),
    "conversations": (named.COQA, named.COQA_HANDOFF, named.COQA_ALTERNATE),
    "diagnostics": (
        named.ATTENTION_COSINE,
        named.ATTENTION_COSINE_HELD_OUT,
        named.K_CONCENTRATION,
        named.V_CONCENTRATION,
        named.R2_K,
        named.R2_V,
    ),
    "latency": (named.LATENCY,),
    "native tokens": (named.NATIVE_TOKENS, named.NATIVE_TOKENS_TIME),
}


def provenance(results: Results) -> pd.DataFrame:
    """A row a fact: what it is of, its name and value, a detail, and how many records say so.

    Facts in which records differ have a row each: a run whose code or packages were changed on its way is then seen to be one.
    """
    own = [*results.native.values(), *results.injected.values(), *results.transfers.values()]
    parts = (_packages(own), _facts(own), _times(own), _models(results, own), _data(own), _calibrations(results))
    return frame_of([row for part in parts for row in part])


def _row(kind: str, name: str, value: object, count: int | None, detail: str | None = None) -> Row:
    return {"what": kind, "name": name, "value": value, "detail": detail, "records": count}


def _counted(own: Iterable[Record], fact: Callable[[Record], object]) -> dict[str, int]:
    """How many records have each value, the most frequent first."""
    values = pd.Series([str(fact(record)) for record in own], dtype=object).value_counts(sort=True)
    return {str(value): int(count) for value, count in values.items()}


def _packages(own: list[Record]) -> list[Row]:
    names = dict.fromkeys(name for record in own for name in record.versions)
    return [
        _row("package", name, value, count)
        for name in names
        for value, count in _counted(own, lambda record, name=name: record.versions.get(name, NOT_RECORDED)).items()
    ]


def _facts(own: list[Record]) -> list[Row]:
    """Code, arithmetic, machine and seeds."""
    of_settings = ("device", "device_name", "dtype", "threads", "hold_back")
    facts: dict[tuple[str, str], Callable[[Record], object]] = {
        ("code", "commit"): lambda record: record.commit or NOT_RECORDED
    }
    for name in of_settings:
        facts["machine and arithmetic", name] = lambda record, name=name: record.settings.get(name, NOT_RECORDED)
    for name in dict.fromkeys(name for record in own for name in record.seeds):
        facts["seed", name] = lambda record, name=name: record.seeds.get(name, NOT_RECORDED)
    return [
        _row(kind, name, value, count)
        for (kind, name), fact in facts.items()
        for value, count in _counted(own, fact).items()
    ]


def _times(own: list[Record]) -> list[Row]:
    """Seconds that all records of a stage took together, of one process each, and the most memory that one of them held."""
    rows = []
    for stage, measures in STAGES.items():
        there = [record for record in own if record.benchmark in measures]
        if there:
            peak = max(record.peak_memory_bytes for record in there) / GIB
            seconds = sum(record.seconds for record in there)
            rows.append(_row("seconds", stage, seconds, len(there), f"peak memory of a process {peak:.1f} GiB"))
    return rows


def _models(results: Results, own: list[Record]) -> list[Row]:
    rows = []
    for model in results.models:
        card = results.cards[model]
        count = sum(model in (record.target, record.source) for record in own)
        rows.append(_row("model", model, card.get("weights_id", NOT_RECORDED), count, _origin(card)))
    return rows


def _origin(card: Mapping[str, Any]) -> str:
    said = f"{card['parameters']:,} parameters, tokenizer {card.get('tokenizer_sha256', NOT_RECORDED)}"
    return f"{card.get('origin', NOT_RECORDED)}; {said}"


def _data(own: list[Record]) -> list[Row]:
    """What was answered or scored, with the hash of the file or of the tokens."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in own:
        sha = record.data.get("tokens_sha256") or record.data.get("sha256") or NOT_RECORDED
        found.setdefault((str(record.data.get("origin", NOT_RECORDED)), str(sha)), []).append(record.benchmark)
    return [
        _row("data", origin, sha, len(benchmarks), ", ".join(dict.fromkeys(benchmarks)))
        for (origin, sha), benchmarks in found.items()
    ]


def _calibrations(results: Results) -> list[Row]:
    """The rows that mappers were fitted on: the hash of both dumps, a row for each of a pair."""
    rows: dict[tuple[str, str], Row] = {}
    for (pair, _), manifest in results.manifests.items():
        how, sha = manifest.get("calibration"), manifest.get("calibration_sha256")
        if how and sha:
            said = (
                "{corpus}, {sequences} + {held_out} held-out sequences of {length} tokens, stride {stride}, seed {seed}"
            )
            rows.setdefault((pair, sha), _row("calibration", pair, sha, None, said.format(**how)))
    return list(rows.values())
