"""Sequences of text: documents split by their id, packed to a length, drawn with a seed.

A document is on one side (fit, held out, perplexity) whatever the seed and the numbers drawn; and the first 50 of 500
sequences are the 50 that are drawn alone. Does not know models beyond their tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvferry.errors import KvferryError
from kvferry.prepare.corpora import Document

Side = Literal["fit", "held_out", "perplexity", "all"]
HELD_OUT_SHARE = 5


@dataclass(frozen=True)
class Draw:
    """What to draw: `count` sequences of `length` tokens from one side, with a seed."""

    side: Side
    count: int
    length: int
    seed: int


def side_of(document: Document) -> Side:
    """One document in five, by a hash of its id, is not fitted on: half of these are for the held-out R², half for perplexity."""
    first, second, *_ = hashlib.sha256(document.id.encode()).digest()
    if first % HELD_OUT_SHARE:
        return "fit"
    return "held_out" if second % 2 else "perplexity"


def draw_sequences(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, draw: Draw, corpus: str
) -> Tensor:
    """Token ids `[count, length]`: the side's documents, ended by the end token each, are joined, cut, and drawn from.

    Raises:
        KvferryError: the side holds fewer sequences than asked for.
    """
    chosen = [document.text for document in documents if draw.side in (side_of(document), "all")]
    packed = pack(chosen, tokenizer, draw.length)
    if draw.count > len(packed):
        raise KvferryError(
            f"corpus {corpus}: its {draw.side} documents hold {len(packed)} sequences of {draw.length} tokens, "
            f"{draw.count} are asked for; ask for fewer or shorter ones, or take a larger corpus"
        )
    order = np.random.default_rng(draw.seed).permutation(len(packed))[: draw.count]
    return packed[torch.from_numpy(order)]


def pack(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int) -> Tensor:
    """Join the tokens of all texts, an end token after each, and cut into `[sequences, length]`; the rest is dropped."""
    end = tokenizer.eos_token_id
    stream = (
        [token for ids in tokenizer(list(texts), verbose=False)["input_ids"] for token in [*ids, end]] if texts else []
    )
    count = len(stream) // length
    return torch.tensor(stream[: count * length], dtype=torch.long).view(count, length)
