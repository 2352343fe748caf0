"""Controls carry what they say: the target's own cache, or nothing."""

import pytest
import torch

from kvferry.evaluate.controls import Passthrough, ZeroCache
from kvferry.kv.cache import cache_layers
from kvferry.kv.handoff import Handoff, Native, read
from kvferry.kv.prefill import Span
from kvferry.kv.rope import rotation

TOKENS = 14


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("yarn")


@pytest.fixture(scope="module")
def ids():
    torch.manual_seed(6)
    return torch.randint(3, 250, (2, TOKENS))


@pytest.fixture(scope="module")
def own(model, ids):
    with torch.inference_mode():
        return [(layer.keys, layer.values) for layer in model(ids, use_cache=True).cache.layers]


def test_passing_through_takes_rotation_off_and_puts_it_back(half_split_model, ids):
    table = rotation(half_split_model, torch.arange(TOKENS)[None])
    with torch.inference_mode():
        layers = [(layer.keys, layer.values) for layer in half_split_model(ids, use_cache=True).cache.layers]
    for (keys, values), (kept, same) in zip(Passthrough().translate(layers, table, table), layers, strict=True):
        torch.testing.assert_close(keys, kept, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values, same, rtol=0, atol=0)


def test_passing_through_uses_both_rotations(model, own):
    """Keys of positions 0… given out as those of positions 50… are what the model would have made there."""
    here, there = (rotation(model, torch.arange(first, first + TOKENS)[None]) for first in (0, 50))
    moved = Passthrough().translate(own, here, there)
    back = Passthrough().translate(moved, there, here)
    for (keys, _), (kept, _), (returned, _) in zip(moved, own, back, strict=True):
        assert (keys - kept).abs().max() > 0.1
        torch.testing.assert_close(returned, kept, rtol=1e-4, atol=1e-4)


def test_a_zero_cache_has_the_targets_geometry_whatever_the_source_is(own):
    card = {"layers": 5, "kv_heads": 4, "head_dim": 6, "model": "target"}
    layers = ZeroCache.like(card).translate(own, None, None)
    assert len(layers) == 5
    for pair in layers:
        for part in pair:
            assert part.shape == (2, 4, TOKENS, 6)
            assert not part.any()


def test_a_zero_cache_keeps_device_and_dtype_of_the_source(own):
    half = [(keys.bfloat16(), values.bfloat16()) for keys, values in own]
    assert {part.dtype for pair in ZeroCache(1, 1, 2).translate(half, None, None) for part in pair} == {torch.bfloat16}


def test_the_target_on_a_zero_cache_reads_as_a_plain_forward_on_zeros(model, ids, own, tiny_model):
    system = Handoff(tiny_model("qwen2", 2), model, ZeroCache(3, 2, 8))
    everything = torch.ones_like(ids)
    prefix = system.extend(system.start(2), Span(ids, everything))
    assert all(not part.any() for pair in cache_layers(prefix.cache) for part in pair)
    found, _ = read(model, prefix, Span(ids[:, :3], everything[:, :3]))
    with torch.inference_mode():
        cache = model(ids, use_cache=True).cache
        for layer in cache.layers:
            layer.keys, layer.values = torch.zeros_like(layer.keys), torch.zeros_like(layer.values)
        wanted = model(ids[:, :3], cache=cache, use_cache=True).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    native = Native(model)
    full, _ = read(model, native.extend(native.start(2), Span(ids, everything)), Span(ids[:, :3], everything[:, :3]))
    assert (found - full).abs().max() > 0.1


def test_answers_on_a_zero_cache_do_not_depend_on_the_prompt_but_for_its_length(model, ids):
    system = Handoff(model, model, ZeroCache(3, 2, 8))
    tail = Span.of([[5, 6]] * 2, model.device)
    prefix = system.extend(system.start(2), Span(ids, torch.ones_like(ids)))
    logits, _ = read(model, prefix, tail)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)
