"""Diagnostics of mappers out of their records: which mappers have them, means, and values by target layer.

Knows the records that diagnostics write. Does not know how a table looks.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvferry.errors import KvferryError
from kvferry.records import ATTENTION_COSINE, R2_K, R2_V
from kvferry.report import compare
from kvferry.report.inputs import Pair, Results
from kvferry.report.items import record_of
from kvferry.report.stats import Sampled


def diagnosed(results: Results, pair: Pair) -> list[str]:
    """Variants of a pair with diagnostics, in the order of the configuration."""
    return [name for name in results.variants if (pair.name, name, ATTENTION_COSINE) in results.transfers]


def mean_of(results: Results, pair: Pair, variant: str, name: str) -> float:
    """Mean over target layers, and over texts where the measure has a value a text.

    Raises:
        KvferryError: the variant has no such record.
    """
    return record_of(results, pair, variant, name)[1].value


def sampled(results: Results, pair: Pair, variant: str, name: str) -> Sampled:
    """The same for a measure with a value a text (not R²), with bootstrap draws over texts."""
    (own,) = compare.together(results, pair, (variant,), name)
    return own


def by_layer(results: Results, pair: Pair, variant: str, name: str) -> list[float | None]:
    """One value a target layer, mean over the texts that have one there; None where none has.

    Raises:
        KvferryError: there is no such record, or its texts do not all have one place a layer.
    """
    place, record = record_of(results, pair, variant, name)
    if name in (R2_K, R2_V):
        return [item.score for item in record.items]
    rows = [item.response if isinstance(item.response, list) else [] for item in record.items]
    if not rows[0] or len(set(map(len, rows))) != 1:
        raise KvferryError(f"{place}: its items hold no values by layer; delete it and run again")
    means = pd.DataFrame(rows, dtype=float).mean()
    return [None if np.isnan(value) else float(value) for value in means]
