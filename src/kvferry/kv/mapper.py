"""The mapper: per target layer, one matrix from the selected source layers' content-space KV to all target heads.

K̂ = RoPE_target(strip(K_source)·W_K + b_K), V̂ = V_source·W_V + b_V (the paper, section 3). Token-wise: a span at any offset
gives the same rows whatever stands around it. Holds the artifact on disk: `mapper.safetensors` + `manifest.json`, refused
when altered or made for another model. Does not know how it was fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvferry.errors import KvferryError
from kvferry.files import directory_whole, fingerprint, read_json, sha256_file, write_json
from kvferry.kv.cache import LayerKV
from kvferry.kv.rope import Rotation

FORMAT = 1
WEIGHTS, MANIFEST = "mapper.safetensors", "manifest.json"
IDENTITY = ("config_sha256", "tokenizer_sha256", "weights_id")


@dataclass(frozen=True)
class Affine:
    """x·weight + bias: weight `[features, kv_heads·head_dim]`, bias `[kv_heads·head_dim]`."""

    weight: Tensor
    bias: Tensor

    def blocks(self, parts: Sequence[Tensor]) -> Tensor:
        """Apply to features given as blocks `[tokens, width]` in order, without joining them."""
        out, row = self.bias.expand(parts[0].shape[0], -1), 0
        for part in parts:
            out = torch.addmm(out, part, self.weight[row : row + part.shape[1]])
            row += part.shape[1]
        return out


@dataclass(frozen=True)
class Mapper:
    """A linear mapper.

    selected: for each target layer the source layers it reads, in the order of the features.
    keys, values: one `Affine` a target layer. kv_heads: of the target.
    """

    selected: list[list[int]]
    keys: list[Affine]
    values: list[Affine]
    kv_heads: int

    def translate(self, layers: list[LayerKV], source: Rotation, target: Rotation) -> list[LayerKV]:
        """Map a span: keys and values `[batch, kv_heads, tokens, head_dim]` of every source layer to every target layer.

        `source` and `target` hold cos and sin `[batch, tokens, rotary_dim]` of the span's positions for either model.
        """
        batch, _, tokens, _ = layers[0][0].shape
        stripped = source.for_heads()
        needed = sorted({layer for chosen in self.selected for layer in chosen})
        keys = {layer: flatten(stripped.strip(layers[layer][0].float()), self.dtype) for layer in needed}
        values = {layer: flatten(layers[layer][1], self.dtype) for layer in needed}
        turned = target.for_heads()
        mapped = []
        for chosen, to_key, to_value in zip(self.selected, self.keys, self.values, strict=True):
            key = to_key.blocks([keys[layer] for layer in chosen])
            value = to_value.blocks([values[layer] for layer in chosen])
            heads = [part.view(batch, tokens, self.kv_heads, -1).transpose(1, 2) for part in (key, value)]
            mapped.append((turned.apply(heads[0]), heads[1]))
        return mapped

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of the arithmetic."""
        return self.keys[0].weight.dtype

    @property
    def parameters(self) -> int:
        """Number of weights, biases aside, as the paper counts: 2·L_t·n_kv_t·(k·n_kv_s·d_s)·d_t."""
        return sum(affine.weight.numel() for affine in (*self.keys, *self.values))

    def to(self, device: torch.device) -> Mapper:
        """The same on another device."""

        def move(affines: list[Affine]) -> list[Affine]:
            return [Affine(affine.weight.to(device), affine.bias.to(device)) for affine in affines]

        return Mapper(self.selected, move(self.keys), move(self.values), self.kv_heads)


def flatten(part: Tensor, dtype: torch.dtype) -> Tensor:
    """`[batch, kv_heads, tokens, head_dim]` → `[batch·tokens, kv_heads·head_dim]`, the row order of all features."""
    return part.transpose(1, 2).flatten(2).flatten(0, 1).to(dtype)


def save_mapper(mapper: Mapper, manifest: dict[str, Any], directory: Path) -> None:
    """Write the artifact, whole or not at all. `manifest` gets geometry, parameters and the checksum of the weights."""
    tensors = {}
    for kind, affines in (("k", mapper.keys), ("v", mapper.values)):
        for layer, affine in enumerate(affines):
            tensors[f"{kind}.{layer}.weight"], tensors[f"{kind}.{layer}.bias"] = affine.weight.contiguous(), affine.bias
    with directory_whole(directory) as temporary:
        save_file(tensors, temporary / WEIGHTS)
        own = {
            "format": FORMAT,
            "selected_layers": mapper.selected,
            "kv_heads": mapper.kv_heads,
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
    tensors = _load_weights(directory, manifest)
    affines = {
        kind: [
            Affine(tensors[f"{kind}.{layer}.weight"], tensors[f"{kind}.{layer}.bias"])
            for layer in range(len(manifest["selected_layers"]))
        ]
        for kind in ("k", "v")
    }
    return Mapper(manifest["selected_layers"], affines["k"], affines["v"], manifest["kv_heads"]), manifest


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
