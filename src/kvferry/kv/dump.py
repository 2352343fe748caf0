"""Dumps: a model's own KV cache of the calibration sequences on disk, as the model made it (dtype of the forward, RoPE on).

One safetensors a shard of sequences, with a tensor per layer and kind `[rows, kv_heads, head_dim]`, token ids, positions and
sequence ids of the kept rows, and cos and sin of the model's rotary module, so that a reader needs no model. Shards
are written whole and named in `index.json` at the end: a killed dump goes on at the first shard that is missing.
Does not know pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvferry.errors import KvferryError
from kvferry.files import fingerprint, read_json, sha256_file, write_json, written_whole
from kvferry.kv import cache, rope
from kvferry.kv.cache import cache_layers, forward, make_cache
from kvferry.kv.rope import Rotation, check_rotation, rotation
from kvferry.prepare.calibration import Side
from kvferry.progress import bar

INDEX = "index.json"
SHARD_SEQUENCES = 8
BATCH = 4


@dataclass(frozen=True)
class Shard:
    """Kept rows of some sequences: keys (RoPE on) and values `[layers, rows, kv_heads, head_dim]`, ids and positions `[rows]`."""

    keys: list[Tensor]
    values: list[Tensor]
    ids: Tensor
    positions: Tensor
    sequences: Tensor
    rotation: Rotation

    def stripped_keys(self, layer: int) -> Tensor:
        """Keys of a layer in content space, float32 `[rows, kv_heads, head_dim]`."""
        per_head = Rotation(self.rotation.cos[:, None], self.rotation.sin[:, None])
        return per_head.strip(self.keys[layer].float())


def write_dump(
    model: PreTrainedModel, card: dict[str, Any], sequences: dict[Side, Tensor], how: dict[str, Any], directory: Path
) -> None:
    """Dump the KV cache of `sequences`, a `[count, length]` tensor of token ids a side, keeping every `how["stride"]`-th token.

    Raises:
        KvferryError: the rotary layout is not understood, or a key or value is not finite.
    """
    check_rotation(model)
    shards = []
    with bar(sum(map(len, sequences.values())), f"dump {card['model']}", "seq") as progress:
        for side, ids in sequences.items():
            for start in range(0, len(ids), SHARD_SEQUENCES):
                part = ids[start : start + SHARD_SEQUENCES]
                path = directory / f"{side}-{start // SHARD_SEQUENCES:05d}.safetensors"
                mark = fingerprint([_maker(model, card), how["stride"], part.tolist(), start])
                if not _is_done(path, mark):
                    _write_shard(model, part, start, how["stride"], path, mark)
                shards.append({"file": path.name, "side": side, "sequences": len(part), "sha256": sha256_file(path)})
                progress.update(len(part))
    geometry = {key: card[key] for key in ("layers", "kv_heads", "head_dim")}
    identity = {key: card[key] for key in ("model", "config_sha256", "tokenizer_sha256", "weights_id")}
    write_json(
        directory / INDEX,
        {"identity": identity, "geometry": geometry, "calibration": how, "dtype": str(model.dtype), "shards": shards},
    )


def _maker(model: PreTrainedModel, card: dict[str, Any]) -> list[str]:
    """What decides the bytes of a shard besides its tokens: the model, the arithmetic and the code."""
    code = [sha256_file(Path(module.__file__ or "")) for module in (cache, rope)] + [sha256_file(Path(__file__))]
    arithmetic = [str(model.dtype), model.device.type, transformers.__version__, torch.__version__]
    return [card["weights_id"], card["config_sha256"], *arithmetic, *code]


def _is_done(path: Path, mark: str) -> bool:
    """Whether an earlier run left this very shard."""
    if not path.exists():
        return False
    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("fingerprint") == mark
    except SafetensorError:
        return False


def _write_shard(model: PreTrainedModel, ids: Tensor, first: int, stride: int, path: Path, mark: str) -> None:
    """Forward the sequences `ids [sequences, length]` and write their kept rows."""
    parts = [_cache_of(model, batch) for batch in ids.split(BATCH)]
    kept = torch.arange(0, ids.shape[1], stride)
    tensors: dict[str, Tensor] = {}
    for layer in range(len(parts[0])):
        for kind, index in (("k", 0), ("v", 1)):
            rows = torch.cat([part[layer][index][:, :, kept].transpose(1, 2).flatten(0, 1) for part in parts])
            if not rows.isfinite().all():
                raise KvferryError(
                    f"{model.name_or_path}: layer {layer} gave a {kind} that is not finite "
                    f"in sequences {first} to {first + len(ids) - 1}; use another dtype or look at the model"
                )
            tensors[f"{kind}.{layer}"] = rows.contiguous().cpu()
    count = len(ids)
    tensors["ids"] = ids[:, kept].flatten().contiguous()
    tensors["positions"] = kept.repeat(count)
    tensors["sequences"] = (torch.arange(count) + first).repeat_interleave(len(kept))
    turned = rotation(model, kept[None].to(model.device))
    tensors["cos"], tensors["sin"] = (table[0].cpu().contiguous() for table in (turned.cos, turned.sin))
    with written_whole(path) as temporary:
        save_file(tensors, temporary, metadata={"fingerprint": mark})


def _cache_of(model: PreTrainedModel, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of all layers for `ids [batch, length]`."""
    ids = ids.to(model.device)
    positions = torch.arange(ids.shape[1], device=model.device).expand_as(ids)
    filled = make_cache([], model)
    forward(model, ids, filled, torch.ones_like(ids), positions)
    return cache_layers(filled)


def read_index(directory: Path) -> dict[str, Any]:
    """The index of a finished dump."""
    return read_json(directory / INDEX, "dump index")


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
    return Shard(
        keys=[tensors[f"k.{layer}"] for layer in range(layers)],
        values=[tensors[f"v.{layer}"] for layer in range(layers)],
        ids=tensors["ids"],
        positions=tensors["positions"],
        sequences=tensors["sequences"],
        rotation=Rotation(tensors["cos"].repeat(repeats, 1), tensors["sin"].repeat(repeats, 1)),
    )
