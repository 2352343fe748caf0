"""The MLP mapper, the paper's fallback (section 4.5): for each target layer, head and kind of cache a network with two hidden
ReLU layers, trained with Adam on the squared error.

The heads of a layer read the same features and are trained side by side, on the same batches: each learns what it would
alone. Features are standardised, outputs centred and divided by one scale a head, so that the loss is the paper's up to a
factor a head; what is stored has this folded in. Rows are held in float32, those of as many target layers at a time as the
memory takes. A layer that is finished is kept, so that a killed fit goes on there, with the same numbers. Does not know
weights of rows.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from kvferry.errors import KvferryError
from kvferry.files import fingerprint, sha256_file, written_whole
from kvferry.fit.budget import MB
from kvferry.fit.pair import KINDS
from kvferry.fit.rows import Pieces, check_match, features, first_sequences, paired_shards, width
from kvferry.kv.dump import is_marked, read_shards, shard_entries
from kvferry.kv.mapper import COUPLED, Mapper, Network
from kvferry.prepare.placement import usable
from kvferry.progress import bar

Recipe = dict[str, Any]
Place = tuple[str, int]  # kind of cache, layer
Losses = dict[str, list[float]]
SINGLE = 4


@dataclass(frozen=True)
class _Task:
    """What is trained: a network a head for each place of the target. origin: fingerprint of the rows of both dumps."""

    source: Path
    target: Path
    selected: list[list[int]]
    recipe: Recipe
    checkpoint: Path
    device: torch.device
    geometry: tuple[dict[str, int], dict[str, int]]
    origin: str

    @staticmethod
    def of(
        source: Path, target: Path, selected: list[list[int]], recipe: Recipe, checkpoint: Path, device: str
    ) -> _Task:
        """With what the indices of two dumps say, if they match."""
        indices = check_match(source, target)
        geometry = (indices["source"]["geometry"], indices["target"]["geometry"])
        origin = fingerprint([index["shards"] for index in indices.values()])
        return _Task(source, target, selected, recipe, checkpoint, usable(device), geometry, origin)

    @property
    def how(self) -> dict[str, Any]:
        """Size and training of a network."""
        return self.recipe["mlp"]

    def reads(self, place: Place) -> list[Place]:
        """The places of the source that feed one of the target, in the order of the features."""
        return [(place[0], layer) for layer in self.selected[place[1]]]

    def file(self, place: Place) -> Path:
        """Where a finished place is kept."""
        return self.checkpoint / f"{place[0]}.{place[1]}.safetensors"

    def mark(self, place: Place) -> str:
        """What decides the numbers of a place."""
        asked = [self.how, self.recipe["sequences"], self.recipe["rope"] == COUPLED, self.reads(place), place]
        made_by = [self.device.type, torch.__version__, sha256_file(Path(__file__))]
        return fingerprint([asked, self.origin, made_by])


@dataclass(frozen=True)
class _Column:
    """Standardised rows of one place `[rows, width]`, and how: (row − mean) / scale, both float64 `[width]`."""

    rows: Tensor
    mean: Tensor
    scale: Tensor

    @staticmethod
    def of(rows: Tensor, heads: int = 0) -> _Column:
        """Standardise in place, by a scale for each coordinate or, with `heads`, one for each head."""
        mean = rows.mean(0, dtype=torch.float64)
        rows -= mean.float()
        scale = torch.linalg.vector_norm(rows, dim=0, dtype=torch.float64) / math.sqrt(len(rows))
        if heads:
            by_head = scale.view(heads, -1)
            scale = by_head.square().mean(1, keepdim=True).sqrt().expand_as(by_head).flatten()
        scale = torch.where(scale > 0, scale, 1.0)
        rows /= scale.float()
        return _Column(rows, mean, scale)

    def alike(self, rows: Tensor) -> Tensor:
        """Other rows, standardised as these are."""
        return (rows - self.mean.float()) / self.scale.float()


@dataclass(frozen=True)
class _Rows:
    """Rows of some places: features and outputs of the fit, and those that are held out (empty if training does not look)."""

    x: dict[Place, _Column]
    y: dict[Place, _Column]
    held_x: dict[Place, Tensor]
    held_y: dict[Place, Tensor]


@dataclass(frozen=True)
class _Side:
    """Rows of one place: a part `[rows, width]` for each source layer, outputs `[rows, kv_heads·head_dim]`; standardised."""

    parts: list[Tensor]
    outputs: Tensor


def fit_mlp(
    source: Path,
    target: Path,
    selected: list[list[int]],
    recipe: Recipe,
    checkpoint: Path,
    memory_mb: int = 3000,
    device: str = "cpu",
) -> Mapper:
    """Train the mapper that reads `selected` source layers for each target layer.

    source, target: directories of their dumps. recipe is read for mlp {width, epochs, batch, learning_rate, patience, seed},
    rope, sequences and dtype. With patience p > 0 training stops after p epochs without a smaller error on the held-out rows,
    and the weights of the best epoch are kept; a held-out R² is then not independent of them. checkpoint: a directory for
    layers that are finished, outside of the artifact. memory_mb: for the rows that are held, in MB; networks and batches come
    on top. Losses of all epochs, 1 − R² averaged over heads, are logged.

    Raises:
        KvferryError: the dumps do not match or hold too few sequences, the rows of one layer do not fit the memory, or
            training diverges.
    """
    task = _Task.of(source, target, selected, recipe, checkpoint, device)
    places = [(kind, layer) for layer in range(len(selected)) for kind in KINDS]
    missing = [place for place in places if not is_marked(task.file(place), task.mark(place))]
    with bar(len(places) * task.how["epochs"], "mlp", "epoch") as progress:
        progress.update((len(places) - len(missing)) * task.how["epochs"])
        for some in _passes(task, missing, memory_mb):
            rows = _read(task, some)
            for place in some:
                _finish(task, place, rows, progress)
    keys, values = ([_load(task.file((kind, layer))) for layer in range(len(selected))] for kind in KINDS)
    mapper = Mapper(selected, keys, values, task.geometry[1]["kv_heads"], recipe["rope"])
    return mapper.astype(getattr(torch, recipe["dtype"]))


def _passes(task: _Task, places: list[Place], memory_mb: int) -> list[list[Place]]:
    """The places in groups whose rows fit the memory together, in order."""
    passes: list[list[Place]] = []
    rows = _count(task) if places else 0
    for place in places:
        if passes and _held_mb(task, [*passes[-1], place], rows) <= memory_mb:
            passes[-1].append(place)
        elif (needed := _held_mb(task, [place], rows)) <= memory_mb:
            passes.append([place])
        else:
            raise KvferryError(
                f"{_name(place)}: its rows do not fit into {memory_mb} MB of memory; raise fit.memory_mb to "
                f"{math.ceil(needed)}, or use a smaller k or fewer sequences"
            )
    return passes


def _count(task: _Task) -> int:
    """Rows that are held; sequences have one length, so the first shard tells."""
    first, entries = next(read_shards(task.source, "fit")), shard_entries(task.source, "fit")
    sequences = task.recipe["sequences"]
    if task.how["patience"]:
        sequences += sum(entry["sequences"] for entry in shard_entries(task.source, "held_out"))
    return sequences * len(first.ids) // entries[0]["sequences"]


def _held_mb(task: _Task, places: list[Place], rows: int) -> float:
    """Megabytes of the rows of some places of the target and of all that feeds them."""
    own, other = task.geometry
    return SINGLE * rows * (len(_sources(task, places)) * width(own) + len(places) * width(other)) / MB


def _sources(task: _Task, places: list[Place]) -> list[Place]:
    """The places of the source that feed any of these."""
    return sorted({own for place in places for own in task.reads(place)})


def _name(place: Place) -> str:
    return f"target layer {place[1]}, {place[0]}"


def _read(task: _Task, places: list[Place]) -> _Rows:
    """One pass over the rows for these places, standardised."""
    x, y = _collect(task, first_sequences(task.source, task.target, task.recipe["sequences"]), places)
    heads = task.geometry[1]["kv_heads"]
    columns_x = {place: _Column.of(rows) for place, rows in x.items()}
    columns_y = {place: _Column.of(rows, heads) for place, rows in y.items()}
    if not task.how["patience"]:
        return _Rows(columns_x, columns_y, {}, {})
    pairs = paired_shards(task.source, task.target, "held_out")
    x, y = _collect(task, ((own, other, torch.ones(len(own.ids), dtype=torch.bool)) for own, other in pairs), places)
    held_x = {place: columns_x[place].alike(rows) for place, rows in x.items()}
    return _Rows(columns_x, columns_y, held_x, {place: columns_y[place].alike(rows) for place, rows in y.items()})


def _collect(
    task: _Task, pieces: Iterable[Pieces], places: list[Place]
) -> tuple[dict[Place, Tensor], dict[Place, Tensor]]:
    """Kept rows of all that feeds some places, and of these places, float32 `[rows, width]` each."""
    x: dict[Place, list[Tensor]] = {place: [] for place in _sources(task, places)}
    y: dict[Place, list[Tensor]] = {place: [] for place in places}
    coupled = task.recipe["rope"] == COUPLED
    for own, other, kept in pieces:
        for shard, parts in ((own, x), (other, y)):
            for (kind, layer), rows in parts.items():
                rows.append(features(shard, kind, [layer], coupled)[kept])
    # Pieces are let go as they are joined, so that the rows are held once.
    return tuple({place: torch.cat(parts.pop(place)) for place in list(parts)} for parts in (x, y))  # type: ignore[return-value]


def _finish(task: _Task, place: Place, rows: _Rows, progress: tqdm) -> None:
    """Train the networks of one place and keep them."""
    inputs, outputs = [rows.x[own] for own in task.reads(place)], rows.y[place]
    fit = _Side([column.rows for column in inputs], outputs.rows)
    held = _Side([rows.held_x[own] for own in task.reads(place)], rows.held_y[place]) if rows.held_y else None
    network, losses = _train(task, place, fit, held, progress)
    with written_whole(task.file(place)) as temporary:
        metadata = {"fingerprint": task.mark(place), "losses": json.dumps(losses)}
        save_file(_folded(network, inputs, outputs).tensors(), temporary, metadata=metadata)
    for side, values in losses.items():
        logging.info("mlp, %s: %s loss by epoch %s", _name(place), side, " ".join(f"{loss:.4f}" for loss in values))


def _train(task: _Task, place: Place, fit: _Side, held: _Side | None, progress: tqdm) -> tuple[Network, Losses]:
    """Networks of all heads of a place, for standardised rows; with held-out rows, those of the best epoch."""
    how, other = task.how, task.geometry[1]
    random = torch.Generator().manual_seed(int(fingerprint([how["seed"], place])[:15], 16))
    numbers = sum(part.shape[1] for part in fit.parts)
    network = best = _start(numbers, other["kv_heads"], other["head_dim"], how["width"], random).to(task.device)
    parameters = [tensor.requires_grad_() for tensor in network.tensors().values()]
    adam = torch.optim.Adam(parameters, lr=how["learning_rate"], fused=True)
    losses: Losses = {"fit": [], "held_out": []}
    for epoch in range(how["epochs"]):
        losses["fit"].append(_epoch(network, adam, fit, how["batch"], random))
        if not math.isfinite(losses["fit"][-1]):
            raise KvferryError(f"{_name(place)}: training of the mlp diverged; use a smaller mlp.learning_rate")
        progress.update()
        if held is None:
            continue
        losses["held_out"].append(_error(network, held, how["batch"]))
        lowest = losses["held_out"].index(min(losses["held_out"]))
        if lowest == epoch:
            best = _copied(network)
        elif epoch - lowest >= how["patience"]:
            progress.update(how["epochs"] - epoch - 1)
            break
    return _copied(best).to(torch.device("cpu")), losses


def _start(numbers: int, heads: int, head_dim: int, width: int, random: torch.Generator) -> Network:
    """Weights and biases drawn from ±1/√(numbers read), as torch's Linear does."""

    def draw(read: int, *shape: int) -> Tensor:
        return torch.empty(shape).uniform_(-1, 1, generator=random) / math.sqrt(read)

    return Network(
        draw(numbers, numbers, heads * width),
        draw(numbers, heads * width),
        draw(width, heads, width, width),
        draw(width, heads, width),
        draw(width, heads, width, head_dim),
        draw(width, heads, head_dim),
    )


def _epoch(network: Network, adam: torch.optim.Adam, fit: _Side, batch: int, random: torch.Generator) -> float:
    """One pass over the rows in a new order. Returns the mean loss of its batches, each before its step."""
    total = torch.zeros((), device=network.first.device)
    for rows in torch.randperm(len(fit.outputs), generator=random).split(batch):
        loss = _loss(network, fit, rows)
        adam.zero_grad()
        loss.backward()
        adam.step()
        total += loss.detach() * len(rows)
    return float(total) / len(fit.outputs)


@torch.no_grad()
def _error(network: Network, side: _Side, batch: int) -> float:
    """The loss of all rows of a side."""
    rows = torch.arange(len(side.outputs)).split(batch)
    return sum(float(_loss(network, side, own)) * len(own) for own in rows) / len(side.outputs)


def _loss(network: Network, side: _Side, rows: Tensor) -> Tensor:
    """Mean squared error of some rows: with a head's variance 1, its mean over heads of 1 − R²."""
    device = network.first.device
    mapped = network.blocks([part[rows].to(device) for part in side.parts])
    return torch.nn.functional.mse_loss(mapped, side.outputs[rows].to(device))


def _copied(network: Network) -> Network:
    """The same numbers, which training does not change."""
    return Network(*(tensor.detach().clone() for tensor in network.tensors().values()))


def _folded(network: Network, inputs: list[_Column], outputs: _Column) -> Network:
    """The network for rows as they are: of f((x − m)/s)·t + n, s and m go into the first layer, t and n into the last."""
    mean, scale = torch.cat([column.mean for column in inputs]), torch.cat([column.scale for column in inputs])
    first = network.first.double() / scale[:, None]
    by_head = (len(network.third), -1)
    third = network.third.double() * outputs.scale.view(by_head)[:, None]
    third_bias = network.third_bias.double() * outputs.scale.view(by_head) + outputs.mean.view(by_head)
    first_bias = network.first_bias.double() - mean @ first
    return replace(
        network,
        first=first.float(),
        first_bias=first_bias.float(),
        third=third.float(),
        third_bias=third_bias.float(),
    )


def _load(path: Path) -> Network:
    """A place that is finished."""
    tensors = load_file(path)
    return Network(*(tensors[field.name] for field in fields(Network)))
