"""Prefix perplexity is the plain one where the prefix is the target's own, and another where it is not."""

import math

import pytest
import torch

from kvferry.evaluate.controls import Passthrough, ZeroCache
from kvferry.evaluate.perplexity import BATCH, prefix_nll
from kvferry.kv.handoff import Handoff, Native
from kvferry.records import Record

PREFIX, SCORED = 18, 9
COUNT = 2 * BATCH + 1


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture(scope="module")
def chunks():
    torch.manual_seed(14)
    return torch.randint(3, 250, (COUNT, PREFIX + SCORED))


@pytest.fixture(scope="module")
def plain(model, chunks):
    """Mean nats a scored token of each chunk, by one plain forward."""
    with torch.inference_mode():
        losses = torch.nn.functional.cross_entropy(
            model(chunks).logits[:, :-1].transpose(1, 2), chunks[:, 1:], reduction="none"
        )
    return losses[:, PREFIX - 1 :].mean(1).tolist()


def scores(items):
    return [item.score for item in items]


@pytest.mark.parametrize("hold_back", [1, 3, PREFIX - 1, PREFIX, PREFIX + 5])
@pytest.mark.parametrize("head", [None, 0, 4, 50])
def test_the_targets_own_prefix_gives_the_plain_negative_log_likelihood(hold_back, head, model, chunks, plain):
    system = Native(model) if head is None else Handoff(model, model, Passthrough(), native_head=head)
    assert scores(prefix_nll(system, chunks, PREFIX, hold_back)) == pytest.approx(plain, abs=1e-5)


def test_each_chunk_is_one_item_that_weighs_its_scored_tokens(model, chunks):
    items = prefix_nll(Native(model), chunks, PREFIX, 1)
    assert [item.id.rsplit("-", 1)[0] for item in items] == [f"chunk-{number}" for number in range(COUNT)]
    assert {item.weight for item in items} == {float(SCORED)}


def test_the_record_of_the_items_states_the_exponential_of_the_mean(model, chunks, plain):
    record = Record("native", "tiny", "prefix_perplexity", "perplexity", prefix_nll(Native(model), chunks, PREFIX, 1))
    assert record.value == pytest.approx(math.exp(sum(plain) / COUNT), rel=1e-5)


@pytest.mark.parametrize("hold_back", [1, 4])
def test_a_zero_cache_gives_what_a_plain_forward_on_zeros_gives(hold_back, model, chunks, plain):
    cut = PREFIX - hold_back
    with torch.inference_mode():
        cache = model(chunks[:, :cut], use_cache=True).cache
        for layer in cache.layers:
            layer.keys, layer.values = torch.zeros_like(layer.keys), torch.zeros_like(layer.values)
        logits = model(chunks[:, cut:-1], cache=cache, use_cache=True).logits[:, hold_back - 1 :]
        wanted = torch.nn.functional.cross_entropy(logits.transpose(1, 2), chunks[:, PREFIX:], reduction="none")
    found = scores(prefix_nll(Handoff(model, model, ZeroCache(3, 2, 8)), chunks, PREFIX, hold_back))
    assert found == pytest.approx(wanted.mean(1).tolist(), abs=1e-5)
    assert max(abs(a - b) for a, b in zip(found, plain, strict=True)) > 0.01


def test_only_the_held_back_tokens_matter_where_the_cache_says_nothing(model, chunks):
    changed = chunks.clone()
    changed[:, : PREFIX - 2] = changed[:, : PREFIX - 2].flip(0)
    system = Handoff(model, model, ZeroCache(3, 2, 8))
    found, same = (scores(prefix_nll(system, ids, PREFIX, 2)) for ids in (chunks, changed))
    assert found == pytest.approx(same, abs=1e-5)
    assert scores(prefix_nll(system, changed, PREFIX, 3)) != pytest.approx(
        scores(prefix_nll(system, chunks, PREFIX, 3)), abs=1e-3
    )


def test_results_do_not_depend_on_the_chunks_beside(model, chunks, plain):
    alone = [scores(prefix_nll(Native(model), chunk[None], PREFIX, 1))[0] for chunk in chunks]
    assert alone == pytest.approx(plain, abs=1e-5)
