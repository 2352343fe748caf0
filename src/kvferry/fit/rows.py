"""Rows of a pair: the same tokens from two dumps, as matrices of features and outputs.

Columns are ordered (layer, head, coordinate). Keys in content space or, for `coupled`, with their rotation. Does not know
moments, weights or fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import KvferryError
from kvferry.files import fingerprint
from kvferry.kv.dump import Shard, read_index, read_shards, shard_entries
from kvferry.prepare.calibration import Side

Shape = dict[str, int]
Pieces = tuple[Shard, Shard, Tensor]


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


def origin_of(source: Path, target: Path) -> dict[str, Any]:
    """What tells what is made of two dumps from what is made of others: source and target, and a fingerprint of all rows.

    Raises:
        KvferryError: as `check_match`.
    """
    indices = check_match(source, target)
    identities = {role: index["identity"] for role, index in indices.items()}
    return identities | {"calibration_sha256": fingerprint([index["shards"] for index in indices.values()])}


def paired_shards(source: Path, target: Path, side: Side) -> Iterator[tuple[Shard, Shard]]:
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


def first_sequences(source: Path, target: Path, count: int) -> Iterator[Pieces]:
    """Paired shards of the fit side, with the rows `[rows]` (bool) that belong to the first `count` sequences.

    Raises:
        KvferryError: the dumps hold fewer sequences.
    """
    there = sum(entry["sequences"] for entry in shard_entries(source, "fit"))
    if there < count:
        raise KvferryError(f"{source}: holds {there} sequences, {count} are asked for; delete it and run again")
    for own, other in paired_shards(source, target, "fit"):
        if int(own.sequences[0]) >= count:
            return
        yield own, other, own.sequences < count


def features(shard: Shard, kind: str, layers: list[int], coupled: bool = False) -> Tensor:
    """Float32 `[rows, layers·kv_heads·head_dim]` of kind k or v."""
    if kind == "v":
        parts = [shard.values[layer] for layer in layers]
    elif coupled:
        parts = [shard.keys[layer] for layer in layers]
    else:
        parts = [shard.stripped_keys(layer) for layer in layers]
    return joined(parts)


def joined(parts: list[Tensor]) -> Tensor:
    """`[rows, kv_heads, head_dim]` a layer → float32 `[rows, layers·kv_heads·head_dim]`."""
    return torch.cat([part.flatten(1).float() for part in parts], dim=1)


def source_head(head: int, source: Shape, target: Shape) -> int:
    """The source head that stands for a target head: the same one, or its share where the numbers of heads differ."""
    return head * source["kv_heads"] // target["kv_heads"]


def width(geometry: Shape) -> int:
    """Numbers of one layer's keys, or values, of one token."""
    return geometry["kv_heads"] * geometry["head_dim"]


def layer_columns(geometry: Shape, layers: list[int]) -> Tensor:
    """Columns `[layers · kv_heads · head_dim]` of these layers among those of all layers."""
    own = width(geometry)
    return torch.cat([torch.arange(layer * own, (layer + 1) * own) for layer in layers])


def head_columns(geometry: Shape, head: int, layers: int) -> Tensor:
    """Columns `[layers · head_dim]` of one head in each of `layers` layers, among those of these layers."""
    dim = geometry["head_dim"]
    return torch.cat([torch.arange(dim) + layer * width(geometry) + head * dim for layer in range(layers)])
