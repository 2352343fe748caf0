"""The cache really fills, grows in place like transformers' own layer, and a model that ignores it is refused."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvferry.errors import KvferryError
from kvferry.kv.cache import (
    GROWTH,
    NO_LOGITS,
    GrowingLayer,
    append_layers,
    cache_layers,
    cache_length,
    forward,
    make_cache,
    select_rows,
)

EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CHUNKS = st.lists(st.integers(1, 2 * GROWTH), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama", layers=2)


@pytest.fixture(scope="module")
def ids():
    torch.manual_seed(1)
    return torch.randint(3, 250, (2, 40))


@torch.inference_mode()
def plain(model, ids):
    return model(input_ids=ids, use_cache=True)


def read_in_parts(model, ids, cache, sizes):
    """Logits of all tokens, read in chunks of `sizes`."""
    logits, start = [], 0
    for size in sizes:
        part = ids[:, start : start + size]
        positions = torch.arange(start, start + size).expand_as(part)
        logits.append(forward(model, part, cache, torch.ones(2, start + size).long(), positions, 0))
        start += size
    return torch.cat(logits, 1)


def cut(total, seed):
    """Random chunk sizes that add up to `total`."""
    torch.manual_seed(seed)
    sizes = []
    while sum(sizes) < total:
        sizes.append(min(int(torch.randint(1, 9, ())), total - sum(sizes)))
    return sizes


def test_a_forward_fills_the_cache_with_the_models_own_keys_and_values(model, ids):
    cache = make_cache([], model)
    logits = forward(model, ids, cache, torch.ones_like(ids), torch.arange(40).expand_as(ids), 0)
    expected = plain(model, ids)
    assert cache_length(cache) == 40
    torch.testing.assert_close(logits, expected.logits, **CLOSE)
    for (keys, values), own in zip(cache_layers(cache), expected.cache.layers, strict=True):
        torch.testing.assert_close(keys, own.keys, **CLOSE)
        torch.testing.assert_close(values, own.values, **CLOSE)


@pytest.mark.parametrize("seed", range(4))
def test_reading_in_chunks_gives_the_logits_of_one_full_forward(model, ids, seed):
    logits = read_in_parts(model, ids, make_cache([], model), cut(40, seed))
    torch.testing.assert_close(logits, plain(model, ids).logits, **CLOSE)


def test_only_the_asked_for_last_logits_are_returned(model, ids):
    everything = plain(model, ids).logits
    logits = forward(model, ids, make_cache([], model), torch.ones_like(ids), torch.arange(40).expand_as(ids), 3)
    torch.testing.assert_close(logits, everything[:, -3:], **CLOSE)


@given(CHUNKS, st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_growing_layer_holds_what_transformers_own_layer_holds(sizes, given_first):
    torch.manual_seed(len(sizes))
    chunks = [(torch.randn(2, 3, size, 4), torch.randn(2, 3, size, 4)) for size in sizes]
    own, growing = DynamicLayer(), GrowingLayer(*chunks[0]) if given_first else GrowingLayer()
    if given_first:
        own.update(*chunks[0])
    for keys, values in chunks[given_first:]:
        for returned, expected in zip(growing.update(keys, values), own.update(keys, values), strict=True):
            torch.testing.assert_close(returned, expected, **EXACT)
    torch.testing.assert_close(growing.keys, own.keys, **EXACT)
    torch.testing.assert_close(growing.values, own.values, **EXACT)
    assert growing.get_seq_length() == sum(sizes)


def test_one_token_at_a_time_copies_the_prefix_once_and_not_at_every_step():
    layer = GrowingLayer(torch.randn(1, 2, 100, 4), torch.randn(1, 2, 100, 4))
    places = set()
    for _ in range(GROWTH):
        keys, _ = layer.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
        places.add(keys.data_ptr())
    assert len(places) == 1


@pytest.mark.parametrize("given_first", [False, True])
def test_a_layer_that_knows_how_many_tokens_come_takes_room_for_them_once_and_no_more(given_first):
    chunks = [torch.randn(1, 2, size, 4) for size in (10, 3, 1, 1)]
    layer = GrowingLayer(chunks[0], chunks[0], room=5) if given_first else GrowingLayer(room=15)
    places, sizes = set(), set()
    for chunk in chunks[given_first:]:
        keys, _ = layer.update(chunk, chunk)
        places.add(keys.data_ptr())
        sizes.add(keys.untyped_storage().nbytes())
    torch.testing.assert_close(layer.keys, torch.cat(chunks, dim=2), **EXACT)
    assert len(places) == 1
    assert sizes == {15 * 2 * 4 * 4}
    more = torch.randn(1, 2, 2, 4)
    torch.testing.assert_close(layer.update(more, more)[1], torch.cat((*chunks, more), dim=2), **EXACT)


def test_rows_of_a_lone_row_are_not_copied_before_they_grow_and_then_apart(model, ids):
    cache = make_cache([], model)
    forward(model, ids[:1], cache, torch.ones(1, 40).long(), torch.arange(40)[None])
    (keys, _), *_ = cache_layers(cache)
    before = keys.clone()
    chosen = select_rows(cache, torch.tensor([0, 0, 0]), model, room=2)
    assert cache_layers(chosen)[0][0].data_ptr() == keys.data_ptr()
    new = torch.randn(3, 2, 2, 8)
    append_layers(chosen, [(new, new)] * 2)
    (grown, _), *_ = cache_layers(chosen)
    torch.testing.assert_close(grown, torch.cat((before.expand(3, -1, -1, -1), new), dim=2), **EXACT)
    torch.testing.assert_close(cache_layers(cache)[0][0], before, **EXACT)


def test_logits_come_of_the_places_that_are_asked_for(model, ids):
    everything, positions = plain(model, ids).logits, torch.arange(40).expand_as(ids)

    def asked(places):
        return forward(model, ids, make_cache([], model), torch.ones_like(ids), positions, places)

    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < 0.2
    torch.testing.assert_close(asked(mask), everything[mask], **CLOSE)
    each = torch.tensor([[3, 9], [0, 39]])
    torch.testing.assert_close(asked(each), everything[torch.arange(2)[:, None], each], **CLOSE)
    assert asked(NO_LOGITS).numel() == 0


def test_growing_does_not_write_into_the_tensors_that_the_cache_was_made_of(model):
    keys, values = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    kept = keys.clone()
    cache = make_cache([(keys, values)] * 2, model)
    append_layers(cache, [(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))] * 2)
    torch.testing.assert_close(keys, kept, **EXACT)
    assert cache_length(cache) == 8
    assert all(bool((part[:, :, 5:] == 1).all()) for pair in cache_layers(cache) for part in pair)


def test_cache_layers_start_at_the_asked_for_slot(model, ids):
    cache = make_cache([], model)
    read_in_parts(model, ids, cache, [25, 15])
    for (keys, values), (all_keys, all_values) in zip(cache_layers(cache, 25), cache_layers(cache), strict=True):
        torch.testing.assert_close(keys, all_keys[:, :, 25:], **EXACT)
        torch.testing.assert_close(values, all_values[:, :, 25:], **EXACT)
        assert keys.shape[2] == 15


class Deaf:
    """A model that takes any keyword, leaves the cache alone, and answers all the same."""

    def __call__(self, input_ids, **_):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 7))


class Misspelling:
    """A model that is handed its cache under a name that its transformers version does not know."""

    def __init__(self, model):
        self.model = model

    def __call__(self, cache, **words):
        return self.model(kv_cache=cache, **words)


@pytest.mark.parametrize("make", [lambda _: Deaf(), Misspelling], ids=["ignored", "misspelt"])
def test_a_cache_that_the_model_does_not_fill_is_refused_and_the_pin_is_named(make, model, ids):
    cache = make_cache([], model)
    with pytest.raises(KvferryError, match=r"did not fill its KV cache.*envs/constraints.txt"):
        forward(make(model), ids, cache, torch.ones_like(ids), torch.arange(40).expand_as(ids))


def test_selected_rows_repeat_and_reorder_and_grow_apart_from_the_first_cache(model, ids):
    cache = make_cache([], model)
    read_in_parts(model, ids, cache, [40])
    rows = torch.tensor([1, 0, 1])
    chosen = select_rows(cache, rows, model)
    before = [keys.clone() for keys, _ in cache_layers(cache)]
    for (keys, values), (old_keys, old_values) in zip(cache_layers(chosen), cache_layers(cache), strict=True):
        torch.testing.assert_close(keys, old_keys[rows], **EXACT)
        torch.testing.assert_close(values, old_values[rows], **EXACT)
    append_layers(chosen, [(torch.zeros(3, 2, 1, 8), torch.zeros(3, 2, 1, 8))] * 2)
    with torch.inference_mode():
        chosen.layers[0].keys.zero_()
    assert cache_length(cache) == 40
    for kept, (keys, _) in zip(before, cache_layers(cache), strict=True):
        torch.testing.assert_close(keys, kept, **EXACT)


def test_rows_of_an_empty_cache_are_an_empty_cache_that_can_be_filled(model, ids):
    empty = select_rows(make_cache([], model), torch.tensor([0, 0]), model)
    assert cache_length(empty) == 0
    torch.testing.assert_close(read_in_parts(model, ids, empty, [40]), plain(model, ids).logits, **CLOSE)


def test_a_cache_made_of_layers_is_one_that_transformers_reads(model, ids):
    first = plain(model, ids[:, :30]).cache
    cache = make_cache([(layer.keys, layer.values) for layer in first.layers], model)
    assert isinstance(cache, DynamicCache)
    rest = forward(model, ids[:, 30:], cache, torch.ones_like(ids), torch.arange(30, 40).expand(2, 10), 0)
    torch.testing.assert_close(rest, plain(model, ids).logits[:, 30:], **CLOSE)
