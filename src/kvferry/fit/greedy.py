"""Greedy forward selection of source layers: at each step the layer that raises the joint R² most (the paper, Figure 5).

Per target layer and head, for stripped keys and for values, by least squares from all heads of a source layer. A step
conditions on the layer taken: it adds rows to a Cholesky factor, and of the other layers only the diagonal blocks and the cross
moments are brought up to date. Computed from moments alone; the mappers use the fixed ranking, not this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from kvferry.errors import KvferryError
from kvferry.files import write_text
from kvferry.fit.moments import Moments
from kvferry.fit.pair import PairMoments
from kvferry.fit.ridge import Solver
from kvferry.fit.rows import head_columns, layer_columns
from kvferry.fit.weights import RowRule
from kvferry.progress import track

KINDS = {"k_stripped": "k", "v": "v"}
# Of a column's own sum of squares, added to it to keep blocks of nearly dependent columns solvable; far below any penalty of a
# mapper, and no more for columns beside an outlier.
JITTER = 1e-5


@dataclass
class _Greedy:
    """What the layers taken leave of each source layer: diagonal blocks `[layers, w, w]`, cross moments `[layers, w, outputs]`.

    gram `[p, p]` is that of all layers, factor `[taken·w, p]` the rows of its Cholesky factor for the layers taken.
    """

    gram: Tensor
    left: Tensor
    cross: Tensor
    factor: Tensor

    @staticmethod
    def start(gram: Tensor, cross: Tensor, layers: int) -> _Greedy:
        """Nothing taken yet: gram `[p, p]`, cross `[p, outputs]`."""
        own = len(gram) // layers
        blocks = gram.view(layers, own, layers, own)
        left = torch.stack([blocks[layer, :, layer] for layer in range(layers)])
        return _Greedy(gram, left, cross.view(layers, own, -1).clone(), gram.new_empty(0, len(gram)))

    def gains(self) -> Tensor:
        """What each layer would explain of the outputs' sum of squares: trace(Cᵀ G⁻¹ C), `[layers]`."""
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(self.left), self.cross, upper=False)
        return half.square().sum((1, 2))

    def take(self, layer: int) -> None:
        """Condition every other layer on this one."""
        own = self.left.shape[1]
        columns = slice(layer * own, (layer + 1) * own)
        root = torch.linalg.cholesky(self.left[layer])
        row = torch.linalg.solve_triangular(
            root, self.gram[columns] - self.factor[:, columns].T @ self.factor, upper=False
        )
        outputs = torch.linalg.solve_triangular(root, self.cross[layer], upper=False)
        parts = row.view(own, -1, own).transpose(0, 1)
        self.left -= parts.transpose(1, 2) @ parts
        self.cross -= parts.transpose(1, 2) @ outputs
        self.factor = torch.cat((self.factor, row))


def greedy(moments: PairMoments, target_layers: int, steps: int) -> pd.DataFrame:
    """A row a (kind, target layer, head, step): the source layer taken and the joint R² so far, beside that of all source layers.

    target_layers: how many, spread evenly from the first to the last. Columns: kind, target_layer, head, step, source_layer, r2,
    r2_all, n, p_all.

    Raises:
        KvferryError: the moments are not over all columns.
    """
    if not moments.full:
        raise KvferryError("greedy selection needs the moments of all source layers at once; raise fit.memory_mb")
    layers = moments.target["layers"]
    chosen = sorted({round(layer) for layer in torch.linspace(0, layers - 1, min(target_layers, layers)).tolist()})
    rows = []
    for kind, of in KINDS.items():
        whole = moments.weighed(of, RowRule())
        whole = replace(whole, xx=whole.xx.clone())
        whole.xx.diagonal().mul_(1 + JITTER)
        solver = Solver()
        for layer in track(chosen, f"greedy {kind}", "layer"):
            explained = _explained_by_all(whole, moments, layer, solver)
            for head in range(moments.target["kv_heads"]):
                label = {"kind": kind, "target_layer": layer, "head": head}
                rows += [label | step for step in _steps(whole, moments, layer, head, steps, explained)]
    return pd.DataFrame(rows).assign(n=moments.rows, p_all=len(whole.xx))


def _outputs(moments: PairMoments, layer: int, head: int) -> Tensor:
    return layer_columns(moments.target, [layer])[head_columns(moments.target, head, 1)]


def _explained_by_all(whole: Moments, moments: PairMoments, layer: int, solver: Solver) -> Tensor:
    """What all source layers explain of each output's sum of squares, `[outputs of the layer]`."""
    cross = whole.xy[:, layer_columns(moments.target, [layer])]
    solution = solver.nested(whole.xx, cross, [len(whole.xx)], 0.0, f"target layer {layer}", shared=True)[len(whole.xx)]
    return (solution * cross).sum(0)


def _steps(
    whole: Moments, moments: PairMoments, layer: int, head: int, steps: int, explained: Tensor
) -> list[dict[str, float | int]]:
    """The steps of one head."""
    outputs = _outputs(moments, layer, head)
    total = float(whole.yy[outputs].sum())
    own = explained.view(moments.target["kv_heads"], -1)[head].sum() / total
    state = _Greedy.start(whole.xx, whole.xy[:, outputs], moments.source["layers"])
    taken: list[int] = []
    found, sum_of_gains = [], 0.0
    last = min(steps, moments.source["layers"])
    for step in range(1, last + 1):
        gains = state.gains()
        gains[taken] = -1.0
        best = int(gains.argmax())
        sum_of_gains += float(gains[best])
        taken.append(best)
        found.append({"step": step, "source_layer": best, "r2": sum_of_gains / total, "r2_all": float(own)})
        if step < last:
            state.take(best)
            _retire(state, best)
    return found


def _retire(state: _Greedy, layer: int) -> None:
    """Give a taken layer a block that stays solvable and explains nothing."""
    state.left[layer] = torch.eye(state.left.shape[1], dtype=state.left.dtype)
    state.cross[layer] = 0


def write_greedy(moments: PairMoments, how: dict[str, int], path: Path) -> None:
    """Write the selection as csv. how: target_layers and steps."""
    write_text(path, greedy(moments, how["target_layers"], how["steps"]).to_csv(index=False))
