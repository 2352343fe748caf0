"""What a user gives, checked: prompts as tokens, counts, and room for them. Each refusal is one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvferry.errors import KvferryError
from kvferry.prepare.decoder import positions_of
from kvferry.prepare.models import Loaded

Prompt = str | Sequence[int] | Tensor


def tokens_of(prompt: Prompt, loaded: Loaded, special: bool) -> list[int]:
    """A prompt as tokens. special: a string gets the tokenizer's special tokens (the begin token, where it has one).

    Raises:
        KvferryError: it is neither text nor tokens, is a batch, holds no tokens, or tokens that the model does not have.
    """
    rows = _listed(prompt, loaded, special)
    if not rows:
        raise KvferryError("the prompt is empty; give a text of at least one token")
    if len(rows) == 1 and isinstance(rows[0], list):
        rows = rows[0]
    strange = next((token for token in rows if not isinstance(token, int)), None)
    if strange is not None:
        raise KvferryError(
            f"the prompt must be one text or one row of token ids, not {len(rows)} of {type(strange).__name__}; "
            "for a batch use Handoff.inputs"
        )
    unknown = next((token for token in rows if not 0 <= token < loaded.card["vocab_size"]), None)
    if unknown is not None:
        raise KvferryError(f"token {unknown} is not one of the {loaded.card['vocab_size']:,} of {loaded.card['model']}")
    return rows


def _listed(prompt: Prompt, loaded: Loaded, special: bool) -> list[Any]:
    if isinstance(prompt, str):
        return list(loaded.tokenizer(prompt, add_special_tokens=special)["input_ids"])
    if isinstance(prompt, Tensor):
        return prompt.reshape(-1).tolist() if prompt.ndim == 0 else prompt.tolist()
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise KvferryError(f"the prompt is a {type(prompt).__name__}; give a text or token ids")
    return list(prompt)


def check_count(name: str, value: int) -> None:
    """Refuse a number of tokens that is less than 1, or no whole number.

    Raises:
        KvferryError: it is.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise KvferryError(f"{name}: {value!r} is no whole number; give one of 1 or more")
    if value < 1:
        raise KvferryError(f"{name}: {value} is too little; it must be 1 or more")


def check_positions(loaded: Loaded, tokens: int) -> None:
    """Refuse more tokens than the model has positions for.

    Raises:
        KvferryError: there are more.
    """
    most = positions_of(loaded.model.config)
    if tokens > most:
        raise KvferryError(
            f"{tokens:,} tokens are more than the {most:,} positions of {loaded.card['model']}; "
            "shorten the text or ask for less"
        )
