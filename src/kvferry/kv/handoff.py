"""The hand-off: one model prefills, the mapper ferries, another reads on. And the same steps for a model on its own.

A *system* is what answers: `Native` or `Handoff`. Both turn token spans into a `Prefix`, the target's cache for the prompts
of a batch; `read` then lets the target read more tokens on top. Spans are right-padded; a mask marks the slots that hold
tokens, so rows of any length share a batch. Mapping is token-wise: a span is prefilled and mapped once, never again.
Does not know benchmarks, tokenizers or how a mapper was fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvferry.kv.cache import LayerKV, append_layers, cache_layers, cache_length, forward, make_cache, select_rows
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
    lengths `[batch]`: tokens so far, the position of the next one. source: the source's own cache and mask, if there is one.
    """

    cache: DynamicCache
    mask: Tensor
    lengths: Tensor
    source: tuple[DynamicCache, Tensor] | None = None


@dataclass(frozen=True)
class Span:
    """New tokens of each row, right-padded: ids and mask `[batch, tokens]`."""

    ids: Tensor
    mask: Tensor

    @staticmethod
    def of(rows: Sequence[Sequence[int]], device: torch.device) -> Span:
        """Pad token lists to one length; the padding token is 0 and masked."""
        width = max(map(len, rows))
        ids = [[*row, *[0] * (width - len(row))] for row in rows]
        mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        return Span(torch.tensor(ids, device=device).long(), torch.tensor(mask, device=device).long())

    def positions(self, lengths: Tensor) -> Tensor:
        """Rotary positions `[batch, tokens]` of the span's tokens after `lengths [batch]` earlier ones."""
        return lengths[:, None] + (self.mask.cumsum(1) - 1).clamp(min=0)


class System(Protocol):
    """What answers: it makes a prefix in the target's cache; the target reads on."""

    target: PreTrainedModel

    def start(self, batch: int) -> Prefix:
        """An empty prefix for `batch` prompts."""
        ...

    def extend(self, prefix: Prefix, span: Span) -> Prefix:
        """Take the span into the prefix. The prefix given must not be used again."""
        ...


def empty_prefix(model: PreTrainedModel, batch: int) -> Prefix:
    """A prefix of no tokens."""
    nothing = torch.zeros(batch, 0, dtype=torch.long, device=model.device)
    return Prefix(make_cache([], model), nothing, torch.zeros(batch, dtype=torch.long, device=model.device))


def select(system: System, prefix: Prefix, rows: Tensor) -> Prefix:
    """A prefix whose batch rows are `rows` of this one; rows may repeat (one context, several continuations)."""
    source = prefix.source
    if source is not None:
        source = (select_rows(source[0], rows, system.source), source[1][rows])  # type: ignore[attr-defined]
    return Prefix(select_rows(prefix.cache, rows, system.target), prefix.mask[rows], prefix.lengths[rows], source)


def read(model: PreTrainedModel, prefix: Prefix, span: Span, logits_to_keep: int = 0) -> tuple[Tensor, Prefix]:
    """The target reads a span itself. Returns logits `[batch, kept, vocabulary]` and the grown prefix."""
    mask = torch.cat((prefix.mask, span.mask), dim=1)
    logits = forward(model, span.ids, prefix.cache, mask, span.positions(prefix.lengths), logits_to_keep)
    return logits, replace(prefix, mask=mask, lengths=prefix.lengths + span.mask.sum(1))


@dataclass(frozen=True)
class Native:
    """A model on its own."""

    target: PreTrainedModel

    def start(self, batch: int) -> Prefix:
        """An empty prefix for `batch` prompts."""
        return empty_prefix(self.target, batch)

    def extend(self, prefix: Prefix, span: Span) -> Prefix:
        """The model reads the span."""
        return read(self.target, prefix, span, logits_to_keep=1)[1]


@dataclass(frozen=True)
class Handoff:
    """The source prefills, the mapper ferries; the target itself computes only its first `native_head` tokens."""

    source: PreTrainedModel
    target: PreTrainedModel
    mapper: Translator
    native_head: int = 0

    def start(self, batch: int) -> Prefix:
        """An empty prefix for `batch` prompts."""
        own = empty_prefix(self.source, batch)
        return replace(empty_prefix(self.target, batch), source=(own.cache, own.mask))

    @torch.inference_mode()
    def extend(self, prefix: Prefix, span: Span) -> Prefix:
        """Source prefill of the span, mapping of the span, and the native head where the span reaches into it."""
        assert prefix.source is not None
        positions = span.positions(prefix.lengths)
        own, source = self._prefill(prefix.source, span, positions)
        layers = self.mapper.translate(own, rotation(self.source, positions), rotation(self.target, positions))
        layers = [(keys.to(self.target.dtype), values.to(self.target.dtype)) for keys, values in layers]
        native = span.mask * (positions < self.native_head)
        grown = self._read_head(prefix, span, native) if native.any() else prefix
        append_layers(grown.cache, layers)
        mask = torch.cat((grown.mask, span.mask - native), dim=1)
        return Prefix(grown.cache, mask, prefix.lengths + span.mask.sum(1), source)

    def _prefill(
        self, source: tuple[DynamicCache, Tensor], span: Span, positions: Tensor
    ) -> tuple[list[LayerKV], tuple[DynamicCache, Tensor]]:
        """The source reads the span. Returns its keys and values for the span's slots, and its grown cache and mask."""
        cache, mask = source[0], torch.cat((source[1], span.mask), dim=1)
        before = cache_length(cache)
        forward(self.source, span.ids, cache, mask, positions)
        return cache_layers(cache, before), (cache, mask)

    def _read_head(self, prefix: Prefix, span: Span, native: Tensor) -> Prefix:
        """The target reads the tokens marked in `native [batch, tokens]`, which are the first of each row."""
        width = int(native.sum(1).max())
        return read(self.target, prefix, Span(span.ids[:, :width], native[:, :width]), logits_to_keep=1)[1]
