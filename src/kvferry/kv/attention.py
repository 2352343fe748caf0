"""A look at attention during a forward pass: the one module that names transformers' attention API.

Inside `observed`, a model computes its causal attention here, in blocks of queries, and every layer is shown to an observer:
queries, keys, values, probabilities and outputs. `row_weights` is such an observer: it says how much an error in each cached
row would move the outputs. Whole sequences without padding only. Does not know dumps, pairs or what the weights are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvferry.errors import KvferryError

NAME = "kvferry_observed"
BLOCK = 64
NOT_UNDERSTOOD = ("softcap", "s_aux", "position_bias")

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Block:
    """Probabilities of the queries `start` to `stop` (excluded) over the keys 0 to `stop`; later keys have none.

    `probabilities [batch, kv_heads, group, stop - start, stop]`, float32: `group` query heads share a KV head.
    """

    start: int
    stop: int
    probabilities: Tensor


@dataclass(frozen=True)
class Attention:
    """One layer's attention over whole sequences, float32 whatever the model's dtype.

    query `[batch, heads, tokens, head_dim]` as used (after norm and RoPE, before `scaling`), key and value
    `[batch, kv_heads, tokens, head_dim]`, output as query; mask `[batch, 1, tokens, tokens]`, true where a key may be seen,
    or None for plain causal attention. `attend` with these gives `output` and `blocks` again.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    output: Tensor
    blocks: list[Block]


_observer: ContextVar[Callable[[Attention], None]] = ContextVar("observer")


@contextmanager
def observed(model: PreTrainedModel, observer: Callable[[Attention], Seen]) -> Iterator[dict[int, Seen]]:
    """Show each layer's attention to `observer` in every forward pass inside; the model's own setting comes back after.

    Gives a dict that holds by layer what the observer returned in the latest pass. Logits and cache are those of the
    model's own attention up to rounding: the products are the same, in float32, but summed in another order.

    Raises:
        KvferryError: a layer was not seen, or its attention is not a softmax of scaled products (see NOT_UNDERSTOOD), or it
            reads keys of earlier passes.
    """
    config = model.get_decoder().config
    seen: dict[int, Seen] = {}
    own = config._attn_implementation
    token = _observer.set(lambda attention: seen.update({attention.layer: observer(attention)}))
    config._attn_implementation = NAME
    try:
        yield seen
    finally:
        config._attn_implementation = own
        _observer.reset(token)
    layers = config.num_hidden_layers
    if len(seen) != layers:
        raise KvferryError(
            f"{model.name_or_path or type(model).__name__}: attention was seen in {len(seen)} of {layers} layers; "
            "this architecture has other layers or its own attention: it cannot be observed"
        )


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, list[Block]]:
    """Causal attention in float32: output `[batch, heads, tokens, head_dim]` and its probabilities by block of queries.

    Shapes and mask are those of `Attention`; query head h reads KV head h // group.
    """
    query, key, value = (part.float().contiguous() for part in (query, key, value))
    tokens = query.shape[2]
    query = (query * scaling).unflatten(1, (key.shape[1], -1))
    hidden = _causal(tokens, query.device) if mask is None else ~mask.unsqueeze(2)
    blocks, outputs = [], []
    for start in range(0, tokens, BLOCK):
        stop = min(start + BLOCK, tokens)
        # A block of queries skips the keys after it, which is almost half of the work.
        scores = query[..., start:stop, :].flatten(2, 3) @ key[:, :, :stop].transpose(2, 3)
        scores = scores.unflatten(2, (-1, stop - start))
        first = start if mask is None else 0
        scores[..., first:].masked_fill_(hidden[..., start:stop, first:stop], -torch.inf)
        blocks.append(Block(start, stop, scores.softmax(-1)))
        output = blocks[-1].probabilities.flatten(2, 3) @ value[:, :, :stop]
        outputs.append(output.unflatten(2, (-1, stop - start)))
    return torch.cat(outputs, dim=3).flatten(1, 2), blocks


def row_weights(attention: Attention) -> tuple[Tensor, Tensor]:
    """r_K and r_V of every cached row, float32 `[batch, kv_heads, tokens]`: an observer.

    r_V(i) = Σ_u a_ui² and r_K(i) = Σ_u a_ui² ‖v_i − o_u‖² ‖q_u‖² / head_dim (Attn-Repair, arXiv:2609.00891), over all
    queries u of the sequence and all query heads of the group: squared spectral norms of the derivatives of the outputs o_u by
    v_i and by k_i, under the usual scaling. With ‖v_i − o_u‖² = ‖v_i‖² − 2 v_i·o_u + ‖o_u‖² all sums over u are one product;
    its rounding is about 1e-6 of the largest r_K, which shows only in the smallest ones.
    """
    value = attention.value
    by_head = [part.unflatten(1, (value.shape[1], -1)) for part in (attention.query, attention.output)]
    terms = _query_terms(*by_head)
    sums = terms.new_zeros(*value.shape[:3], terms.shape[-1])
    for block in attention.blocks:
        squares = block.probabilities.square().flatten(2, 3)
        sums[:, :, : block.stop] += squares.transpose(2, 3) @ terms[..., block.start : block.stop, :].flatten(2, 3)
    cross, plain, far, value_weights = sums.split((value.shape[-1], 1, 1, 1), dim=-1)
    key_weights = value.square().sum(-1, keepdim=True) * plain - 2 * (value * cross).sum(-1, keepdim=True) + far
    # Rounding may leave a sum of squares that is next to zero a little below it.
    return key_weights.squeeze(-1).clamp_min(0), value_weights.squeeze(-1)


def _query_terms(query: Tensor, output: Tensor) -> Tensor:
    """What a query u gives to the sums, `[..., tokens, head_dim + 3]`: w·o_u, w, w·‖o_u‖² and 1, with w = ‖q_u‖² / head_dim."""
    weight = query.square().mean(-1, keepdim=True)
    far = weight * output.square().sum(-1, keepdim=True)
    return torch.cat((weight * output, weight, far, torch.ones_like(weight)), dim=-1)


def _causal(tokens: int, device: torch.device) -> Tensor:
    """True for the keys after a query, `[tokens, tokens]`."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


def _observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls under NAME: output `[batch, tokens, heads, head_dim]`."""
    _check(module, query, key, options)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output, blocks = attend(query, key, value, attention_mask, scaling)
    floats = (part.float() for part in (query, key, value))
    _observer.get()(Attention(int(module.layer_idx), *floats, attention_mask, scaling, output, blocks))
    return output.transpose(1, 2).to(query.dtype), None


def _check(module: nn.Module, query: Tensor, key: Tensor, options: dict[str, Any]) -> None:
    """Refuse attention that `attend` would get wrong."""
    for name in NOT_UNDERSTOOD:
        if options.get(name) is not None:
            raise KvferryError(
                f"{type(module).__name__}: attention with {name} is not understood; it cannot be observed"
            )
    if query.shape[2] != key.shape[2]:
        raise KvferryError(
            f"{type(module).__name__}: {query.shape[2]} queries and {key.shape[2]} keys; "
            "attention is observed over whole sequences only: start with an empty cache"
        )


AttentionInterface.register(NAME, _observed_attention)
# Masks as for sdpa: none where attention is plainly causal, else true where a key may be seen.
AttentionMaskInterface.register(NAME, sdpa_mask)
