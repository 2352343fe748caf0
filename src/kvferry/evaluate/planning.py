"""Which prompts share work: groups with a common header, and batches of similar length. Knows token lists only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvferry.kv.prefill import Tokens

SHARED_TOKENS = 64


@dataclass(frozen=True)
class Group:
    """Prompts that begin with `header`; `members` are numbers into the list that was grouped."""

    header: Tokens
    members: list[int]


def group_by_header(prompts: Sequence[Tokens]) -> list[Group]:
    """Group prompts whose common beginning is at least half of each and 64 tokens; the others form one group without header."""
    groups: list[Group] = []
    longest = 0
    for number in sorted(range(len(prompts)), key=lambda n: prompts[n]):
        prompt = prompts[number]
        shared = common(groups[-1].header, prompt) if groups else ()
        longest = max(longest, len(prompt))
        if len(shared) >= SHARED_TOKENS and 2 * len(shared) >= longest:
            groups[-1].members.append(number)
            groups[-1] = Group(shared, groups[-1].members)
        else:
            groups.append(Group(prompt, [number]))
            longest = len(prompt)
    alone = [group.members[0] for group in groups if len(group.members) == 1]
    shared_groups = [group for group in groups if len(group.members) > 1]
    return shared_groups + ([Group((), alone)] if alone else [])


def common(first: Tokens, second: Tokens) -> Tokens:
    """The longest common beginning."""
    return tuple(a for a, _ in takewhile(lambda both: both[0] == both[1], zip(first, second, strict=False)))


def batches(
    lengths: Sequence[int], members: Sequence[int], fits: Callable[[int, int], bool], padding: int
) -> Iterator[list[int]]:
    """Cut members, longest first, into batches that fit: `fits(rows, longest)`; one member always does.

    A batch also ends where its padding would come to more than `padding` tokens, which is what another batch costs.
    """
    batch: list[int] = []
    wasted = 0
    for number in sorted(members, key=lambda n: (-lengths[n], n)):
        longest = lengths[batch[0]] if batch else lengths[number]
        wasted += longest - lengths[number]
        if batch and (wasted > padding or not fits(len(batch) + 1, longest)):
            yield batch
            batch, wasted = [], 0
        batch.append(number)
    if batch:
        yield batch
