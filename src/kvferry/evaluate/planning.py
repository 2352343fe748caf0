"""Which prompts share work: groups with a common header, and batches of similar length. Knows token lists only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvferry.kv.prefill import Tokens

SHARED_TOKENS = 64
WORTHWHILE_TOKENS = 512


@dataclass(frozen=True)
class Group:
    """Prompts that begin with `header`; `members` are numbers into the list that was grouped."""

    header: Tokens
    members: list[int]


def group_by_header(prompts: Sequence[Tokens]) -> list[Group]:
    """Group prompts whose common beginning is at least half of each and 64 tokens; the others form one group without header."""
    groups: list[Group] = []
    for number in sorted(range(len(prompts)), key=lambda n: prompts[n]):
        prompt = prompts[number]
        shared = common(groups[-1].header, prompt) if groups else ()
        longest = max([len(prompt), *(len(prompts[member]) for member in groups[-1].members)]) if groups else 0
        if len(shared) >= SHARED_TOKENS and 2 * len(shared) >= longest:
            groups[-1] = Group(shared, [*groups[-1].members, number])
        else:
            groups.append(Group(prompt, [number]))
    alone = [group.members[0] for group in groups if len(group.members) == 1]
    shared_groups = [group for group in groups if len(group.members) > 1]
    return shared_groups + ([Group((), alone)] if alone else [])


def common(first: Tokens, second: Tokens) -> Tokens:
    """The longest common beginning."""
    return tuple(a for a, _ in takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False)))


def batches(lengths: Sequence[int], members: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Cut members, longest first, into batches of at most `tokens` padded tokens (at least one member each).

    A batch that is large enough to be worth computing takes no member that would be padded by more than a quarter.
    """
    batch: list[int] = []
    for number in sorted(members, key=lambda n: (-lengths[n], n)):
        longest = lengths[batch[0]] if batch else 0
        wasteful = len(batch) * longest >= WORTHWHILE_TOKENS and lengths[number] < 0.75 * longest
        if batch and (wasteful or (len(batch) + 1) * longest > tokens):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
