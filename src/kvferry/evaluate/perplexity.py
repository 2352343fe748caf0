"""Prefix perplexity: each chunk's second part scored given a prefix cache of its first, own or mapped (the paper, Table 13).

All but the last prefix tokens come through the system, as in the hand-off; the target reads those and the scored tokens.
Does not know corpora or files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.files import fingerprint
from kvferry.kv.handoff import Span, System, read
from kvferry.progress import bar
from kvferry.records import Item

BATCH = 4


@torch.inference_mode()
def prefix_nll(system: System, chunks: Tensor, prefix: int, hold_back: int) -> list[Item]:
    """One item a chunk of `chunks [count, prefix + scored]`: mean nats a scored token, weighted by the number of those.

    Its id holds the chunk's number and a hash of its tokens, so that other texts are never taken for the same item.
    """
    items: list[Item] = []
    scored = chunks.shape[1] - prefix
    with bar(len(chunks), "perplexity", "chunk") as progress:
        for batch in chunks.split(BATCH):
            values = _batch_nll(system, batch.to(system.target.device), prefix, hold_back).tolist()
            for ids, nll in zip(batch.tolist(), values, strict=True):
                items.append(Item(f"chunk-{len(items)}-{fingerprint(ids)[:8]}", nll, float(scored)))
            progress.update(len(batch))
    return items


def _batch_nll(system: System, ids: Tensor, prefix: int, hold_back: int) -> Tensor:
    """Mean nats a scored token `[batch]`."""
    cut = max(prefix - hold_back, 0)
    everything = torch.ones_like(ids)
    given = system.start(len(ids))
    if cut:
        given = system.extend(given, Span(ids[:, :cut], everything[:, :cut]))
    logits, _ = read(system.target, given, Span(ids[:, cut:-1], everything[:, cut:-1]))
    scores = logits[:, prefix - cut - 1 :].float().log_softmax(-1)
    return -scores.gather(-1, ids[:, prefix:, None]).squeeze(-1).mean(1)
