"""Batches and groups cover everything once; batches keep to their bounds; headers are true beginnings."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.evaluate.planning import SHARED_TOKENS, batches, common, group_by_header

LENGTHS = st.lists(st.integers(0, 300), max_size=40)


@st.composite
def prompts(draw):
    """Prompts that share beginnings of various lengths, with repeats and prompts that are beginnings of others."""
    stems = draw(st.lists(st.integers(0, 3 * SHARED_TOKENS), min_size=1, max_size=4))
    rows = []
    for stem, length in enumerate(stems):
        for kept in draw(st.lists(st.integers(0, length), max_size=5)):
            tail = draw(st.lists(st.integers(0, 1), max_size=SHARED_TOKENS))
            rows.append((*[stem] * kept, *tail))
    return draw(st.permutations(rows + draw(st.lists(st.sampled_from(rows), max_size=3)) if rows else rows))


def within(tokens):
    """The bound of so many padded tokens."""
    return lambda rows, longest: rows * longest <= tokens


def wasted(batch, lengths):
    return sum(max(lengths[n] for n in batch) - lengths[n] for n in batch)


@given(LENGTHS, st.integers(1, 1000), st.integers(0, 500), st.data())
def test_batches_cover_every_member_once(lengths, tokens, padding, data):
    members = data.draw(st.permutations(range(len(lengths))))
    members = members[: data.draw(st.integers(0, len(members)))]
    assert sorted(n for batch in batches(lengths, members, within(tokens), padding) for n in batch) == sorted(members)


@given(LENGTHS, st.integers(1, 1000), st.integers(0, 500))
def test_batches_keep_to_their_bound_or_hold_one_member_and_waste_no_more_than_another_would_cost(
    lengths, tokens, padding
):
    for batch in batches(lengths, range(len(lengths)), within(tokens), padding):
        assert len(batch) == 1 or len(batch) * max(lengths[n] for n in batch) <= tokens
        assert wasted(batch, lengths) <= padding


@given(LENGTHS, st.integers(1, 1000), st.integers(0, 500))
def test_a_batch_ends_for_its_bound_or_because_the_next_member_would_be_too_much_padding(lengths, tokens, padding):
    found = list(batches(lengths, range(len(lengths)), within(tokens), padding))
    for batch, following in pairwise(found):
        longer = [*batch, following[0]]
        assert wasted(longer, lengths) > padding or len(longer) * lengths[batch[0]] > tokens
        assert min(lengths[n] for n in batch) >= max(lengths[n] for n in following)


def test_no_members_are_no_batch():
    assert list(batches([], [], within(100), 10)) == []


@given(prompts())
@settings(max_examples=150)
def test_groups_cover_every_prompt_once(rows):
    assert sorted(n for group in group_by_header(rows) for n in group.members) == list(range(len(rows)))


@given(prompts())
@settings(max_examples=150)
def test_a_header_is_a_beginning_of_every_member(rows):
    for group in group_by_header(rows):
        for member in group.members:
            assert rows[member][: len(group.header)] == group.header


@given(prompts())
@settings(max_examples=150)
def test_a_header_is_shared_and_long_enough_to_be_worth_it_and_one_group_at_most_has_none(rows):
    groups = group_by_header(rows)
    assert sum(group.header == () for group in groups) <= 1
    for group in groups:
        assert group.members
        if group.header:
            assert len(group.header) >= SHARED_TOKENS
            assert len(group.members) > 1


@pytest.mark.parametrize("kept", [200, 140, 100])
def test_a_header_is_at_least_half_of_each_member(kept):
    """Two long prompts with much in common, and a shorter one that shares less with them."""
    long = [(*[0] * 200, 1), (*[0] * 200, 2)]
    short = (*[0] * (kept // 2), *[3] * (kept // 2))
    rows = [*long, short]
    for group in group_by_header(rows):
        for member in group.members:
            assert not group.header or 2 * len(group.header) >= len(rows[member])


def test_few_shot_prompts_share_their_examples():
    examples = tuple(range(100))
    rows = [(*examples, 500 + n, 7) for n in range(5)]
    (group,) = group_by_header(rows)
    assert group.header == examples
    assert sorted(group.members) == list(range(5))


def test_short_or_unlike_prompts_share_nothing():
    rows = [(1, 2, 3), (1, 2, 4), tuple(range(200)), tuple(range(300, 500))]
    (group,) = group_by_header(rows)
    assert group.header == ()
    assert sorted(group.members) == [0, 1, 2, 3]


def test_the_shortest_header_is_exactly_the_threshold():
    rows = [(*[0] * SHARED_TOKENS, 1), (*[0] * SHARED_TOKENS, 2)]
    assert [group.header for group in group_by_header(rows)] == [(0,) * SHARED_TOKENS]
    rows = [row[1:] for row in rows]
    assert [group.header for group in group_by_header(rows)] == [()]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_common_beginning_is_the_longest(first, second):
    shared = common(tuple(first), tuple(second))
    length = len(shared)
    assert tuple(first[:length]) == shared == tuple(second[:length])
    assert first[length : length + 1] != second[length : length + 1] or length == min(len(first), len(second))
