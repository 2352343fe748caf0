"""Scores of continuations from logits, against torch's own log-softmax; rows that share what they have in common."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.evaluate.scoring import BLOCK, note, rows_of, token_scores

TOKENS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), min_size=1, max_size=8)


@given(TOKENS, TOKENS)
def test_rows_hold_every_continuation_once_and_no_two_rows_differ_in_their_last_token_only(first, second):
    rows = rows_of([first, second])
    found = sorted((row.number, (*row.rest, last)) for row in rows for last in row.lasts)
    assert found == sorted({(0, c) for c in first} | {(1, c) for c in second})
    assert len({(row.number, row.rest) for row in rows}) == len(rows)
    assert [len(row.rest) for row in rows] == sorted((len(row.rest) for row in rows), reverse=True)


@pytest.mark.parametrize("places", [1, BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_scores_are_log_softmax_and_arg_max(places, dtype):
    torch.manual_seed(places)
    logits = (30 * torch.randn(places, 50)).to(dtype)
    at = torch.randint(places, (200,))
    ids = torch.where(torch.rand(200) < 0.5, logits[at].argmax(-1), torch.randint(50, (200,)))
    scores, likely = zip(*token_scores(logits, at.tolist(), ids.tolist()), strict=True)
    wanted = logits.double().log_softmax(-1)[at, ids]
    assert scores == pytest.approx(wanted.tolist(), abs=1e-5)
    assert list(likely) == (logits.argmax(-1)[at] == ids).tolist()
    assert 0 < sum(likely) < 200


def test_of_equally_likely_tokens_only_the_first_is_what_greedy_decoding_gives():
    found = token_scores(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), [0, 0, 0], [1, 2, 3])
    assert [likely for _, likely in found] == [True, False, False]


@given(TOKENS, st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_a_continuation_scores_the_sum_of_its_tokens_each_after_those_before_it(continuations, seed):
    """Logits are a function of the tokens read, as a model's are."""

    def after(tokens):
        return torch.randn(4, generator=torch.Generator().manual_seed(hash((seed, tokens)) % 2**31))

    (rows, found) = rows_of([continuations]), {}
    note(after(())[None], [(0, row, row.wanted[0]) for row in rows])
    for row in rows:
        for read, tokens in enumerate(row.wanted[1:], start=1):
            note(after(row.rest[:read])[None], [(0, row, tokens)])
        found |= row.answers()
    assert set(found) == set(continuations)
    for continuation, (score, greedy) in found.items():
        steps = [after(continuation[:place]) for place in range(len(continuation))]
        each = [step.log_softmax(-1)[token] for step, token in zip(steps, continuation, strict=True)]
        assert score == pytest.approx(float(sum(each)), abs=1e-5)
        assert greedy == all(int(step.argmax()) == token for step, token in zip(steps, continuation, strict=True))
