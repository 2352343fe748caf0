"""Tokenizers: read one, an id that two of the same rules share, and in words where two differ. Does not know models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvferry.errors import KvferryError, first_line
from kvferry.files import fingerprint

NOT_RULES = ("truncation", "padding")
FILES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json")
IN_GGUF = "gguf_file"


def read_tokenizer(folder: Path, **how: Any) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder in the hub's layout; `how` goes to transformers.

    Raises:
        ValueError: there is none, or none of use; says why.
    """
    # Where there is none, transformers would make an empty one.
    if IN_GGUF not in how and not any(found for pattern in FILES for found in folder.glob(pattern)):
        raise ValueError(f"it holds no tokenizer ({', '.join(FILES)})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **how)
        json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # plain ones are what the library of tokenizers raises
        raise ValueError(
            f"its tokenizer is none that transformers reads as a fast one ({first_line(error)})"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError("its tokenizer has no end token")
    return tokenizer


def tokenizer_rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What decides which tokens a text has: vocabulary, merges, added tokens and the other rules; and the special tokens."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    rules = {key: value for key, value in backend.items() if key not in NOT_RULES}
    return {"rules": rules, "special": {key: str(value) for key, value in tokenizer.special_tokens_map.items()}}


def tokenizer_id(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of vocabulary, merges, added and special tokens."""
    return fingerprint(tokenizer_rules(tokenizer))


def check_same_tokenizer(source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, pair: str) -> None:
    """Refuse two models whose tokens are not the same; `pair` is what the message calls them.

    Raises:
        KvferryError: with everything in which the tokenizers differ.
    """
    found = list(differences(source, target))
    if found:
        raise KvferryError(
            f"{pair}: the models have different tokenizers ({'; '.join(found)}), so their caches do not stand for the same "
            "tokens; choose models of one family"
        )


def differences(source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> Iterator[str]:
    """In what two tokenizers differ: clauses, the source first in each; none if and only if their ids are the same."""
    own, other = tokenizer_rules(source), tokenizer_rules(target)
    vocabularies = [{place: token for token, place in each.get_vocab().items()} for each in (source, target)]
    yield from _of_vocabularies(*vocabularies)
    yield from _of_special(own["special"], other["special"])
    model, twin = own["rules"].pop("model"), other["rules"].pop("model")
    yield from _of_merges(model.pop("merges", []), twin.pop("merges", []))
    if vocabularies[0] != vocabularies[1]:
        model["vocab"] = twin["vocab"] = None
    others = [*_unlike(own["rules"], other["rules"]), *_unlike(model, twin)]
    if others:
        yield f"other rules: {', '.join(others)}"


def _of_vocabularies(own: dict[int, str], other: dict[int, str]) -> Iterator[str]:
    """Sizes, and the first token, by its number."""
    if len(own) != len(other):
        yield f"{len(own)} and {len(other)} tokens"
    for place in sorted(own.keys() | other.keys()):
        if own.get(place) != other.get(place):
            yield f"token {place} is {_shown(own.get(place))} and {_shown(other.get(place))}"
            return


def _of_special(own: dict[str, str], other: dict[str, str]) -> Iterator[str]:
    for name in sorted(own.keys() | other.keys()):
        if own.get(name) != other.get(name):
            yield f"{name} is {_shown(own.get(name))} and {_shown(other.get(name))}"


def _of_merges(own: list[Any], other: list[Any]) -> Iterator[str]:
    """The first merge, by its place in the list."""
    for place, (left, right) in enumerate(zip_longest(own, other)):
        if left != right:
            yield f"merge {place} of {len(own)} and {len(other)} is {_shown(left)} and {_shown(right)}"
            return


def _unlike(own: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key))


def _shown(value: Any) -> str:
    """As a reader sees it: a merge is a list of two tokens."""
    if value is None:
        return "none"
    return " + ".join(map(repr, value)) if isinstance(value, list) else repr(value)
