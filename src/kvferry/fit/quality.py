"""R² of mappers applied to rows of two dumps: the second path beside the moments, on the map as it is stored.

Does not know how a mapper was fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvferry.fit.pair import KINDS
from kvferry.fit.rows import Pieces, features, first_sequences, paired_shards
from kvferry.kv.dump import Shard
from kvferry.kv.mapper import COUPLED, Mapper

Scores = dict[str, list[float]]


@torch.inference_mode()
def applied_r2(
    mappers: Mapping[str, Mapper], source: Path, target: Path, sequences: int | None = None
) -> tuple[dict[str, Scores], int]:
    """R² a target layer of each mapper on held-out rows, or on the first `sequences` of the fit, for K and V; number of rows.

    Keys in content space, or with their rotation for a coupled mapper. Totals are about the rows' own mean, as in
    scikit-learn's r2_score; pooled over a head's coordinates, averaged over heads.
    """
    sums: dict[tuple[str, str, int], list[Tensor]] = {}
    rows = 0
    for pieces in _pieces(source, target, sequences):
        rows += int(pieces[2].sum())
        for key, predicted, true in _predictions(mappers, *pieces):
            error = (predicted - true).double().square().sum(0)
            parts = (error, true.double().sum(0), true.double().square().sum(0))
            earlier = sums.get(key, [torch.zeros_like(part) for part in parts])
            sums[key] = [mine + part for mine, part in zip(earlier, parts, strict=True)]
    return {
        name: {
            kind: [_r2(*sums[name, kind, layer], rows, mapper.kv_heads) for layer in range(len(mapper.selected))]
            for kind in KINDS
        }
        for name, mapper in mappers.items()
    }, rows


def _pieces(source: Path, target: Path, sequences: int | None) -> Iterator[Pieces]:
    """Shards of both dumps, and which of their rows count."""
    if sequences is not None:
        yield from first_sequences(source, target, sequences)
        return
    for own, other in paired_shards(source, target, "held_out"):
        yield own, other, torch.ones(len(own.ids), dtype=torch.bool)


def _predictions(
    mappers: Mapping[str, Mapper], own: Shard, other: Shard, kept: Tensor
) -> Iterator[tuple[tuple[str, str, int], Tensor, Tensor]]:
    """((name, kind, target layer), mapped rows, true rows `[rows, kv_heads·head_dim]`); each layer is read and stripped once."""
    for coupled in (False, True):
        chosen = {name: mapper for name, mapper in mappers.items() if (mapper.rope == COUPLED) == coupled}
        needed = sorted({source for mapper in chosen.values() for layers in mapper.selected for source in layers})
        for kind in KINDS if chosen else ():
            x = {source: features(own, kind, [source], coupled)[kept] for source in needed}
            for layer in range(len(other.keys)):
                true = features(other, kind, [layer], coupled)[kept]
                for name, mapper in chosen.items():
                    maps = mapper.keys if kind == "k" else mapper.values
                    parts = [x[source].to(mapper.dtype) for source in mapper.selected[layer]]
                    yield (name, kind, layer), maps[layer].blocks(parts).float(), true


def _r2(errors: Tensor, sums: Tensor, squares: Tensor, rows: int, heads: int) -> float:
    """R² averaged over heads from sums over rows."""
    total = (squares - sums.square() / rows).view(heads, -1).sum(1)
    return float((1 - errors.view(heads, -1).sum(1) / total).mean())
