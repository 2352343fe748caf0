"""Prefill: what a model has read of each prompt, and a memory of it that the systems of a job share.

What was read is kept row by row and never changed: a longer prompt is a new `Text` that holds the shorter one's parts. So a
row is found again whatever stood beside it in its batch. A row's keys and values of one span are called a part: a tensor
`[layers, 2, kv_heads, tokens, head_dim]` for each run of layers that lie on one device. Does not know mapping, targets or
benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvferry.kv.cache import NO_LOGITS, LayerKV, cache_layers, forward, make_cache

Tokens = tuple[int, ...]
Part = tuple[Tensor, ...]


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

    def to(self, device: torch.device) -> Span:
        """The same on another device."""
        return Span(self.ids.to(device), self.mask.to(device))

    def rows(self) -> list[Tokens]:
        """The tokens of each row, without padding."""
        lengths = self.mask.sum(1).tolist()
        return [tuple(row[:length]) for row, length in zip(self.ids.tolist(), lengths, strict=True)]

    def positions(self, lengths: Tensor) -> Tensor:
        """Rotary positions `[batch, tokens]` of the span's tokens after `lengths [batch]` earlier ones."""
        return lengths[:, None] + (self.mask.cumsum(1) - 1).clamp(min=0)


@dataclass(frozen=True)
class Text:
    """What a model has read of one prompt: all tokens, and a part for each span of them."""

    tokens: Tokens = ()
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Key:
    """What decides a part: the model, all tokens up to the span's end, and the position where the span begins."""

    model: PreTrainedModel
    tokens: Tokens
    start: int


class Memory:
    """Parts by what decides them, of `budget` bytes at most; what does not fit is not kept, so it is read again."""

    def __init__(self, budget: int = 0) -> None:
        self.budget, self.used = budget, 0
        self._parts: dict[Key, Part] = {}

    def find(self, key: Key) -> Part | None:
        """The part, if it is kept. It must not be changed."""
        return self._parts.get(key)

    def keep(self, key: Key, part: Part) -> None:
        """Keep a part, which must be no view of something larger, if there is room."""
        size = sum(tensor.nbytes for tensor in part)
        if key not in self._parts and self.used + size <= self.budget:
            self._parts[key] = part
            self.used += size

    def clear(self) -> None:
        """Forget everything: what comes next has other prompts."""
        self._parts.clear()
        self.used = 0


@dataclass(frozen=True)
class SourcePrefill:
    """A model that reads spans, but for those that are in the memory."""

    model: PreTrainedModel
    memory: Memory = field(default_factory=Memory)

    @torch.inference_mode()
    def extend(self, texts: Sequence[Text], span: Span) -> tuple[list[LayerKV], tuple[Text, ...]]:
        """Read a span after the texts, a row each.

        Returns keys and values `[batch, kv_heads, tokens, head_dim]` of every layer for the span's slots (0 where there is
        padding), and the longer texts.
        """
        rows = span.rows()
        keys = [Key(self.model, text.tokens + row, len(text.tokens)) for text, row in zip(texts, rows, strict=True)]
        parts = {key: part for key in keys if (part := self.memory.find(key)) is not None}
        unread = {key: text for key, text, row in zip(keys, texts, rows, strict=True) if row and key not in parts}
        if unread:
            parts |= self._read(unread)
        grown = [
            Text(key.tokens, (*text.parts, parts[key])) if row else text
            for key, text, row in zip(keys, texts, rows, strict=True)
        ]
        own = [text.parts[-1] if row else None for text, row in zip(grown, rows, strict=True)]
        return _batched(own, span.ids.shape[1]), tuple(grown)

    def _read(self, unread: dict[Key, Text]) -> dict[Key, Part]:
        """The model reads the ends of these texts, in one batch; the memory keeps what it has room for."""
        lengths = torch.tensor([key.start for key in unread], device=self.model.device)
        earlier = int(lengths.max())
        span = Span.of([key.tokens[key.start :] for key in unread], self.model.device)
        cache = make_cache(_earlier(list(unread.values()), earlier), self.model, span.ids.shape[1])
        read = (torch.arange(earlier, device=lengths.device) < lengths[:, None]).long()
        forward(self.model, span.ids, cache, torch.cat((read, span.mask), dim=1), span.positions(lengths), NO_LOGITS)
        return keep_rows(self.memory, list(unread), cache_layers(cache, earlier))


def keep_rows(memory: Memory, keys: Sequence[Key], layers: list[LayerKV]) -> dict[Key, Part]:
    """Cut a span's keys and values, as `SourcePrefill.extend` returns them, into the parts of the rows; the memory keeps some."""
    runs = [list(run) for _, run in groupby(layers, key=lambda pair: pair[0].device)]
    parts = {}
    for row, key in enumerate(keys):
        tokens = len(key.tokens) - key.start
        parts[key] = tuple(_stacked(run, row, tokens) for run in runs)
        memory.keep(key, parts[key])
    return parts


def _stacked(layers: list[LayerKV], row: int, tokens: int) -> Tensor:
    """The first tokens of a row in layers of one device, `[layers, 2, kv_heads, tokens, head_dim]`."""
    flat = torch.stack([kind[row, :, :tokens] for layer in layers for kind in layer])
    return flat.unflatten(0, (len(layers), 2))


def _earlier(texts: list[Text], width: int) -> list[LayerKV]:
    """Everything that the texts hold, padded to `width` tokens; no layers where that is nothing. A text of all rows stays one."""
    if not width:
        return []
    alone = texts[:1] if all(text is texts[0] for text in texts) else texts
    layers = _batched([_whole(text.parts) if text.parts else None for text in alone], width)
    if len(alone) == len(texts):
        return layers
    return [(keys.expand(len(texts), -1, -1, -1), values.expand(len(texts), -1, -1, -1)) for keys, values in layers]


def _whole(parts: tuple[Part, ...]) -> Part:
    """The parts of one text as one."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(run, dim=3) for run in zip(*parts, strict=True))


def _batched(parts: Sequence[Part | None], width: int) -> list[LayerKV]:
    """Parts, padded with zeros to `width` tokens, as the layers of one batch; None is a row of padding."""
    like = next(part for part in parts if part is not None)
    return [
        pair
        for run in range(len(like))
        for pair in _batched_run([None if part is None else part[run] for part in parts], like[run], width)
    ]


def _batched_run(rows: Sequence[Tensor | None], like: Tensor, width: int) -> list[LayerKV]:
    """The same for the layers of one device. In memory they lie token by token, which is how a mapper wants them."""
    layers, kinds, heads, _, dim = like.shape
    batch = like.new_zeros(layers, kinds, len(rows), width, heads, dim).transpose(3, 4)
    for number, row in enumerate(rows):
        if row is not None:
            batch[:, :, number, :, : row.shape[3]] = row
    return [(layer[0], layer[1]) for layer in batch]
