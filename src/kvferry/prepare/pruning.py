"""Depth pruning in closed form: remove layers [first, end) and let the layer before them stand in.

T is fitted by ridge so that (MLP output of layer first−1)·T ≈ (hidden state entering `end`) − (hidden state entering `first`
− that MLP output), and folded into the down_proj of layer first−1. The first position of each sequence, an outlier in
activation, is left out of the fit. The result is a plain model with fewer layers. Knows Llama-like decoder layers only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvferry.files import directory_whole, write_sealed
from kvferry.prepare.calibration import Draw, draw_sequences
from kvferry.prepare.corpora import Document
from kvferry.prepare.models import CARD, load_model, make_card, save_model
from kvferry.progress import track

LAMBDA = 1e-4
BATCH = 4


class Stop(Exception):
    """Ends a forward pass once the states that are wanted have been seen."""


def prepare_pruned(name: str, entry: dict[str, Any], base: Path, documents: list[Document], directory: Path) -> None:
    """Prepare a `pruned` entry at `directory` from the prepared `base`."""
    loaded = load_model(base)
    how = entry["calibration"]
    draw = Draw("fit", how["sequences"], how["length"], how["seed"])
    ids = draw_sequences(documents, loaded.tokenizer, draw, how["corpus"])
    for first, end in sorted(entry["remove"], reverse=True):
        remove_layers(loaded.model, first, end, ids)
    with directory_whole(directory) as temporary:
        save_model(loaded.model, loaded.tokenizer, temporary)
        write_sealed(temporary / CARD, make_card(name, entry, temporary) | {"location": str(directory)})


def remove_layers(model: PreTrainedModel, first: int, end: int, ids: Tensor) -> None:
    """Remove decoder layers [first, end) in place, calibrated on `ids [sequences, length]`."""
    transform = fit_transform(model, first, end, ids)
    decoder = model.get_decoder()
    for part in decoder.layers[first - 1].mlp.down_proj.parameters():
        part.data = (transform.T @ part.data.double()).to(part.dtype)
    decoder.layers = nn.ModuleList([*decoder.layers[:first], *decoder.layers[end:]])
    for index, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(decoder.layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [
            kind for index, kind in enumerate(model.config.layer_types) if not first <= index < end
        ]


def fit_transform(model: PreTrainedModel, first: int, end: int, ids: Tensor) -> Tensor:
    """T `[hidden, hidden]` in float64: the ridge solution (MᵀM + λ·mean(diag)·I)⁻¹ Mᵀ(h_end − h_first + M)."""
    hidden = model.config.hidden_size
    gram, cross = (torch.zeros(hidden, hidden, dtype=torch.float64) for _ in range(2))
    for batch in track(ids.split(BATCH), f"prune {first}-{end - 1}", "batch"):
        mlp, entering, leaving = (state[:, 1:].flatten(0, 1) for state in states(model, first, end, batch))
        gram += (mlp.T @ mlp).double()
        cross += (mlp.T @ (leaving - entering + mlp)).double()
    ridge = LAMBDA * gram.diagonal().mean() * torch.eye(hidden, dtype=torch.float64)
    return torch.linalg.solve(gram + ridge, cross)


@torch.inference_mode()
def states(model: PreTrainedModel, first: int, end: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """MLP output of layer first−1, hidden states entering `first` and entering `end`, each `[batch, length, hidden]`."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _module, _inputs, output: seen.__setitem__(name, output)

    def stop(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        seen["leaving"] = output
        raise Stop

    layers = model.get_decoder().layers
    hooks = [
        layers[first - 1].mlp.register_forward_hook(keep("mlp")),
        layers[first - 1].register_forward_hook(keep("entering")),
        layers[end - 1].register_forward_hook(stop),
    ]
    try:
        model(input_ids=ids, use_cache=False)
    except Stop:
        return seen["mlp"], seen["entering"], seen["leaving"]
    finally:
        for hook in hooks:
            hook.remove()
    raise AssertionError("the forward pass never reached the last removed layer")
