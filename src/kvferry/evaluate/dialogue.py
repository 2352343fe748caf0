"""Conversations of several turns, answered by one model or by two that hand their caches to each other.

A prompt is the story and turns `Q: …\\nA: …`, in completion mode. Its tokens are decided once: they come in spans, one a turn,
each encoded on its own; a span ends where the model has to answer. The history is the gold answers: what a model answers
is thrown away with the copy of the cache that it was written on, and the next span brings the gold answer. So all systems
read the same tokens, and each token is prefilled once, mapped once, and never mapped again.

`answers`: every turn is answered by the system's target (protocol `handoff`, or a model on its own).
`alternate`: turns are answered by source and target in turn, the source first; caches go both ways.
Does not know mappers, data sets or scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvferry.evaluate.conversations import Conversation
from kvferry.evaluate.decode import decode, read_to_end
from kvferry.kv.cache import LayerKV, cache_layers, cache_length
from kvferry.kv.handoff import Handoff, Native, Prefix, System, closed, empty_prefix, select
from kvferry.kv.prefill import Span, Tokens

OPENING, QUESTION, ANSWER = "{story}\n\n", "Q: {question}\nA:", " {answer}\n"
FORMAT = OPENING + QUESTION + ANSWER

Answers = list[tuple[str, ...]]


@dataclass(frozen=True)
class Dialogue:
    """A conversation as tokens. spans: one a turn; the prompt of a turn is all spans up to its own."""

    id: str
    spans: tuple[Tokens, ...]

    @property
    def tokens(self) -> Tokens:
        """The prompt of the last turn."""
        return tuple(token for span in self.spans for token in span)

    def cut(self, hold_back: int) -> list[tuple[Tokens, Tokens]]:
        """For each turn the tokens that come new to the system, and the last `hold_back` of the prompt, for the target to read.

        The tokens that a turn holds back come to the system at the next one.
        """
        whole, ends = self.tokens, list(accumulate(map(len, self.spans)))
        cuts = [0, *(max(end - hold_back, 0) for end in ends)]
        return [(whole[before:cut], whole[cut:end]) for before, cut, end in zip(cuts[:-1], cuts[1:], ends, strict=True)]


def make_dialogue(conversation: Conversation, turns: int, tokenizer: PreTrainedTokenizerBase) -> Dialogue:
    """The first turns of a conversation as spans; the first has the tokenizer's special tokens, as lm-eval's prompts have."""
    questions = [QUESTION.format(question=_line(turn.question)) for turn in conversation.turns[:turns]]
    gold = [ANSWER.format(answer=_line(turn.answers[0])) for turn in conversation.turns[: turns - 1]]
    first = tokenizer(OPENING.format(story=conversation.story.strip()) + questions[0])["input_ids"]
    later = [
        tokenizer(answer + question, add_special_tokens=False)["input_ids"]
        for answer, question in zip(gold, questions[1:], strict=True)
    ]
    return Dialogue(conversation.id, tuple(map(tuple, (first, *later))))


def _line(text: str) -> str:
    """The text on one line: a newline ends an answer."""
    return " ".join(text.split())


@dataclass(frozen=True)
class Voice:
    """How answers are written: greedily, to the newline or the end token, `limit` ≥ 1 tokens at most."""

    tokenizer: PreTrainedTokenizerBase
    limit: int

    def say(self, model: PreTrainedModel, prefix: Prefix, logits: Tensor) -> list[str]:
        """The answers after a prefix, from logits `[batch, vocabulary]` after it. The prefix given grows."""
        written = decode(model, prefix, logits, self._done, self.limit)
        texts = [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in written]
        return [text.split("\n")[0].strip() for text in texts]

    def _done(self, tokens: list[int]) -> bool:
        return tokens[-1] == self.tokenizer.eos_token_id or "\n" in self.tokenizer.decode(tokens[-1:])


def answers(system: System, dialogues: Sequence[Dialogue], hold_back: int, voice: Voice) -> Answers:
    """Answers of each dialogue's turns, all given by the system's target; dialogues have equally many turns.

    hold_back ≥ 1: last tokens of each prompt that the target reads itself, on the copy that is thrown away.
    """
    given = system.start(len(dialogues))
    said = []
    for parts in zip(*(dialogue.cut(hold_back) for dialogue in dialogues), strict=True):
        new, held = ([part[which] for part in parts] for which in (0, 1))
        if any(new):
            given = system.extend(given, Span.of(new, system.target.device))
        copy = _copy(system.target, given)
        logits, copy = read_to_end(system.target, copy, Span.of(held, system.target.device))
        said.append(voice.say(system.target, copy, logits))
    return list(zip(*said, strict=True))


def _copy(model: PreTrainedModel, prefix: Prefix) -> Prefix:
    """The same prefix in a cache of its own, for `read` only."""
    return select(Native(model), closed(prefix), torch.arange(len(prefix.lengths), device=prefix.lengths.device))


@dataclass(frozen=True)
class Reading:
    """What a model has after it read a turn's span and answered: its prefix, the span, and its layers of the span's slots."""

    prefix: Prefix
    span: Span
    layers: list[LayerKV]
    said: list[str]


def open_up(source: PreTrainedModel, dialogues: Sequence[Dialogue], voice: Voice) -> Reading:
    """The source reads the first span of each dialogue and answers: alike for all mappers, so it may be done once for all."""
    return _take_turn(source, empty_prefix(source, len(dialogues)), _span(source, dialogues, 0), voice)


def alternate(
    forth: Handoff, back: Handoff, dialogues: Sequence[Dialogue], voice: Voice, opening: Reading | None = None
) -> Answers:
    """Answers of each dialogue's turns, given by `forth.source` and `forth.target` in turn, the source first.

    Whose turn it is reads the turn's span itself, on top of a cache of spans of its own and of mapped ones, and answers;
    then the span's keys and values are mapped once, by the mapper of that direction, into the other's cache, if it has a
    turn to come.

    Args:
        forth: from source to target; its `native_head` first tokens are read by the target itself.
        back: from target to source.
        dialogues: with equally many turns.
        voice: how answers are written.
        opening: the source's first turn, as `open_up` returns it; it is left as it is.
    """
    reading = opening or open_up(forth.source, dialogues, voice)
    sides = [_copy(forth.source, reading.prefix), closed(empty_prefix(forth.target, len(dialogues)))]
    said = [reading.said]
    for turn in range(1, len(dialogues[0].spans)):
        own, way = turn % 2, (back, forth)[turn % 2]
        given = way.ferry(sides[own], reading.span, reading.layers)
        reading = _take_turn(way.target, given, _span(way.target, dialogues, turn), voice)
        sides[own] = reading.prefix
        said.append(reading.said)
    return list(zip(*said, strict=True))


def _span(model: PreTrainedModel, dialogues: Sequence[Dialogue], turn: int) -> Span:
    return Span.of([dialogue.spans[turn] for dialogue in dialogues], model.device)


def _take_turn(model: PreTrainedModel, prefix: Prefix, span: Span, voice: Voice) -> Reading:
    """The model reads the span on top of the prefix, which grows, and answers on a copy."""
    before = cache_length(prefix.cache)
    logits, grown = read_to_end(model, prefix, span)
    layers = cache_layers(grown.cache, before)
    return Reading(grown, span, layers, voice.say(model, _copy(model, grown), logits))
