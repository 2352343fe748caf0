"""One model and its cache of a text: it reads tokens, goes on from them greedily, and says how long that took.

One slot of the cache a token, one text. Does not know mappers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvferry.evaluate.clock import milliseconds
from kvferry.kv.cache import NO_LOGITS, LayerKV, cache_layers, cut_layers
from kvferry.kv.handoff import Native, Prefix, closed, empty_prefix, read, select
from kvferry.kv.prefill import Span
from kvferry.prepare.models import Loaded

T = TypeVar("T")
# what decoding gives for bytes that are not yet a whole character
UNFINISHED = "\ufffd"


@dataclass(frozen=True)
class Generation:
    """What a model wrote, and how long it took.

    tokens: with the end token, if it came to that. text: without special tokens. read_tokens, read_ms: what the model read just
    before (of a hand-off: the held-back tokens), milliseconds. token_ms: of each further forward pass, one a token after
    the first.
    """

    tokens: tuple[int, ...]
    text: str
    read_tokens: int
    read_ms: float
    token_ms: tuple[float, ...]


class Reader:
    """A model that reads one text from its beginning on."""

    def __init__(self, loaded: Loaded, prefix: Prefix | None = None) -> None:
        self.loaded = loaded
        self.prefix = prefix or closed(empty_prefix(loaded.model, 1))

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.prefix.mask.shape[1]

    def layers(self, start: int, end: int) -> list[LayerKV]:
        """Keys and values `[1, kv_heads, end - start, head_dim]` of every layer."""
        until = slice(end - start)
        return [(keys[:, :, until], values[:, :, until]) for keys, values in cache_layers(self.prefix.cache, start)]

    def copy(self) -> Reader:
        """The same in a cache that grows on its own."""
        row = torch.zeros(1, dtype=torch.long, device=self.loaded.model.device)
        return Reader(self.loaded, select(Native(self.loaded.model), self.prefix, row))

    def read(self, tokens: Sequence[int], logits_to_keep: int | Tensor = NO_LOGITS) -> Tensor:
        """Read tokens; logits `[1, kept, vocabulary]`."""
        with self.whole():
            logits, self.prefix = read(self.loaded.model, self.prefix, self.span(tokens), logits_to_keep)
        return logits

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What is interrupted in here leaves the cache as it was."""
        try:
            yield
        except BaseException:
            cut_layers(self.prefix.cache, self.length)
            raise

    def span(self, tokens: Sequence[int]) -> Span:
        """The tokens as a batch of one row."""
        return Span.of([tokens], self.loaded.model.device)

    def generate(
        self,
        tokens: Sequence[int],
        limit: int,
        stop: str | None = None,
        stream: Callable[[str], object] | None = None,
        note: Callable[[int], object] | None = None,
    ) -> Generation:
        """Read ≥ 1 tokens and write the likeliest ones, to an end token, to `stop`, or `limit`. The last one is not read.

        stream is given the text, and note each token, as they come.
        """
        logits, read_ms = self.timed(lambda: self.read(tokens, 1))
        ends, text = end_tokens(self.loaded), Text(self.loaded.tokenizer, stream)
        written: list[int] = []
        token_ms: list[float] = []
        while True:
            written.append(int(logits[0, -1].argmax()))
            if note:
                note(written[-1])
            text.show(written)
            if written[-1] in ends or len(written) >= limit or (stop and stop in text.whole):
                text.end()
                return Generation(tuple(written), text.whole, len(tokens), read_ms, tuple(token_ms))
            logits, step = self.timed(lambda: self.read(written[-1:], 1))
            token_ms.append(step)

    def timed(self, call: Callable[[], T]) -> tuple[T, float]:
        """What a call returns, and its milliseconds on the model's device."""
        found: list[T] = []
        taken = milliseconds(lambda: found.append(call()), [self.loaded.model.device])
        return found[0], taken


class Text:
    """The text of tokens as they come; what is new of it goes to `stream`, whole characters at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stream: Callable[[str], object] | None) -> None:
        self.tokenizer, self.stream = tokenizer, stream
        self.whole, self.shown = "", 0

    def show(self, tokens: Sequence[int]) -> None:
        """All tokens so far."""
        self.whole = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if not self.whole.endswith(UNFINISHED):
            self.end()

    def end(self) -> None:
        """Nothing more comes."""
        new, self.shown = self.whole[self.shown :], len(self.whole)
        if self.stream and new:
            self.stream(new)


def end_tokens(loaded: Loaded) -> frozenset[int]:
    """The tokens that end what a model writes, by its tokenizer and its generation config."""
    configured = getattr(loaded.model.generation_config, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (loaded.tokenizer.eos_token_id, *several) if token is not None)
