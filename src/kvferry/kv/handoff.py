"""The hand-off: one model prefills, the mapper ferries, another reads on. And the same steps for a model on its own.

A *system* is what answers: `Native` or `Handoff`. Both turn token spans into a `Prefix`, the target's cache for the prompts
of a batch; `read` then lets the target read more tokens on top. Spans are right-padded; a mask marks the slots that hold
tokens, so rows of any length share a batch. Mapping is token-wise: a span is prefilled and mapped once, never again; systems
that are given one memory do not even prefill it again for another mapper.
Does not know benchmarks, tokenizers or how a mapper was fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvferry.kv.cache import (
    NO_LOGITS,
    LayerKV,
    append_layers,
    cache_layers,
    cache_length,
    forward,
    layer_devices,
    make_cache,
    select_rows,
)
from kvferry.kv.prefill import Key, Memory, SourcePrefill, Span, Text, keep_rows
from kvferry.kv.rope import Rotation, rotation


class Translator(Protocol):
    """What carries a span of the source's cache to the target's."""

    def translate(self, layers: list[LayerKV], source: Rotation, target: Rotation) -> list[LayerKV]:
        """Map keys and values `[batch, kv_heads, tokens, head_dim]` of every source layer to those of every target layer."""
        ...


@dataclass(frozen=True)
class Prefix:
    """Prompts so far, one a batch row.

    cache: the target's, `slots` long. mask `[batch, slots]`: 1 where a slot holds a token that may be read.
    lengths `[batch]`: tokens so far, the position of the next one. texts: what was prefilled of each row, which the next span
    goes on from; none if only `read` comes now.
    """

    cache: DynamicCache
    mask: Tensor
    lengths: Tensor
    texts: tuple[Text, ...] = ()


class System(Protocol):
    """What answers: it makes a prefix in the target's cache; the target reads on."""

    target: PreTrainedModel

    def start(self, batch: int) -> Prefix:
        """An empty prefix for `batch` prompts."""
        ...

    def extend(self, prefix: Prefix, span: Span) -> Prefix:
        """Take the span into the prefix. The prefix given must not be used again, and must be of prefilled tokens only."""
        ...


def empty_prefix(model: PreTrainedModel, batch: int) -> Prefix:
    """A prefix of no tokens."""
    nothing = torch.zeros(batch, 0, dtype=torch.long, device=model.device)
    lengths = torch.zeros(batch, dtype=torch.long, device=model.device)
    return Prefix(make_cache([], model), nothing, lengths, (Text(),) * batch)


def closed(prefix: Prefix) -> Prefix:
    """The same prefix for `read` only: what the source holds of it is let go."""
    return replace(prefix, texts=())


def select(system: System, prefix: Prefix, rows: Tensor, room: int = 0) -> Prefix:
    """A prefix whose batch rows are `rows` of this one; rows may repeat (one context, several continuations).

    rows: int64 `[new_batch]`. room: tokens that it will still grow by, if known, so that its cache is copied once.
    """
    texts = tuple(prefix.texts[row] for row in rows.tolist()) if prefix.texts else ()
    return Prefix(select_rows(prefix.cache, rows, system.target, room), prefix.mask[rows], prefix.lengths[rows], texts)


def read(model: PreTrainedModel, prefix: Prefix, span: Span, logits_to_keep: int | Tensor = 0) -> tuple[Tensor, Prefix]:
    """The target reads a span itself. Returns logits `[batch, kept, vocabulary]`, as `forward` does, and the grown prefix."""
    mask = torch.cat((prefix.mask, span.mask), dim=1)
    logits = forward(model, span.ids, prefix.cache, mask, span.positions(prefix.lengths), logits_to_keep)
    return logits, replace(prefix, mask=mask, lengths=prefix.lengths + span.mask.sum(1))


def as_cached(layers: list[LayerKV], model: PreTrainedModel) -> list[LayerKV]:
    """Keys and values of every layer in the dtype of the model's cache, and on the device where the layer's belong."""
    return [
        (keys.to(device, model.dtype), values.to(device, model.dtype))
        for (keys, values), device in zip(layers, layer_devices(model), strict=True)
    ]


@dataclass(frozen=True)
class Native:
    """A model on its own. It takes nothing from its memory, but what it prefills is kept there for others."""

    target: PreTrainedModel
    memory: Memory = field(default_factory=Memory)

    def start(self, batch: int) -> Prefix:
        """An empty prefix for `batch` prompts."""
        return empty_prefix(self.target, batch)

    def extend(self, prefix: Prefix, span: Span) -> Prefix:
        """The model reads the span."""
        before = cache_length(prefix.cache)
        grown = read(self.target, prefix, span, NO_LOGITS)[1]
        if not self.memory.budget:
            return grown
        pairs = list(zip(prefix.texts, span.rows(), strict=True))
        keys = [Key(self.target, text.tokens + row, len(text.tokens)) for text, row in pairs]
        keep_rows(self.memory, keys, cache_layers(grown.cache, before))
        return replace(grown, texts=tuple(Text(key.tokens) for key in keys))


@dataclass(frozen=True)
class Handoff:
    """The source prefills, the mapper ferries; the target itself computes only its first `native_head` tokens."""

    source: PreTrainedModel
    target: PreTrainedModel
    mapper: Translator
    native_head: int = 0
    memory: Memory = field(default_factory=Memory)

    def start(self, batch: int) -> Prefix:
        """An empty prefix for `batch` prompts."""
        return empty_prefix(self.target, batch)

    @torch.inference_mode()
    def extend(self, prefix: Prefix, span: Span) -> Prefix:
        """Source prefill of the span, then as `ferry`."""
        assert [len(text.tokens) for text in prefix.texts] == prefix.lengths.tolist(), (
            "closed, or read on by the target"
        )
        own, texts = SourcePrefill(self.source, self.memory).extend(prefix.texts, span)
        return replace(self.ferry(prefix, span, own), texts=texts)

    @torch.inference_mode()
    def ferry(self, prefix: Prefix, span: Span, own: list[LayerKV]) -> Prefix:
        """Map a span that the source has read, and the native head where the span reaches into it. The result is closed.

        own: the source's keys and values `[batch, kv_heads, tokens, head_dim]` of every layer for the span's slots, which may
        be on other devices than the target's, as the span may.
        """
        span = span.to(prefix.mask.device)
        positions = span.positions(prefix.lengths)
        layers = self.mapped(own, positions)
        native = span.mask * (positions < self.native_head)
        grown = self._read_head(prefix, span, native) if native.any() else prefix
        append_layers(grown.cache, layers)
        mask = torch.cat((grown.mask, span.mask - native), dim=1)
        return Prefix(grown.cache, mask, prefix.lengths + span.mask.sum(1))

    def mapped(self, own: list[LayerKV], positions: Tensor) -> list[LayerKV]:
        """What the mapper makes of the source's keys and values `[batch, kv_heads, tokens, head_dim]` of every layer at rotary
        positions `[batch, tokens]`: those of every target layer, as its cache holds them.
        """
        layers = self.mapper.translate(own, rotation(self.source, positions), rotation(self.target, positions))
        return as_cached(layers, self.target)

    def _read_head(self, prefix: Prefix, span: Span, native: Tensor) -> Prefix:
        """The target reads the tokens marked in `native [batch, tokens]`, which are the first of each row."""
        width = int(native.sum(1).max())
        return read(self.target, prefix, Span(span.ids[:, :width], native[:, :width]), NO_LOGITS)[1]
