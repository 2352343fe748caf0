"""Centred second moments of rows, with or without weights.

For features X and outputs Y: the sum of weights, means, the Gram (X−x̄)ᵀ(X−x̄), the cross moments (X−x̄)ᵀ(Y−ȳ) and the outputs'
own sums of squares. Chunks are centred on their own mean, multiplied in float32, summed in float64 and merged exactly (Chan,
Golub, LeVeque 1979): never a raw moment minus a product of means. Does not know what rows or columns stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GRAM_BLOCK = 1024
FIELDS = ("mean_x", "mean_y", "xx", "xy", "yy")


@dataclass
class Moments:
    """Sums in float64. xx `[p, p]`, xy `[p, q]`, yy `[q]` (sums of squares), mean_x `[p]`, mean_y `[q]`, n the sum of weights."""

    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor
    n: float = 0

    @staticmethod
    def empty(features: int, outputs: int, device: torch.device | None = None) -> Moments:
        """Moments of no rows."""
        shapes = ((features,), (outputs,), (features, features), (features, outputs), (outputs,))
        return Moments(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    @staticmethod
    def of(x: Tensor, y: Tensor, weights: Tensor | None = None) -> Moments:
        """Moments of these rows alone: x `[rows, p]` and y `[rows, q]` float32, weights `[rows]` ≥ 0 or none for 1 each."""
        if weights is None or bool((weights == 1).all()):
            return _of_centred(x, y, None, float(len(x)))
        kept = weights > 0
        if not bool(kept.all()):
            x, y, weights = x[kept], y[kept], weights[kept]
        return _of_centred(x, y, weights.double(), float(weights.double().sum()))

    def add(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Take in rows `[rows, p]` and `[rows, q]`, as `of` does."""
        self.merge(Moments.of(x, y, weights))

    def merge(self, other: Moments) -> None:
        """Take in other rows' moments, exactly."""
        if not other.n:
            return
        total = self.n + other.n
        gap_x, gap_y = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        for mine, theirs in ((self.xx, other.xx), (self.xy, other.xy), (self.yy, other.yy)):
            mine += theirs
        self._shift(self.n * other.n / total, gap_x, gap_y)
        self.mean_x += gap_x * (other.n / total)
        self.mean_y += gap_y * (other.n / total)
        self.n = total

    def part(self, features: Tensor | slice, outputs: Tensor | slice) -> Moments:
        """The moments of some features (of p) and outputs (of q), given by their columns."""
        # Few outputs of many: they are cut first, or most of what is copied would be thrown away.
        xy = self.xy[:, outputs][features]
        return Moments(
            self.mean_x[features], self.mean_y[outputs], self.xx[features][:, features], xy, self.yy[outputs], self.n
        )

    def copy(self) -> Moments:
        """The same numbers in memory of their own."""
        return Moments(*(getattr(self, field).clone() for field in FIELDS), n=self.n)

    def _shift(self, weight: float, gap_x: Tensor, gap_y: Tensor) -> None:
        """Add weight · (outer products of the gaps) to the second moments."""
        if weight:
            self.xx.addr_(gap_x, gap_x, alpha=weight)
            self.xy.addr_(gap_x, gap_y, alpha=weight)
            self.yy.add_(gap_y.square(), alpha=weight)


def _of_centred(x: Tensor, y: Tensor, weights: Tensor | None, n: float) -> Moments:
    """Moments of rows with weights `[rows]` in float64 that add up to n."""
    if not n:
        return Moments.empty(x.shape[1], y.shape[1], x.device)
    x, mean_x, rest_x = _centred(x, weights, n)
    y, mean_y, rest_y = _centred(y, weights, n)
    if weights is not None:
        roots = weights.sqrt().to(x.dtype)[:, None]
        x, y = x * roots, y * roots
    part = Moments(mean_x, mean_y, gram(x).double(), (x.T @ y).double(), y.double().square().sum(0), n)
    # Subtracting a mean that was rounded leaves a small one behind; take that out of the products too.
    part._shift(-n, rest_x, rest_y)
    return part


def _centred(rows: Tensor, weights: Tensor | None, n: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows less their mean as their number format has it, the mean, and the small mean that those rows are left with."""

    def mean(of: Tensor) -> Tensor:
        return of.mean(0, dtype=torch.float64) if weights is None else weights @ of.double() / n

    exact = mean(rows)
    rows = rows - exact.to(rows.dtype)
    return rows, exact, mean(rows)


def gram(x: Tensor) -> Tensor:
    """xᵀx of `[rows, p]`: the blocks on and above the diagonal are multiplied, the others are their mirror."""
    out = x.new_empty(x.shape[1], x.shape[1])
    for start in range(0, x.shape[1], GRAM_BLOCK):
        own = slice(start, start + GRAM_BLOCK)
        product = x[:, own].T @ x[:, start:]
        out[own, start:], out[start:, own] = product, product.T
    return out
