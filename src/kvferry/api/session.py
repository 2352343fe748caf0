"""A conversation that moves between two models: each token is read by one of them, and mapped for the other once at most.

At a switch, the tokens that the other model lacks are mapped from what the first one computed, all but the last `hold_back`,
which the other reads itself. A model never gets back what it had: its cache stays, and only grows. Does not know how turns
are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvferry.api.checks import Prompt, check_count, check_positions, tokens_of
from kvferry.api.ferry import Ferry
from kvferry.api.reader import Generation, Reader
from kvferry.errors import KvferryError
from kvferry.prepare.decoder import positions_of


@dataclass(frozen=True)
class Switch:
    """What a switch took; times in milliseconds.

    to: the model that goes on. prefill_tokens, prefill_ms: what the model that hands over had not read yet, and read now.
    mapped_tokens, mapping_ms: what was brought into the other's cache, with the native head where the recipe has one. held_back:
    tokens that the other reads itself when it goes on. reprefill_ms: what reading the mapped tokens itself would have taken it,
    if that was measured.
    """

    to: str
    prefill_tokens: int
    prefill_ms: float
    mapped_tokens: int
    mapping_ms: float
    held_back: int
    reprefill_ms: float | None = None


class Session:
    """A conversation that one of two models goes on with at a time.

    Args:
        forth: the mapper from the model that begins to the other, as `kvferry.load_mapper` returns it.
        back: the mapper of the other direction between the same two models in memory; without it the conversation moves once.
        hold_back: last tokens that are not mapped at a switch; ≥ 1.

    Raises:
        KvferryError: the mappers are not for the same two models, or hold_back is less than 1.

    Example:
        >>> session = Session(mapper, back)
        >>> session.add("Q: What is a ferry?\\nA:")
        >>> said = session.generate(8).text
        >>> session.switch().to
        'smollm2-135m'
    """

    def __init__(self, forth: Ferry, back: Ferry | None = None, hold_back: int = 1) -> None:
        if back and (back.source.model is not forth.target.model or back.target.model is not forth.source.model):
            raise KvferryError(
                f"back maps {back.source.card['model']} to {back.target.card['model']}, which is not the way back from "
                f"{forth.target.card['model']} to {forth.source.card['model']} with the same two models in memory"
            )
        check_count("hold_back", hold_back)
        self.hold_back = hold_back
        self._ways = (forth, back)
        self._readers = (Reader(forth.source), Reader(forth.target))
        self._active = 0
        self._tokens: list[int] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """The conversation so far, of both models and all that was added."""
        return tuple(self._tokens)

    @property
    def model(self) -> str:
        """The name of the model whose turn it is."""
        return self._readers[self._active].loaded.card["model"]

    @property
    def room(self) -> int | float:
        """How many tokens more the model whose turn it is has positions for."""
        return positions_of(self._readers[self._active].loaded.model.config) - len(self._tokens)

    def add(self, prompt: Prompt) -> None:
        """Add a text or a row of token ids; it is read when the model goes on. A first text gets the tokenizer's special tokens.

        Raises:
            KvferryError: it is more than one row, has no tokens or unknown ones, or there are no positions for it.
        """
        new = tokens_of(prompt, self._readers[0].loaded, not self._tokens)
        check_positions(self._readers[self._active].loaded, len(self._tokens) + len(new))
        self._tokens += new

    def generate(
        self, max_new_tokens: int, *, stop: str | None = None, stream: Callable[[str], object] | None = None
    ) -> Generation:
        """The model whose turn it is reads what is new to it and goes on greedily.

        Args:
            max_new_tokens: the most; fewer come if the model ends. ≥ 1.
            stop: end also when the text holds this.
            stream: is given the text piece by piece.

        Raises:
            KvferryError: nothing was added yet, max_new_tokens is less than 1, or there are no positions for so many.
        """
        check_count("max_new_tokens", max_new_tokens)
        if not self._tokens:
            raise KvferryError("there is nothing to go on from; add a text first")
        reader = self._readers[self._active]
        check_positions(reader.loaded, len(self._tokens) + max_new_tokens)
        # each token is noted as it comes: a conversation that is interrupted can go on
        return reader.generate(self._tokens[reader.length :], max_new_tokens, stop, stream, self._tokens.append)

    def switch(self, measure: bool = False) -> Switch:
        """Hand the conversation to the other model.

        Args:
            measure: afterwards, also let the other model read the mapped tokens itself, on a copy of its cache that is thrown
                away, to tell what that would have taken.

        Returns:
            What it took.

        Raises:
            KvferryError: there is no mapper for this direction, or the other model has not so many positions.
        """
        way = self._ways[self._active]
        if way is None:
            raise KvferryError(f"there is no mapper from {self.model} back; give one to go on with the other model")
        left, other = self._readers[self._active], self._readers[1 - self._active]
        check_positions(other.loaded, len(self._tokens))
        end = max(len(self._tokens) - self.hold_back, 0)
        unread, span = self._tokens[left.length : end], self._tokens[other.length : end]
        before = other.copy() if measure else None
        prefill_ms = left.timed(lambda: left.read(unread))[1] if unread else 0.0
        mapping_ms = other.timed(lambda: _carry(way, left, other, span))[1] if span else 0.0
        self._active = 1 - self._active
        cost = Switch(self.model, len(unread), prefill_ms, len(span), mapping_ms, len(self._tokens) - other.length)
        if before is None:
            return cost
        return replace(cost, reprefill_ms=before.timed(lambda: before.read(span))[1] if span else 0.0)


def _carry(way: Ferry, left: Reader, other: Reader, tokens: Sequence[int]) -> None:
    """Bring the next tokens, which the model that is left has read, into the other's cache."""
    own, span = left.layers(other.length, other.length + len(tokens)), other.span(tokens)
    mask = torch.cat((other.prefix.mask, span.mask), dim=1)
    with other.whole():
        way.append(other.prefix.cache, own, mask, span.ids)
    other.prefix = replace(other.prefix, mask=mask, lengths=other.prefix.lengths + len(tokens))
