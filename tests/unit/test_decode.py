"""Greedy tokens are those of whole forwards, whoever else is in the batch and whenever they leave it."""

import pytest
import torch

from kvferry.evaluate.decode import decode, read_to_end
from kvferry.kv.cache import cache_length
from kvferry.kv.handoff import Native, empty_prefix
from kvferry.kv.prefill import Span

LENGTHS, LIMIT = (7, 3, 7, 1), 5


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama", 2, seed=5)


@pytest.fixture(scope="module")
def prompts():
    torch.manual_seed(3)
    return [torch.randint(3, 250, (length,)).tolist() for length in LENGTHS]


@pytest.fixture
def started(model, prompts):
    """Logits after the prompts, and their prefix."""
    return read_to_end(model, empty_prefix(model, len(prompts)), Span.of(prompts, model.device))


@pytest.fixture(scope="module")
def plain(model, prompts):
    """LIMIT tokens each, by whole forwards without a cache."""
    rows = [list(prompt) for prompt in prompts]
    with torch.inference_mode():
        for row in rows:
            for _ in range(LIMIT):
                row.append(int(model(torch.tensor([row])).logits[0, -1].argmax()))
    return [row[-LIMIT:] for row in rows]


def test_logits_are_those_after_each_rows_last_token(model, prompts, started):
    logits, prefix = started
    assert prefix.lengths.tolist() == list(LENGTHS)
    with torch.inference_mode():
        for row, prompt in zip(logits, prompts, strict=True):
            torch.testing.assert_close(row, model(torch.tensor([prompt])).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_only_logits_at_ends_of_rows_are_computed(model, prompts):
    kept = []
    hook = model.lm_head.register_forward_hook(lambda _, __, out: kept.append(out.shape[1]))
    try:
        read_to_end(model, empty_prefix(model, len(prompts)), Span.of(prompts, model.device))
    finally:
        hook.remove()
    assert kept == [len(set(LENGTHS))]


def test_a_span_on_top_of_a_prefix_of_other_lengths(model, prompts):
    prefix = Native(model).extend(empty_prefix(model, 2), Span.of([prompts[0], prompts[3]], model.device))
    logits, _ = read_to_end(model, prefix, Span.of([prompts[3], prompts[0]], model.device))
    with torch.inference_mode():
        for row, whole in zip(logits, (prompts[0] + prompts[3], prompts[3] + prompts[0]), strict=True):
            torch.testing.assert_close(row, model(torch.tensor([whole])).logits[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limit", [1, 2, LIMIT])
def test_tokens_are_the_likeliest_up_to_the_limit(model, started, plain, limit):
    logits, prefix = started
    assert decode(model, prefix, logits, lambda _: False, limit) == [row[:limit] for row in plain]


@pytest.mark.parametrize("ends", [(1, 4, 2, 5), (3, 3, 3, 3), (5, 1, 1, 1), (1, 1, 1, 1)])
def test_a_row_that_is_done_leaves_and_changes_no_other(model, started, plain, ends):
    logits, prefix = started
    ready = {tuple(row[:end]) for row, end in zip(plain, ends, strict=True)}
    found = decode(model, prefix, logits, lambda written: tuple(written) in ready, LIMIT)
    wanted = [next(row[:n] for n in range(1, LIMIT + 1) if tuple(row[:n]) in ready or n == LIMIT) for row in plain]
    assert found == wanted


def test_nothing_is_read_after_the_last_token(model, started):
    logits, prefix = started
    before = cache_length(prefix.cache)
    decode(model, prefix, logits, lambda _: False, LIMIT)
    assert cache_length(prefix.cache) == before + LIMIT - 1
