"""The one module that names transformers' cache API: make, read and grow KV caches, and run a model over them.

Shapes: keys and values are `[batch, kv_heads, tokens, head_dim]`, one pair a layer. Does not know rotation, mapping, or
which tokens a cache stands for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvferry.errors import KvferryError

LayerKV = tuple[Tensor, Tensor]

GROWTH = 64
# as `logits_to_keep`: none
NO_LOGITS = torch.empty(0, dtype=torch.long)


class GrowingLayer(DynamicLayer):
    """A cache layer that appends in place into spare room, so that a decoding step does not copy the whole prefix.

    `keys` and `values` are views `[batch, kv_heads, tokens, head_dim]` of the filled part of larger buffers. `room` says how
    many tokens are to come, where that is known: then they all fit when the layer first grows, and no more does.
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None, room: int = 0) -> None:
        super().__init__()
        if keys is not None and values is not None:
            self.lazy_initialization(keys, values)
            self.keys, self.values = keys, values
        self._buffers: list[Tensor] | None = None
        self._room = room

    @torch.inference_mode()
    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> LayerKV:
        """Append `[batch, kv_heads, new, head_dim]` and return all keys and values."""
        if not self.is_initialized or self.keys.numel() == 0:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values, self._buffers = key_states, value_states, None
            if not self._room:
                return self.keys, self.values
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        filled, new = self.keys.shape[2], key_states.shape[2]
        if self._buffers is None or self._buffers[0].shape[2] < filled + new:
            room = max(new, self._room or GROWTH)
            self._buffers, self._room = [_with_room(part, room) for part in (self.keys, self.values)], 0
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, filled : filled + new] = states
        self.keys, self.values = (buffer[:, :, : filled + new] for buffer in self._buffers)
        return self.keys, self.values


def _with_room(part: Tensor, room: int) -> Tensor:
    """A buffer that starts with `part` and has room for so many more tokens."""
    batch, heads, filled, dim = part.shape
    buffer = part.new_empty(batch, heads, filled + room, dim)
    buffer[:, :, :filled] = part
    return buffer


def make_cache(layers: list[LayerKV], model: PreTrainedModel, room: int = 0) -> DynamicCache:
    """A cache that holds `layers`; an empty list gives an empty cache for `model`. room: tokens that are to come, if known."""
    cache = DynamicCache()
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    cache.layers = [GrowingLayer(*pair, room) for pair in layers] or [GrowingLayer(room=room) for _ in range(count)]
    return cache


def plain_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache of transformers' own layers, which bear whatever its `generate` does to a cache: beam search reorders the
    rows, and that would part the layers of `make_cache` from their buffers.
    """
    cache = make_cache([], model)
    cache.layers = [DynamicLayer() for _ in cache.layers]
    return cache


def filled_layers(cache: object, role: str) -> list[LayerKV]:
    """Keys and values of a cache that somebody else filled; `role` is whose messages call it.

    Raises:
        KvferryError: it is no `DynamicCache`, is empty, or has layers that do not hold every token.
    """
    if not isinstance(cache, DynamicCache):
        raise KvferryError(
            f"the {role} cache is a {type(cache).__name__}; give the DynamicCache that the {role}'s forward or generate filled"
        )
    if not cache_length(cache):
        raise KvferryError(f"the {role} cache is empty; let the {role} read the text first")
    lengths = {layer.keys.shape[2] if layer.is_initialized else 0 for layer in cache.layers}
    if len(lengths) > 1:
        raise KvferryError(
            f"the {role} cache has layers of {min(lengths)} to {max(lengths)} tokens; give one without sliding windows"
        )
    return cache_layers(cache)


def generation_inputs(ids: Tensor, mask: Tensor, cache: DynamicCache | None = None) -> dict[str, Any]:
    """What `model.generate` takes to go on from a cache of the first tokens: ids and mask `[batch, tokens]` are of all tokens."""
    return {"input_ids": ids, "attention_mask": mask} | ({"cache": cache} if cache is not None else {})


def cache_layers(cache: DynamicCache, start: int = 0) -> list[LayerKV]:
    """Keys and values of every layer, from token `start` on. Views, not copies."""
    return [(layer.keys[:, :, start:], layer.values[:, :, start:]) for layer in cache.layers]


def cache_length(cache: DynamicCache) -> int:
    """Number of token slots in the cache."""
    return cache.get_seq_length()


def layer_devices(model: PreTrainedModel) -> list[torch.device]:
    """Where the keys and values of each decoder layer belong: on the device of the layer's weights.

    A model that is spread over devices has its embedding, its last norm and its head on `model.device`; that is where token ids,
    masks, positions and logits are, whichever device a layer is on.
    """
    return [next(layer.parameters()).device for layer in model.get_decoder().layers]


def devices_of(*models: PreTrainedModel) -> list[torch.device]:
    """Every device that some of the models is on, each once."""
    return list(dict.fromkeys(device for model in models for device in (model.device, *layer_devices(model))))


def append_layers(cache: DynamicCache, layers: list[LayerKV]) -> None:
    """Append `[batch, kv_heads, new, head_dim]` keys and values to every layer."""
    for layer, (keys, values) in zip(cache.layers, layers, strict=True):
        layer.update(keys, values)


def cut_layers(cache: DynamicCache, length: int) -> None:
    """Drop what layers hold after their first `length` tokens: a pass that was interrupted has reached some of them only."""
    for layer in cache.layers:
        if layer.is_initialized and layer.keys.shape[2] > length:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]


def select_rows(cache: DynamicCache, rows: Tensor, model: PreTrainedModel, room: int = 0) -> DynamicCache:
    """A new cache whose batch rows are `rows` (int64 `[new_batch]`) of this one; a row may repeat.

    A lone row is not copied until the new cache grows, and then once, with room for the tokens that are to come.
    """
    if cache_length(cache) == 0:
        return make_cache([], model, room)
    return make_cache([(_rows(keys, rows), _rows(values, rows)) for keys, values in cache_layers(cache)], model, room)


def _rows(part: Tensor, rows: Tensor) -> Tensor:
    return part.expand(len(rows), -1, -1, -1) if part.shape[0] == 1 else part[rows.to(part.device)]


@torch.inference_mode()
def forward(
    model: PreTrainedModel,
    ids: Tensor,
    cache: DynamicCache,
    mask: Tensor,
    positions: Tensor,
    logits_to_keep: int | Tensor = 1,
) -> Tensor:
    """Run `model` over `ids [batch, new]` on top of `cache`, which grows by `new`.

    `mask [batch, cached + new]` is 1 for slots that may be attended to; `positions [batch, new]` are rotary positions.
    Returns logits `[batch, kept, vocabulary]` of the last `logits_to_keep` tokens (0: all) or of the places that integers name
    (`[kept]`, or for each row `[batch, kept]`), or `[kept, vocabulary]` of those where a mask `[batch, new]` is true.

    Raises:
        KvferryError: the cache did not grow (an argument that this version of transformers ignores).
    """
    before = cache_length(cache)
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        cache=cache,
        use_cache=True,
        logits_to_keep=logits_to_keep,
    )
    if cache_length(cache) != before + ids.shape[1]:
        raise KvferryError(
            "the model did not fill its KV cache: install the transformers version that envs/constraints.txt pins"
        )
    return output.logits
