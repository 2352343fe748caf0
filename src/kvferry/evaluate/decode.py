"""Greedy decoding of a batch of prefixes, each row until it is done. Does not know prompts, systems or what an answer is for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvferry.evaluate.finite import check_finite
from kvferry.kv.handoff import Native, Prefix, closed, read, select
from kvferry.kv.prefill import Span

Done = Callable[[list[int]], bool]


def read_to_end(model: PreTrainedModel, prefix: Prefix, span: Span) -> tuple[Tensor, Prefix]:
    """The model reads a span with at least a token in each row. Returns logits `[batch, vocabulary]` after each row's last
    token, and the grown prefix. No logits are computed at tokens that end no row.
    """
    ends = span.mask.sum(1) - 1
    kept, place = ends.unique(return_inverse=True)
    logits, grown = read(model, prefix, span, logits_to_keep=kept)
    return logits[torch.arange(len(ends), device=ends.device), place], grown


def decode(model: PreTrainedModel, prefix: Prefix, logits: Tensor, done: Done, limit: int) -> list[list[int]]:
    """The likeliest token, again and again, from logits `[batch, vocabulary]` after the prefix on.

    A row ends after `limit` ≥ 1 tokens, or when `done` says so of what it wrote; then it leaves the batch. The cache of the
    prefix given grows: give a copy if it is to be used again.

    Raises:
        NotFinite: logits of a row are not finite.
    """
    own, prefix = Native(model), closed(prefix)
    written: list[list[int]] = [[] for _ in logits]
    active = list(range(len(written)))
    tokens = _likeliest(logits, prefix, active)
    while True:
        for row, token in zip(active, tokens.tolist(), strict=True):
            written[row].append(token)
        going = [place for place, row in enumerate(active) if not done(written[row])]
        if not going or len(written[active[0]]) == limit:
            return written
        if len(going) < len(active):
            kept = torch.tensor(going, device=tokens.device)
            room = limit - len(written[active[0]])
            prefix, tokens, active = select(own, prefix, kept, room), tokens[kept], [active[place] for place in going]
        step = Span(tokens[:, None], torch.ones_like(tokens[:, None]))
        logits, prefix = read(model, prefix, step)
        tokens = _likeliest(logits[:, -1], prefix, active)


def _likeliest(logits: Tensor, prefix: Prefix, active: list[int]) -> Tensor:
    """The likeliest token of each row that is active, `[active]`."""
    check_finite(logits, prefix, active)
    return logits.argmax(-1)
