"""Rotary position embedding: take it off keys and put it back, with the cos and sin of the model's own rotary module.

Keys without rotation live in *content space*. Handles default, llama3 and YaRN types (YaRN scales cos and sin by an
attention factor, so undoing divides by its square) and partial rotary. Knows the half-split layout only; a self-check at
load refuses any other. Does not know mappers or caches on disk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvferry.errors import KvferryError
from kvferry.kv.cache import cache_layers, forward, make_cache
from kvferry.prepare.architecture import ROPE_TYPES

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
PROBE_TOKENS = 16


@dataclass(frozen=True)
class Rotation:
    """cos and sin of given positions, float32 `[..., tokens, rotary_dim]`, attention factor included.

    They follow the keys: `apply` and `strip` copy them to the keys' device where that is another one.
    """

    cos: Tensor
    sin: Tensor

    def apply(self, keys: Tensor) -> Tensor:
        """Rotate keys `[..., tokens, head_dim]`: k·cos + (−k₂, k₁)·sin on the first rotary_dim coordinates.

        k₁ and k₂ are the two halves of those; computed in float32. The result is contiguous.
        """
        whole, width = keys.float(), self.cos.shape[-1]
        cos, sin = self.cos.to(keys.device), self.sin.to(keys.device)
        half, out = width // 2, torch.empty_like(whole, memory_format=torch.contiguous_format)
        torch.mul(whole[..., :width], cos, out=out[..., :width])
        out[..., :half].addcmul_(whole[..., half:width], sin[..., :half], value=-1)
        out[..., half:width].addcmul_(whole[..., :half], sin[..., half:])
        out[..., width:] = whole[..., width:]
        return out.to(keys.dtype)

    def strip(self, keys: Tensor) -> Tensor:
        """The inverse of `apply`: keys `[..., tokens, head_dim]` without the rotation."""
        return self.inverse().apply(keys)

    def inverse(self) -> Rotation:
        """The rotation back: cos and −sin, both divided by cos² + sin²."""
        norm = self.cos.square() + self.sin.square()
        return Rotation(self.cos / norm, -self.sin / norm)

    def for_rows(self) -> Rotation:
        """The same for keys `[batch, tokens, kv_heads, head_dim]`, from cos and sin `[batch, tokens, rotary_dim]`."""
        return Rotation(self.cos.unsqueeze(2), self.sin.unsqueeze(2))

    def for_heads(self) -> Rotation:
        """The same for keys `[batch, kv_heads, tokens, head_dim]`, from cos and sin `[batch, tokens, rotary_dim]`."""
        return Rotation(self.cos.unsqueeze(1), self.sin.unsqueeze(1))


def rotary_module(model: PreTrainedModel) -> nn.Module:
    """The decoder's rotary module.

    Raises:
        KvferryError: the decoder has none, has one a layer type, or one whose angles change with the length of the text.
    """
    module = getattr(model.get_decoder(), "rotary_emb", None)
    kind = getattr(module, "rope_type", None)
    if module is None or not hasattr(module, "inv_freq") or kind not in ROPE_TYPES:
        raise KvferryError(
            f"{model.name_or_path or type(model).__name__}: "
            f"no single rotary module of a known type in {type(model).__name__} (found {kind}); "
            f"only models with one RoPE for all layers transfer, of type {', '.join(ROPE_TYPES)}"
        )
    return module


def rotation(model: PreTrainedModel, positions: Tensor) -> Rotation:
    """cos and sin of `positions [batch, tokens]` from the model's rotary module, in float32."""
    like = torch.empty(0, dtype=torch.float32, device=positions.device)
    cos, sin = rotary_module(model)(like, positions)
    return Rotation(cos, sin)


def check_rotation(model: PreTrainedModel) -> None:
    """Compare stripped cached keys with the keys before rotation (output of k_norm, or of k_proj) on a few tokens.

    Raises:
        KvferryError: a layer's keys do not come back, so the rotary layout is not understood.
    """
    before, cached = _keys_before_and_cached(model)
    positions = torch.arange(PROBE_TOKENS, device=model.device)[None]
    turned = rotation(model, positions).for_heads()
    for layer, (plain, keys) in enumerate(zip(before, cached, strict=True)):
        if not keys.isfinite().all():
            continue  # not a matter of rotation: a dump refuses such keys and names the sequence
        error = (turned.strip(keys.float()) - plain.float()).abs().max() / plain.float().abs().max()
        if not error <= TOLERANCE[keys.dtype]:
            raise KvferryError(
                f"{model.name_or_path or type(model).__name__}: the rotary layout of {type(model).__name__} is not understood "
                f"(layer {layer}: stripped keys differ from the keys before rotation by {float(error):.1e} relative); "
                "this model cannot be used"
            )


def _keys_before_and_cached(model: PreTrainedModel) -> tuple[list[Tensor], list[Tensor]]:
    """Keys before rotation and keys in the cache, one `[1, kv_heads, tokens, head_dim]` a layer."""
    outputs: list[Tensor] = []
    hooks = [
        key_module(layer).register_forward_hook(lambda _m, _i, out: outputs.append(out))
        for layer in model.get_decoder().layers
    ]
    ids = torch.arange(PROBE_TOKENS, device=model.device)[None] % model.get_input_embeddings().num_embeddings
    cache = make_cache([], model)
    try:
        forward(model, ids, cache, torch.ones_like(ids), torch.arange(PROBE_TOKENS, device=model.device)[None])
    finally:
        for hook in hooks:
            hook.remove()
    cached = [keys for keys, _ in cache_layers(cache)]
    return [_as_heads(out, keys.shape) for out, keys in zip(outputs, cached, strict=True)], cached


def key_module(layer: nn.Module) -> nn.Module:
    """The module whose output is a decoder layer's keys before rotation: k_norm if it has one, else k_proj.

    Raises:
        KvferryError: the layer has neither.
    """
    attention = getattr(layer, "self_attn", None)
    for name in ("k_norm", "k_proj"):
        if isinstance(getattr(attention, name, None), nn.Module):
            return getattr(attention, name)
    raise KvferryError(f"{type(layer).__name__}: attention without k_proj; this architecture is not understood")


def _as_heads(out: Tensor, shape: torch.Size) -> Tensor:
    """Bring `[1, tokens, kv_heads·head_dim]`, `[1, tokens, kv_heads, head_dim]` or cache order to the cache's `shape`."""
    if out.shape == shape and shape[1] != shape[2]:
        return out
    batch, heads, tokens, dim = shape
    return out.reshape(batch, tokens, heads, dim).transpose(1, 2)
