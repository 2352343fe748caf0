"""How two lists of numbers go together: Pearson's r with a bootstrap interval over points, and Spearman's rank correlation.

Works on arrays. Does not know what is correlated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from kvferry.report.stats import Quantity, Sampled, Undefined

FEWEST = 3


def pearson(x: np.ndarray, y: np.ndarray, draws: int, seed: Sequence[int]) -> Quantity:
    """Pearson's r of points (x, y), `[points]` each; a draw resamples points, and has no value where one side is constant."""
    reason = _undefined(x, y)
    if reason:
        return Undefined(reason)
    taken = np.random.default_rng(list(seed)).integers(len(x), size=(draws, len(x)))
    return Sampled(float(_r(x, y)), _r(x[taken], y[taken]))


def spearman(x: np.ndarray, y: np.ndarray) -> float | Undefined:
    """Pearson's r of the ranks; equal values share their mean rank."""
    reason = _undefined(x, y)
    return Undefined(reason) if reason else float(_r(*(pd.Series(side).rank().to_numpy() for side in (x, y))))


def _undefined(x: np.ndarray, y: np.ndarray) -> str:
    """Why there is no correlation; empty where there is one."""
    if len(x) < FEWEST:
        return f"a correlation needs at least {FEWEST} points"
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return "all points have the same value on one side"
    return ""


def _r(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Over the last dimension; NaN where one side is constant, rounding aside."""
    a, b = (side - side.mean(-1, keepdims=True) for side in (x, y))
    known = (np.ptp(x, axis=-1) > 0) & (np.ptp(y, axis=-1) > 0)
    sizes = np.sqrt(np.square(a).sum(-1) * np.square(b).sum(-1))
    return np.divide((a * b).sum(-1), sizes, out=np.full(sizes.shape, np.nan), where=known)
