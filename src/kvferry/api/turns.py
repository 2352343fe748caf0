"""How the turns of a conversation are written: by the model's chat template, or as plain questions and answers.

Only what is new is written at each turn, since what was read stays as it was read. Does not know models.
"""

from __future__ import annotations

from typing import Protocol

from transformers import PreTrainedTokenizerBase

from kvferry.api.reader import Generation
from kvferry.errors import KvferryError

# stand for an earlier turn where only what follows it is wanted
EARLIER, REPLY = "earlier", "kvferry-reply"
QUESTION = "Q: {text}\nA:"


class Turns(Protocol):
    """stop: text that ends a reply, beside the end token."""

    stop: str | None

    def opening(self, text: str) -> list[int]:
        """Tokens of the first turn."""
        ...

    def following(self, text: str, said: Generation) -> list[int]:
        """Tokens of a further turn, after a reply."""
        ...


class TemplateTurns:
    """Turns by the tokenizer's chat template.

    Raises:
        KvferryError: it has none.
    """

    stop = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise KvferryError("the models' tokenizer has no chat template; go without (--raw)")
        self.tokenizer = tokenizer

    def opening(self, text: str) -> list[int]:
        """The template's beginning and the user's text."""
        return self._tokens(self._written([{"role": "user", "content": text}]))

    def following(self, text: str, said: Generation) -> list[int]:
        """The end of the reply, if the reply does not hold it, and the user's text.

        Raises:
            KvferryError: the template does not write an earlier reply.
        """
        earlier = [{"role": "user", "content": EARLIER}, {"role": "assistant", "content": REPLY}]
        _, reply, rest = self._written([*earlier, {"role": "user", "content": text}]).partition(REPLY)
        if not reply:
            raise KvferryError("the models' chat template leaves earlier replies out; go without (--raw)")
        tokens = self._tokens(rest)
        return tokens[1:] if tokens[:1] == list(said.tokens[-1:]) else tokens

    def _written(self, messages: list[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


class PlainTurns:
    """Turns as `Q: …` and `A: …`; a reply ends with its line."""

    stop = "\n"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def opening(self, text: str) -> list[int]:
        """The tokenizer's special tokens and the question."""
        return self.tokenizer(QUESTION.format(text=text))["input_ids"]

    def following(self, text: str, said: Generation) -> list[int]:
        """The end of the reply's line, if the reply does not hold it, and the question."""
        begin = "" if said.text.endswith("\n") else "\n"
        return self.tokenizer(begin + QUESTION.format(text=text), add_special_tokens=False)["input_ids"]


def turns_of(tokenizer: PreTrainedTokenizerBase, template: bool | None) -> Turns:
    """Turns by the chat template or plain; None: by the template where there is one."""
    by_template = bool(tokenizer.chat_template) if template is None else template
    return TemplateTurns(tokenizer) if by_template else PlainTurns(tokenizer)
