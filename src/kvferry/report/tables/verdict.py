"""Table of the verdicts, a row a pair. Knows which columns there are; judges nothing."""

from __future__ import annotations

import pandas as pd

from kvferry.records import ATTENTION_COSINE
from kvferry.report.inputs import Pair, Results
from kvferry.report.items import record_of
from kvferry.report.names import BENCHMARKS
from kvferry.report.paper import FIVE
from kvferry.report.tables.cells import HIGH, LOW, N, Row, cells, frame_of
from kvferry.report.verdict import Pace, Verdict, verdict_of

NOT_MEASURED = "not measured"
NEVER = "at no measured length"
AT_LONGEST = ("warm", "cold")


def verdict(results: Results) -> pd.DataFrame:
    """Tier, quality kept, speed, size, best recipe and weakest benchmark of the headline on every pair.

    Shares in percent; `warm` and `cold` at the longest measured length of `tokens`; the time of loading with the 10th and 90th
    percentile where others have a 95 % interval.
    """
    return frame_of([_row(results, pair) for pair in results.pairs])


def _row(results: Results, pair: Pair) -> Row:
    own = verdict_of(results, pair)
    manifest = results.manifests[pair.name, own.system]
    row: Row = {"pair": pair.name, "system": own.system, "k": results.k(pair.name, own.system), "tier": own.tier}
    row |= {"judged_by": judged_by(own)} | cells("retention", own.retention)
    row |= cells("source_retention", own.source_retention) | _cosine(results, own)
    row |= cells("gap_recovered", own.gap) | cells("gap_recovered_perplexity", own.gap_in_perplexity)
    row |= _pace(own.pace)
    row |= {"parameters": manifest["parameters"], "weights_bytes": manifest["weights_bytes"]}
    row |= {"best_recipe": NOT_MEASURED if own.recipe is None else own.recipe.name}
    return row | _weakest(own)


def judged_by(own: Verdict) -> str:
    """Of which benchmarks the retention is, and whether the cosine was looked at."""
    names = {len(FIVE): "mean of five", 0: "no benchmark"}.get(len(own.names), "HellaSwag")
    return names if own.cosine is None else f"{names}, cosine"


def _cosine(results: Results, own: Verdict) -> Row:
    if own.cosine is None:
        return {ATTENTION_COSINE: NOT_MEASURED}
    _, record = record_of(results, own.pair, own.system, ATTENTION_COSINE)
    return cells(ATTENTION_COSINE, own.cosine, scale=1) | {ATTENTION_COSINE + N: record.n}


def _pace(pace: Pace | None) -> Row:
    if pace is None:
        return dict.fromkeys(("tokens", *AT_LONGEST, "warm_from", "cold_from", "load_ms"), NOT_MEASURED)
    row: Row = {"tokens": pace.longest.length, "warm": pace.longest.warm, "cold": pace.longest.cold}
    row |= {"warm_from": pace.warm_from or NEVER, "cold_from": pace.cold_from or NEVER}
    return row | {"load_ms": pace.load.median, "load_ms" + LOW: pace.load.low, "load_ms" + HIGH: pace.load.high}


def _weakest(own: Verdict) -> Row:
    name = own.weakest
    if name is None:
        return {"weakest": None}
    kept = own.by_benchmark[name]
    return (
        {"weakest": BENCHMARKS[name]} | cells("weakest_retention", kept.retention) | {"weakest_retention" + N: kept.n}
    )
