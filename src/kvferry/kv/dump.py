"""Dumps: a model's own KV cache of the calibration sequences on disk, as the model made it (dtype of the forward, RoPE on).

One safetensors a shard of sequences, with a tensor per layer and kind `[rows, kv_heads, head_dim]`, token ids, positions and
sequence ids of the kept rows, and cos and sin of the model's rotary module, so that a reader needs no model; on request also
the rows' weights under the model's own attention. Shards are written whole and named in `index.json` at the end: a killed
dump goes on at the first shard that is missing. Does not know pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from kvferry.config import Geometry
from kvferry.errors import KvferryError
from kvferry.files import check_room, fingerprint, read_sealed, sha256_file, write_sealed
from kvferry.kv import attention, cache, rope
from kvferry.kv.attention import observed
from kvferry.kv.cache import cache_layers, forward, make_cache
from kvferry.kv.marked import is_marked, write_marked
from kvferry.kv.rope import Rotation, check_rotation, rotation
from kvferry.prepare.calibration import Side
from kvferry.prepare.decoder import check_positions
from kvferry.progress import bar

INDEX = "index.json"
SHARD_SEQUENCES = 8
# The kinds of tensors of a layer, in words.
WORDS = {"k": "key", "v": "value", "rk": "weight of a key", "rv": "weight of a value"}
BATCH = 4


@dataclass(frozen=True)
class Shard:
    """Kept rows of some sequences: keys (RoPE on) and values `[layers, rows, kv_heads, head_dim]`, ids and positions `[rows]`.

    `key_weights` and `value_weights` are r_K and r_V of the rows (see `kv.attention.row_weights`), float32
    `[layers, rows, kv_heads]`, with all tokens of the sequence as queries; None where the dump was made without.
    """

    keys: list[Tensor]
    values: list[Tensor]
    ids: Tensor
    positions: Tensor
    sequences: Tensor
    rotation: Rotation
    key_weights: list[Tensor] | None = None
    value_weights: list[Tensor] | None = None

    def stripped_keys(self, layer: int) -> Tensor:
        """Keys of a layer in content space, float32 `[rows, kv_heads, head_dim]`."""
        per_head = Rotation(self.rotation.cos[:, None], self.rotation.sin[:, None])
        return per_head.strip(self.keys[layer].float())


def write_dump(
    model: PreTrainedModel,
    card: dict[str, Any],
    sequences: dict[Side, Tensor],
    how: dict[str, Any],
    directory: Path,
    *,
    row_weights: bool = False,
) -> None:
    """Dump the KV cache of `sequences`, a `[count, length]` tensor of token ids a side, keeping every `how["stride"]`-th token.

    With `row_weights` every shard also holds the kept rows' weights. Keys and values then differ in the last bits from those
    of a dump without, since the attention that is observed sums in another order.

    Raises:
        KvferryError: the rotary layout is not understood, a sequence is longer than the model's positions, a key, value or
            weight is not finite, or attention cannot be observed.
    """
    check_rotation(model)
    check_positions(model.config, max(ids.shape[1] for ids in sequences.values()), "calibration.length")
    check_room(directory, _bytes_to_come(model, card, sequences, how["stride"], directory, row_weights), "the dump")
    shards = []
    with bar(sum(map(len, sequences.values())), f"dump {card['model']}", "seq") as progress:
        for side, ids in sequences.items():
            for start in range(0, len(ids), SHARD_SEQUENCES):
                part = ids[start : start + SHARD_SEQUENCES]
                path = directory / f"{side}-{start // SHARD_SEQUENCES:05d}.safetensors"
                mark = fingerprint([_maker(model, card, row_weights), how["stride"], part.tolist(), start])
                if not is_marked(path, mark):
                    _write_shard(model, part, start, how["stride"], path, mark, row_weights)
                shards.append({"file": path.name, "side": side, "sequences": len(part), "sha256": sha256_file(path)})
                progress.update(len(part))
    geometry = {key: card[key] for key in ("layers", "kv_heads", "head_dim")}
    identity = {key: card[key] for key in ("model", "origin", "config_sha256", "tokenizer_sha256", "weights_id")}
    index = {
        "identity": identity,
        "geometry": geometry,
        "calibration": how,
        "dtype": str(model.dtype),
        "shards": shards,
    }
    write_sealed(directory / INDEX, index | ({"row_weights": True} if row_weights else {}))


def _bytes_to_come(
    model: PreTrainedModel,
    card: dict[str, Any],
    sequences: dict[Side, Tensor],
    stride: int,
    directory: Path,
    row_weights: bool,
) -> int:
    """Bytes of all shards, less those of the shards that are there: they stay, or others take their place."""
    geometry = Geometry(card["layers"], card["kv_heads"], card["head_dim"])
    a_row = geometry.token_bytes(model.dtype.itemsize)
    if row_weights:
        a_row += 2 * torch.float32.itemsize * geometry.layers * geometry.kv_heads
    rows = sum(len(ids) * len(range(0, ids.shape[1], stride)) for ids in sequences.values())
    return rows * a_row - sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _maker(model: PreTrainedModel, card: dict[str, Any], row_weights: bool) -> list[str]:
    """What decides the bytes of a shard besides its tokens: the model, the arithmetic and the code."""
    code = [sha256_file(Path(module.__file__ or "")) for module in (cache, rope)] + [sha256_file(Path(__file__))]
    if row_weights:
        code += ["row_weights", sha256_file(Path(attention.__file__ or ""))]
    arithmetic = [str(model.dtype), model.device.type, transformers.__version__, torch.__version__]
    return [card["weights_id"], card["config_sha256"], *arithmetic, *code]


def _write_shard(
    model: PreTrainedModel, ids: Tensor, first: int, stride: int, path: Path, mark: str, row_weights: bool
) -> None:
    """Forward the sequences `ids [sequences, length]` and write their kept rows."""
    parts = [_states_of(model, batch, row_weights) for batch in ids.split(BATCH)]
    kept = torch.arange(0, ids.shape[1], stride)
    tensors: dict[str, Tensor] = {}
    for name in parts[0]:
        rows = torch.cat([part[name][:, :, kept].transpose(1, 2).flatten(0, 1) for part in parts])
        _check_finite(rows, name, ids, kept, first, f"{model.name_or_path or type(model).__name__}, {path.stem}")
        tensors[name] = rows.contiguous().cpu()
    count = len(ids)
    tensors["ids"] = ids[:, kept].flatten().contiguous()
    tensors["positions"] = kept.repeat(count)
    tensors["sequences"] = (torch.arange(count) + first).repeat_interleave(len(kept))
    turned = rotation(model, kept[None].to(model.device))
    tensors["cos"], tensors["sin"] = (table[0].cpu().contiguous() for table in (turned.cos, turned.sin))
    write_marked(path, tensors, mark)


def _check_finite(rows: Tensor, name: str, ids: Tensor, kept: Tensor, first: int, where: str) -> None:
    """Refuse rows `[sequences·kept, ...]` of `ids [sequences, length]` that are not finite, naming the first such token."""
    # Not `isfinite` of all of them, which would take ten times as long.
    if rows.amin().isfinite() and rows.amax().isfinite():
        return
    row = int((~rows.flatten(1).isfinite().all(1)).nonzero()[0, 0])
    sequence, token = row // len(kept), int(kept[row % len(kept)])
    kind, layer = name.split(".")
    raise KvferryError(
        f"{where}: layer {layer} gave a {WORDS[kind]} that is not finite in sequence {first + sequence}, at token {token} "
        f"(id {int(ids[sequence, token])}); use another dtype or look at the model"
    )


def _states_of(model: PreTrainedModel, ids: Tensor, row_weights: bool) -> dict[str, Tensor]:
    """Keys, values and, if asked, weights for `ids [batch, length]`, by name and layer, `[batch, kv_heads, length, ...]`."""
    ids = ids.to(model.device)
    positions = torch.arange(ids.shape[1], device=model.device).expand_as(ids)
    filled = make_cache([], model)
    with observed(model, attention.row_weights) if row_weights else nullcontext({}) as weights:
        forward(model, ids, filled, torch.ones_like(ids), positions)
    states: dict[str, Tensor] = {}
    for layer, (keys, values) in enumerate(cache_layers(filled)):
        states |= {f"k.{layer}": keys, f"v.{layer}": values}
        if row_weights:
            states |= dict(zip((f"rk.{layer}", f"rv.{layer}"), weights[layer], strict=True))
    return states


def read_index(directory: Path) -> dict[str, Any]:
    """The index of a finished dump. Raises KvferryError if it is missing, broken, or was changed."""
    return read_sealed(directory / INDEX, "dump index", ("identity", "geometry", "calibration", "shards"))


def shard_entries(directory: Path, side: Side) -> list[dict[str, Any]]:
    """What the index says of the shards of one side, in order."""
    return [entry for entry in read_index(directory)["shards"] if entry["side"] == side]


def read_shards(directory: Path, side: Side) -> Iterator[Shard]:
    """The shards of one side, in order, each checked against the index.

    Raises:
        KvferryError: a shard is missing or altered.
    """
    layers = read_index(directory)["geometry"]["layers"]
    for entry in shard_entries(directory, side):
        path = directory / entry["file"]
        if not path.exists() or sha256_file(path) != entry["sha256"]:
            raise KvferryError(f"{path}: missing or altered since the dump; delete {directory} and run again")
        yield _as_shard(load_file(path), layers)


def _as_shard(tensors: dict[str, Tensor], layers: int) -> Shard:
    """Name the tensors of a shard; cos and sin are spread from one sequence to all rows."""
    repeats = len(tensors["positions"]) // len(tensors["cos"])

    def of_layers(kind: str) -> list[Tensor]:
        return [tensors[f"{kind}.{layer}"] for layer in range(layers)]

    weighted = "rk.0" in tensors
    return Shard(
        keys=of_layers("k"),
        values=of_layers("v"),
        ids=tensors["ids"],
        positions=tensors["positions"],
        sequences=tensors["sequences"],
        rotation=Rotation(tensors["cos"].repeat(repeats, 1), tensors["sin"].repeat(repeats, 1)),
        key_weights=of_layers("rk") if weighted else None,
        value_weights=of_layers("rv") if weighted else None,
    )
