"""Centred second moments of a pair, in one pass over both dumps.

For features X (all source layers and heads) and outputs Y (all target layers and heads): counts, means, the Gram
(X−x̄)ᵀ(X−x̄), the cross moments (X−x̄)ᵀ(Y−ȳ) and the outputs' own sums of squares. Chunks are centred on their own mean,
multiplied in float32, summed in float64 and merged exactly (Chan, Golub, LeVeque 1979): never a raw moment minus a product of
means. Does not know ridge, selection, or what the columns mean beyond (layer, head, coordinate) order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvferry.errors import KvferryError
from kvferry.files import read_json, sha256_file, write_json, written_whole
from kvferry.kv.dump import Shard, read_index, read_shards, shard_entries
from kvferry.progress import bar

GRAM_BLOCK = 1024
FIELDS = ("mean_x", "mean_y", "xx", "xy", "yy")


@dataclass
class Moments:
    """Sums in float64. xx `[p, p]`, xy `[p, q]`, yy `[q]` (sums of squares), mean_x `[p]`, mean_y `[q]`, n rows."""

    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor
    n: int = 0

    @staticmethod
    def empty(features: int, outputs: int) -> Moments:
        """Moments of no rows."""
        shapes = ((features,), (outputs,), (features, features), (features, outputs), (outputs,))
        return Moments(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in rows: x `[rows, p]` and y `[rows, q]`, float32."""
        self.merge(Moments.of(x, y))

    @staticmethod
    def of(x: Tensor, y: Tensor) -> Moments:
        """Moments of these rows alone."""
        mean_x, mean_y = x.mean(0, dtype=torch.float64), y.mean(0, dtype=torch.float64)
        x, y = x - mean_x.to(x.dtype), y - mean_y.to(y.dtype)
        rest_x, rest_y = x.mean(0, dtype=torch.float64), y.mean(0, dtype=torch.float64)
        part = Moments(mean_x, mean_y, gram(x).double(), (x.T @ y).double(), y.double().square().sum(0), len(x))
        # Subtracting a mean that was rounded to float32 leaves a small one behind; take that out of the products too.
        part._shift(-len(x), rest_x, rest_y)
        return part

    def merge(self, other: Moments) -> None:
        """Take in other rows' moments, exactly."""
        total = self.n + other.n
        if not other.n:
            return
        gap_x, gap_y = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        for mine, theirs in ((self.xx, other.xx), (self.xy, other.xy), (self.yy, other.yy)):
            mine += theirs
        self._shift(self.n * other.n / total, gap_x, gap_y)
        self.mean_x += gap_x * (other.n / total)
        self.mean_y += gap_y * (other.n / total)
        self.n = total

    def _shift(self, weight: float, gap_x: Tensor, gap_y: Tensor) -> None:
        """Add weight · (outer products of the gaps) to the second moments."""
        if weight:
            self.xx.addr_(gap_x, gap_x, alpha=weight)
            self.xy.addr_(gap_x, gap_y, alpha=weight)
            self.yy.add_(gap_y.square(), alpha=weight)


def gram(x: Tensor) -> Tensor:
    """xᵀx of `[rows, p]`: the blocks on and above the diagonal are multiplied, the others are their mirror."""
    out = x.new_empty(x.shape[1], x.shape[1])
    for start in range(0, x.shape[1], GRAM_BLOCK):
        own = slice(start, start + GRAM_BLOCK)
        product = x[:, own].T @ x[:, start:]
        out[own, start:], out[start:, own] = product, product.T
    return out


@dataclass(frozen=True)
class PairMoments:
    """Moments of a pair: stripped keys and values over all heads; keys with RoPE on a head at a time, for the probe.

    source, target: {layers, kv_heads, head_dim}. Columns are ordered (layer, head, coordinate).
    """

    k: Moments
    v: Moments
    k_rope: list[Moments]
    source: dict[str, int]
    target: dict[str, int]


def source_head(head: int, source: dict[str, int], target: dict[str, int]) -> int:
    """The source head that stands for a target head: the same one, or its share where the numbers of heads differ."""
    return head * source["kv_heads"] // target["kv_heads"]


def accumulate(source: Path, target: Path) -> PairMoments:
    """Moments over the fit rows of two dumps.

    Raises:
        KvferryError: the dumps are of other tokens, of another tokenizer, or altered.
    """
    geometry = [check_match(source, target)[side]["geometry"] for side in ("source", "target")]
    width = [g["layers"] * g["kv_heads"] * g["head_dim"] for g in geometry]
    per_head = [g["layers"] * g["head_dim"] for g in geometry]
    out = PairMoments(
        Moments.empty(*width),
        Moments.empty(*width),
        [Moments.empty(*per_head) for _ in range(geometry[1]["kv_heads"])],
        *geometry,
    )
    with bar(len(shard_entries(source, "fit")), "moments", "shard") as progress:
        for own, other in paired_shards(source, target, "fit"):
            out.k.add(stripped(own), stripped(other))
            out.v.add(joined(own.values), joined(other.values))
            for head, moments in enumerate(out.k_rope):
                mine = joined([keys[:, [source_head(head, *geometry)]] for keys in own.keys])
                moments.add(mine, joined([keys[:, [head]] for keys in other.keys]))
            progress.update()
    return out


def check_match(source: Path, target: Path) -> dict[str, dict[str, Any]]:
    """The indices of two dumps, if they can be a pair.

    Raises:
        KvferryError: tokenizers or calibrations differ.
    """
    own, other = read_index(source), read_index(target)
    if own["identity"]["tokenizer_sha256"] != other["identity"]["tokenizer_sha256"]:
        raise KvferryError(
            f"{source} and {target}: the models have different tokenizers, so their caches "
            "do not stand for the same tokens; choose models of one family"
        )
    if own["calibration"] != other["calibration"]:
        raise KvferryError(
            f"{source} and {target}: dumped with different calibration settings; delete both and run again"
        )
    return {"source": own, "target": other}


def paired_shards(source: Path, target: Path, side: str) -> Iterator[tuple[Shard, Shard]]:
    """Shards of the same rows from both dumps.

    Raises:
        KvferryError: the rows are not of the same tokens.
    """
    if len(shard_entries(source, side)) != len(shard_entries(target, side)):
        raise KvferryError(f"{source} and {target}: have different numbers of shards; delete both and run again")
    for own, other in zip(read_shards(source, side), read_shards(target, side), strict=True):
        if not torch.equal(own.ids, other.ids) or not torch.equal(own.positions, other.positions):
            raise KvferryError(f"{source} and {target}: rows are of different tokens; delete both and run again")
        yield own, other


def stripped(shard: Shard) -> Tensor:
    """Content-space keys of all layers, `[rows, layers·kv_heads·head_dim]`."""
    return joined([shard.stripped_keys(layer) for layer in range(len(shard.keys))])


def joined(parts: list[Tensor]) -> Tensor:
    """`[rows, kv_heads, head_dim]` a layer → float32 `[rows, layers·kv_heads·head_dim]`."""
    return torch.cat([part.flatten(1).float() for part in parts], dim=1)


def save_moments(moments: PairMoments, path: Path) -> None:
    """Write the moments, and beside them a json with counts, geometry and checksum."""
    named = {"k": moments.k, "v": moments.v} | {f"k_rope.{head}": part for head, part in enumerate(moments.k_rope)}
    tensors = {f"{name}.{field}": getattr(part, field).contiguous() for name, part in named.items() for field in FIELDS}
    with written_whole(path) as temporary:
        save_file(tensors, temporary)
    facts = {"rows": moments.k.n, "source": moments.source, "target": moments.target, "sha256": sha256_file(path)}
    write_json(path.with_suffix(".json"), facts)


def load_moments(path: Path) -> PairMoments:
    """Read what `save_moments` wrote. Tensors are mapped from disk, so only what is used is read.

    Raises:
        KvferryError: the file is missing or altered.
    """
    facts = read_json(path.with_suffix(".json"), "moments")
    if not path.exists() or sha256_file(path) != facts["sha256"]:
        raise KvferryError(f"{path}: missing or altered since it was written; delete it and run again")
    with safe_open(path, "pt") as file:

        def moments(name: str) -> Moments:
            return Moments(*(file.get_tensor(f"{name}.{field}") for field in FIELDS), n=facts["rows"])

        rope = [moments(f"k_rope.{head}") for head in range(facts["target"]["kv_heads"])]
        return PairMoments(moments("k"), moments("v"), rope, facts["source"], facts["target"])
