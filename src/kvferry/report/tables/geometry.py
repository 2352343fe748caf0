"""Tables of what the pairs and their mappers are: layers, heads, sizes, fit quality. Knows cards and manifests only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from kvferry.report.inputs import Pair, Results
from kvferry.report.papers_recipe import LINEAR, ROPES
from kvferry.report.tables.cells import PAPER, Row, frame_of

GIB = 2**30  # what the paper's GB are: its 1.61 billion parameters of four bytes are its 6 GB
SHAPE = ("layers", "kv_heads", "head_dim")


def table10_pairs(results: Results) -> pd.DataFrame:
    """Geometry of each pair, and k of the headline mapper."""
    return frame_of([_pair_row(results, pair) for pair in results.pairs])


def _pair_row(results: Results, pair: Pair) -> Row:
    source, target = results.cards[pair.source], results.cards[pair.target]
    row: Row = {"pair": pair.name, "source": pair.source, "target": pair.target}
    for name in SHAPE:
        for role, card in (("source", source), ("target", target)):
            row |= {f"{role}_{name}": card[name], f"{role}_{name}{PAPER}": _papers_shape(results, pair, role, name)}
    matched = all(source[name] == target[name] for name in ("kv_heads", "head_dim"))
    row |= {"matched_kv": "yes" if matched else "no"}
    row |= {"source_parameters": source["parameters"], "target_parameters": target["parameters"]}
    row |= {"parameter_ratio": target["parameters"] / source["parameters"]}
    row |= {"parameter_ratio" + PAPER: _paper(results, pair, "table10", "parameter_ratio")}
    paper = None if pair.paper is None else results.paper.k(pair.paper)
    return row | {"k": results.k(pair.name, results.headline(pair)), "k" + PAPER: paper}


def _papers_shape(results: Results, pair: Pair, role: str, name: str) -> float | None:
    """The paper gives one number of KV heads and one head dimension for both models of a pair."""
    return _paper(results, pair, "table10", f"{role}_{name}" if name == "layers" else name)


def table12_size(results: Results) -> pd.DataFrame:
    """Size, rows and R² of every mapper: shares in percent, R² averaged over target layers."""
    return frame_of(
        [_size_row(results, pair, name) for pair in results.pairs for name in results.variants_of(pair.name)]
    )


def _size_row(results: Results, pair: Pair, variant: str) -> Row:
    manifest, k = results.manifests[pair.name, variant], results.k(pair.name, variant)
    recipe, parameters = manifest["recipe"], manifest["parameters"]
    as_in_paper = results.comparable(pair, variant, methods=LINEAR, ropes=ROPES) is not None
    return {
        "pair": pair.name,
        "system": variant,
        "method": recipe["method"],
        "k": k,
        "parameters": parameters,
        "parameters" + PAPER: _paper(results, pair, "table12", "parameters") if as_in_paper else None,
        "weights_bytes": manifest["weights_bytes"],
        "storage_gib": manifest["weights_bytes"] / GIB,
        "storage_gib" + PAPER: _paper(results, pair, "table12", "storage_gb") if as_in_paper else None,
        "share_of_target": 100 * parameters / results.cards[pair.target]["parameters"],
        "features": manifest["features"],
        "rows": manifest["rows"],
        "p_over_n": manifest["features"] / manifest["rows"],
        **fit_quality(manifest),
        "held_out_rows": manifest["held_out_rows"],
    }


def fit_quality(manifest: dict[str, Any]) -> Row:
    """R² of keys and values in sample and held out, averaged over target layers."""
    names = [(kind, sample) for kind in ("k", "v") for sample in ("in_sample", "held_out")]
    return {f"r2_{kind}_{sample}": float(np.mean(manifest["r2"][sample][kind])) for kind, sample in names}


def _paper(results: Results, pair: Pair, table: str, column: str) -> float | None:
    return None if pair.paper is None else results.paper.value(table, pair.paper, column)
