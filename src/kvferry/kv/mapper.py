"""The mapper: per target layer, a map from the selected source layers' keys to all target heads' keys, and one of values.

K̂ = RoPE_target(f_K(strip(K_source))), V̂ = f_V(V_source), where f is one matrix (the paper, section 3), one matrix a head that
reads the same head alone, or an MLP a head (its fallback). Token-wise: a span at any offset gives the same rows whatever
stands around it. Holds the artifact on disk: `mapper.safetensors` + `manifest.json`, refused when altered or made for another
model. Does not know how it was fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvferry.errors import KvferryError
from kvferry.files import directory_whole, fingerprint, read_json, sha256_file, write_json
from kvferry.kv.cache import LayerKV
from kvferry.kv.rope import Rotation

FORMAT = 2
WEIGHTS, MANIFEST = "mapper.safetensors", "manifest.json"
IDENTITY = ("config_sha256", "tokenizer_sha256", "weights_id")
STRIPPED, NOT_REAPPLIED, COUPLED = ROPES = ("stripped", "not_reapplied", "coupled")
# Rows that are mapped at a time. On a CPU their features should stay in its caches; elsewhere only memory bounds them.
CPU_ROWS, ROWS = 1024, 16384


class Map(Protocol):
    """What makes all target heads of a layer, keys or values, from the selected source layers. Every field is a tensor."""

    def blocks(self, parts: Sequence[Tensor]) -> Tensor:
        """Map features, given as one block `[tokens, kv_heads·head_dim]` a source layer, to `[tokens, kv_heads·head_dim]`."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name of the field."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @property
    def parameters(self) -> int:
        """Number of weights, biases aside."""
        return sum(tensor.numel() for name, tensor in self.tensors().items() if not name.endswith("bias"))

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of the arithmetic."""
        return next(iter(self.tensors().values())).dtype

    @property
    def device(self) -> torch.device:
        """Where its weights are, and where it wants its features."""
        return next(iter(self.tensors().values())).device

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return type(self)(*(tensor.to(device) for tensor in self.tensors().values()))

    def astype(self, dtype: torch.dtype) -> Self:
        """The same with weights rounded to `dtype`, in which it then also computes."""
        return type(self)(*(tensor.to(dtype) for tensor in self.tensors().values()))


@dataclass(frozen=True)
class Affine(Map):
    """x·weight + bias: weight `[features, kv_heads·head_dim]`, bias `[kv_heads·head_dim]`."""

    weight: Tensor
    bias: Tensor

    def blocks(self, parts: Sequence[Tensor]) -> Tensor:
        """Apply to features given as blocks `[tokens, width]` in order."""
        if self.weight.dtype.itemsize >= torch.float32.itemsize:
            return self._summed(parts)
        return torch.addmm(self.bias, torch.cat(list(parts), dim=1), self.weight)

    def _summed(self, parts: Sequence[Tensor]) -> Tensor:
        """Block by block into one sum, without joining. A 16-bit sum would be rounded at every block."""
        row = parts[0].shape[1]
        out = torch.addmm(self.bias, parts[0], self.weight[:row])
        for part in parts[1:]:
            out.addmm_(part, self.weight[row : row + part.shape[1]])
            row += part.shape[1]
        return out


@dataclass(frozen=True)
class HeadLocal(Map):
    """Each target head reads the same head of every source layer: weight `[kv_heads, k·source_head_dim, head_dim]`, bias
    `[kv_heads·head_dim]`; features of a head are in order of the source layers (CacheBridge, arXiv:2609.00891).
    """

    weight: Tensor
    bias: Tensor

    def blocks(self, parts: Sequence[Tensor]) -> Tensor:
        """Apply to blocks `[tokens, kv_heads·source_head_dim]`, one a source layer."""
        heads = len(self.weight)
        features = torch.cat([part.unflatten(1, (heads, -1)) for part in parts], dim=2)
        return _each_head(features, self.weight, self.bias.view(heads, -1)).flatten(1)


@dataclass(frozen=True)
class Network(Map):
    """An MLP with two hidden ReLU layers for each target head, all of which read the same features (the paper's fallback).

    first `[features, kv_heads·width]`, second `[kv_heads, width, width]`, third `[kv_heads, width, head_dim]`; biases
    `[kv_heads·width]`, `[kv_heads, width]`, `[kv_heads, head_dim]`.
    """

    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor
    third: Tensor
    third_bias: Tensor

    def blocks(self, parts: Sequence[Tensor]) -> Tensor:
        """Apply to features given as blocks `[tokens, width]` in order. Gradients flow through it."""
        hidden = torch.addmm(self.first_bias, torch.cat(list(parts), dim=1), self.first).relu_()
        hidden = hidden.unflatten(1, (len(self.second), -1))
        hidden = _each_head(hidden, self.second, self.second_bias).relu_()
        return _each_head(hidden, self.third, self.third_bias).flatten(1)


KINDS: dict[str, type[Map]] = {"affine": Affine, "head_local": HeadLocal, "network": Network}


def _each_head(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x `[tokens, heads, in]`, weight `[heads, in, out]`, bias `[heads, out]` → `[tokens, heads, out]`."""
    return torch.baddbmm(bias[:, None], x.transpose(0, 1), weight).transpose(0, 1)


@dataclass(frozen=True)
class Mapper:
    """A mapper.

    selected: for each target layer the source layers it reads, in the order of the features.
    keys, values: one map a target layer. kv_heads: of the target.
    rope: how keys are mapped: `stripped` takes the source's rotation off and puts the target's on, `not_reapplied` only takes
    the source's off, `coupled` maps keys as they are, rotation on.
    """

    selected: list[list[int]]
    keys: Sequence[Map]
    values: Sequence[Map]
    kv_heads: int
    rope: str = STRIPPED

    def translate(self, layers: list[LayerKV], source: Rotation, target: Rotation) -> list[LayerKV]:
        """Map a span: keys and values `[batch, kv_heads, tokens, head_dim]` of every source layer to every target layer.

        `source` and `target` hold cos and sin `[batch, tokens, rotary_dim]` of the span's positions for either model. Source
        layers may be on any devices; those of a target layer come out on the device of its maps.
        """
        batch, _, tokens, _ = layers[0][0].shape
        step = max(1, (CPU_ROWS if layers[0][0].device.type == "cpu" else ROWS) // batch)
        mapped: list[LayerKV] = []
        for start in range(0, tokens, step):
            few = slice(start, start + step)
            some = [(keys[:, :, few], values[:, :, few]) for keys, values in layers]
            for layer, pair in enumerate(self._few(some, _of(source, few), _of(target, few))):
                if not start:
                    mapped.append(tuple(part.new_empty(*part.shape[:2], tokens, part.shape[3]) for part in pair))
                for whole, part in zip(mapped[layer], pair, strict=True):
                    whole[:, :, few] = part
        return mapped

    def _few(self, layers: list[LayerKV], source: Rotation, target: Rotation) -> Iterator[LayerKV]:
        """The same for a few tokens, a target layer after another."""
        keys, values = map(Copies, self.features(layers, source))
        batch = len(layers[0][0])
        for chosen, to_key, to_value in zip(self.selected, self.keys, self.values, strict=True):
            key = to_key.blocks([keys.on(to_key.device, layer) for layer in chosen])
            value = to_value.blocks([values.on(to_value.device, layer) for layer in chosen])
            yield self.rotated(self._heads(key, batch), target), self._heads(value, batch)

    def features(self, layers: list[LayerKV], source: Rotation) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Keys and values of the source layers that are read, as the maps want them: `[batch·tokens, kv_heads·head_dim]`."""
        needed = sorted({layer for chosen in self.selected for layer in chosen})
        keys = {layer: layers[layer][0] for layer in needed}
        if self.rope != COUPLED:
            # Turned token by token, as rows want them: what the rotation writes is then not copied again.
            back = source.for_rows().inverse()
            keys = {layer: back.apply(part.float().transpose(1, 2)).transpose(1, 2) for layer, part in keys.items()}
        return (
            {layer: flatten(part, self.dtype) for layer, part in keys.items()},
            {layer: flatten(layers[layer][1], self.dtype) for layer in needed},
        )

    def rotated(self, keys: Tensor, target: Rotation) -> Tensor:
        """Mapped keys `[batch, kv_heads, tokens, head_dim]` with the target's rotation, where this mapper puts it on."""
        return target.for_heads().apply(keys) if self.rope == STRIPPED else keys

    def _heads(self, rows: Tensor, batch: int) -> Tensor:
        """`[batch·tokens, kv_heads·head_dim]` → `[batch, kv_heads, tokens, head_dim]`, a view."""
        return rows.view(batch, len(rows) // batch, self.kv_heads, -1).transpose(1, 2)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of the arithmetic."""
        return self.keys[0].dtype

    @property
    def parameters(self) -> int:
        """Number of weights, biases aside, as the paper counts: 2·L_t·n_kv_t·(k·n_kv_s·d_s)·d_t for one matrix a layer."""
        return sum(own.parameters for own in (*self.keys, *self.values))

    def onto(self, devices: Sequence[torch.device]) -> Mapper:
        """The same with the maps of each target layer on the device that is given for it."""
        keys, values = (
            [own.to(device) for own, device in zip(maps, devices, strict=True)] for maps in (self.keys, self.values)
        )
        return replace(self, keys=keys, values=values)

    def astype(self, dtype: torch.dtype) -> Mapper:
        """The same with weights rounded to `dtype`, in which it then also computes."""
        keys, values = ([own.astype(dtype) for own in maps] for maps in (self.keys, self.values))
        return replace(self, keys=keys, values=values)


class Copies:
    """Tensors by source layer, each copied once to every other device that asks for it."""

    def __init__(self, own: dict[int, Tensor]) -> None:
        self._own = own
        self._copied: dict[tuple[torch.device, int], Tensor] = {}

    def on(self, device: torch.device, layer: int) -> Tensor:
        """The tensor of a layer, on a device."""
        if self._own[layer].device == device:
            return self._own[layer]
        if (device, layer) not in self._copied:
            self._copied[device, layer] = self._own[layer].to(device)
        return self._copied[device, layer]


def flatten(part: Tensor, dtype: torch.dtype) -> Tensor:
    """`[batch, kv_heads, tokens, head_dim]` → `[batch·tokens, kv_heads·head_dim]`, the row order of all features."""
    return part.transpose(1, 2).flatten(2).flatten(0, 1).to(dtype)


def _of(rotation: Rotation, tokens: slice) -> Rotation:
    """The rotation of some of the tokens."""
    return Rotation(rotation.cos[:, tokens], rotation.sin[:, tokens])


def save_mapper(mapper: Mapper, manifest: dict[str, Any], directory: Path) -> None:
    """Write the artifact, whole or not at all. `manifest` gets geometry, parameters and the checksum of the weights."""
    tensors = {
        f"{kind}.{layer}.{field}": tensor.contiguous()
        for kind, maps in (("k", mapper.keys), ("v", mapper.values))
        for layer, own in enumerate(maps)
        for field, tensor in own.tensors().items()
    }
    with directory_whole(directory) as temporary:
        save_file(tensors, temporary / WEIGHTS)
        own = {
            "format": FORMAT,
            "selected_layers": mapper.selected,
            "kv_heads": mapper.kv_heads,
            "map": next(name for name, kind in KINDS.items() if type(mapper.keys[0]) is kind),
            "rope": mapper.rope,
            "parameters": mapper.parameters,
            "dtype": str(mapper.dtype).removeprefix("torch."),
            "weights_bytes": (temporary / WEIGHTS).stat().st_size,
            "weights_sha256": sha256_file(temporary / WEIGHTS),
        }
        whole = manifest | own
        write_json(temporary / MANIFEST, whole | {"manifest_sha256": fingerprint(whole)})


def load_mapper(directory: Path, source: dict[str, Any], target: dict[str, Any]) -> tuple[Mapper, dict[str, Any]]:
    """Load an artifact for these two models, given by their cards. Returns the mapper and its manifest.

    Raises:
        KvferryError: unreadable, another format, altered weights, or made for another source, target or tokenizer.
    """
    manifest = read_manifest(directory)
    for role, card in (("source", source), ("target", target)):
        for key in IDENTITY:
            if manifest[role].get(key) != card[key]:
                raise KvferryError(
                    f"{directory}: this mapper was fitted for another {role} ({manifest[role].get('model')}, "
                    f"{key} differs from {card['model']}); fit it again for this pair"
                )
    for key, known in (("map", tuple(KINDS)), ("rope", ROPES)):
        if manifest.get(key) not in known:
            raise KvferryError(
                f"{directory}: this mapper is of an unknown kind ({key}: {manifest.get(key)}, known are {', '.join(known)}); "
                "fit it again"
            )
    tensors, selected = _load_weights(directory, manifest), manifest["selected_layers"]
    keys, values = (
        [_stored_map(tensors, f"{kind}.{layer}", manifest, directory) for layer in range(len(selected))]
        for kind in ("k", "v")
    )
    return Mapper(selected, keys, values, manifest["kv_heads"], manifest["rope"]), manifest


def _stored_map(tensors: dict[str, Tensor], name: str, manifest: dict[str, Any], directory: Path) -> Map:
    """The map whose fields are stored under `name`."""
    kind = KINDS[manifest["map"]]
    try:
        return kind(*(tensors[f"{name}.{field.name}"] for field in fields(kind)))  # type: ignore[arg-type]
    except KeyError as error:
        raise KvferryError(f"{directory / WEIGHTS}: holds no tensor {error} of this mapper; fit it again") from error


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read a mapper's manifest.

    Raises:
        KvferryError: missing, broken, altered, or of another format.
    """
    manifest = read_json(directory / MANIFEST, "mapper manifest")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise KvferryError(f"{directory / MANIFEST}: not a mapper manifest of format {FORMAT}; fit the mapper again")
    if manifest.pop("manifest_sha256", None) != fingerprint(manifest):
        raise KvferryError(f"{directory / MANIFEST}: altered since it was written; fit the mapper again")
    return manifest


def _load_weights(directory: Path, manifest: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors, after their checksum."""
    path = directory / WEIGHTS
    if not path.exists() or sha256_file(path) != manifest["weights_sha256"]:
        raise KvferryError(f"{path}: missing, truncated or altered since it was written; fit the mapper again")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise KvferryError(f"{path}: not a safetensors file ({error}); fit the mapper again") from error
