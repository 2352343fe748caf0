"""Controls carry what they say: the target's own cache, nothing, noise of a mapper's size, or another text."""

import numpy as np
import pytest
import torch

from kvferry.errors import KvferryError
from kvferry.evaluate.controls import Passthrough, WrongDocument, ZeroCache, random_like
from kvferry.kv.cache import cache_layers
from kvferry.kv.handoff import Handoff, Native, read
from kvferry.kv.mapper import Affine, HeadLocal, Mapper, Network
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


def affine_mapper(kv_heads=2, head_dim=8, layers=3, sources=2):
    torch.manual_seed(8)
    width = kv_heads * head_dim

    def one():
        # heads of very different sizes, so that a norm over all heads would show
        sizes = torch.tensor([0.1, 10.0][:kv_heads]).repeat_interleave(head_dim)
        return Affine(torch.randn(sources * width, width) * sizes, torch.randn(width))

    maps = [[one() for _ in range(layers)] for _ in range(2)]
    return Mapper([[0, 1]] * layers, *maps, kv_heads)


def head_local_mapper():
    torch.manual_seed(9)
    sizes = torch.tensor([0.2, 5.0])[:, None, None]
    maps = [[HeadLocal(torch.randn(2, 16, 8) * sizes, torch.randn(16)) for _ in range(3)] for _ in range(2)]
    return Mapper([[0, 1]] * 3, *maps, 2, "coupled")


def network_mapper(width=6):
    torch.manual_seed(10)
    sizes = torch.tensor([0.3, 4.0])

    def one():
        first = torch.randn(32, 2 * width) * sizes.repeat_interleave(width)
        second, third = (torch.randn(2, width, out) * sizes[:, None, None] for out in (width, 8))
        return Network(first, torch.randn(2 * width), second, torch.randn(2, width), third, torch.randn(2, 8))

    return Mapper([[1, 0]] * 3, *([one() for _ in range(3)] for _ in range(2)), 2)


MAPPERS = {"affine": affine_mapper, "head_local": head_local_mapper, "network": network_mapper}


def norms(mapper):
    """The Frobenius norm of every weight of every head, by numpy."""
    found = []
    for own in (*mapper.keys, *mapper.values):
        for name, tensor in own.tensors().items():
            if not name.endswith("bias"):
                table = tensor.double().numpy()
                heads = table if table.ndim == 3 else np.split(table, mapper.kv_heads, axis=1)
                found += [np.sqrt((head**2).sum()) for head in heads]
    return np.array(found)


@pytest.mark.parametrize("kind", MAPPERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_a_random_mapper_has_the_norms_and_the_rest_of_the_fitted_one(kind, dtype, tolerance):
    fitted = MAPPERS[kind]().astype(dtype)
    drawn = random_like(fitted, 3)
    np.testing.assert_allclose(norms(drawn), norms(fitted), rtol=tolerance)
    assert (drawn.selected, drawn.kv_heads, drawn.rope, drawn.dtype) == (fitted.selected, 2, fitted.rope, dtype)
    for own, other in zip((*drawn.keys, *drawn.values), (*fitted.keys, *fitted.values), strict=True):
        assert type(own) is type(other)
        for name, tensor in own.tensors().items():
            before = getattr(other, name)
            assert (tensor.shape, tensor.dtype) == (before.shape, dtype)
            assert torch.equal(tensor, before) == name.endswith("bias")


@pytest.mark.parametrize("kind", MAPPERS)
def test_a_random_mapper_depends_on_its_seed_alone_and_repeats_no_matrix(kind):
    fitted = MAPPERS[kind]()
    first, again, other = (random_like(fitted, seed).keys[0].tensors() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    (weight, *_) = [name for name in first if not name.endswith("bias")]
    assert not torch.allclose(first[weight], other[weight])
    drawn = random_like(fitted, 3)
    shapes = [(own.tensors()[weight] / own.tensors()[weight].norm()).flatten() for own in (*drawn.keys, *drawn.values)]
    assert (torch.stack(shapes) @ torch.stack(shapes).T - torch.eye(6)).abs().max() < 0.5


def test_a_random_mapper_knows_nothing_of_the_fitted_one():
    """Gaussian: mean about 0 and no correlation with the weight that was there."""
    fitted = affine_mapper(kv_heads=2, head_dim=32, layers=1)
    weight, before = random_like(fitted, 1).keys[0].tensors()["weight"], fitted.keys[0].tensors()["weight"]
    head, other = weight[:, 32:].flatten(), before[:, 32:].flatten()
    assert abs(np.corrcoef(head, other)[0, 1]) < 0.06
    assert abs(head.mean() / head.std()) < 0.06
    assert ((head / head.std()) ** 4).mean() == pytest.approx(3, abs=0.5)


@pytest.fixture(scope="module")
def source(tiny_model):
    return tiny_model("yarn", 3, seed=5)


def wrong_and_fed(source, model, identity_mapper, ids, other, **how):
    """The control on the prompts, and a hand-off that is fed the other text itself."""
    handoff = Handoff(source, model, identity_mapper(model, [[0, 1, 2]] * 3), **how)
    system = WrongDocument(handoff, other)
    mask = torch.tensor([[1] * TOKENS, [1] * (TOKENS - 4) + [0] * 4])
    told = Span(other[torch.arange(TOKENS) % len(other)].expand(2, -1), mask)
    return system.extend(system.start(2), Span(ids, mask)), handoff.extend(handoff.start(2), told)


@pytest.mark.parametrize("length", [5, TOKENS, 40])
def test_the_wrong_document_is_a_handoff_fed_the_other_text(source, model, identity_mapper, ids, length):
    other = torch.arange(3, 3 + length) * 2
    found, fed = wrong_and_fed(source, model, identity_mapper, ids, other)
    for pair, wanted in zip(cache_layers(found.cache), cache_layers(fed.cache), strict=True):
        for part, part_fed in zip(pair, wanted, strict=True):
            torch.testing.assert_close(part, part_fed, rtol=0, atol=0)
    assert torch.equal(found.mask, fed.mask)
    assert torch.equal(found.lengths, fed.lengths)
    assert [text.tokens for text in found.texts] == [text.tokens for text in fed.texts]


def test_what_the_target_reads_of_a_wrong_document_does_not_depend_on_the_prompt(source, model, identity_mapper, ids):
    other = torch.arange(60, 90)
    right = Handoff(source, model, identity_mapper(model, [[0, 1, 2]] * 3))
    wrong = WrongDocument(right, other)
    span, tail = Span(ids, torch.ones_like(ids)), Span.of([[5, 6]] * 2, model.device)
    answers = [read(model, system.extend(system.start(2), span), tail)[0] for system in (wrong, right)]
    torch.testing.assert_close(answers[0][0], answers[0][1], rtol=1e-5, atol=1e-5)
    assert (answers[0] - answers[1]).abs().amax(dim=(1, 2)).min() > 0.1


def test_a_wrong_document_in_parts_is_that_of_the_whole(source, model, identity_mapper, ids):
    system = WrongDocument(Handoff(source, model, identity_mapper(model, [[0, 1, 2]] * 3), 3), torch.arange(60, 71))
    everything = torch.ones_like(ids)
    whole = system.extend(system.start(2), Span(ids, everything))
    parts = system.start(2)
    for few in (slice(0, 2), slice(2, 9), slice(9, TOKENS)):
        parts = system.extend(parts, Span(ids[:, few], everything[:, few]))
    tail = Span.of([[5, 6], [7]], model.device)
    torch.testing.assert_close(read(model, parts, tail)[0][0], read(model, whole, tail)[0][0], rtol=1e-4, atol=1e-4)


def test_the_native_head_of_a_wrong_document_is_the_prompts_own(source, model, identity_mapper, ids):
    other, head = torch.arange(60, 90), 3
    found, fed = wrong_and_fed(source, model, identity_mapper, ids, other, native_head=head)
    assert torch.equal(found.mask, fed.mask)
    with torch.inference_mode():
        own = [(layer.keys, layer.values) for layer in model(ids[:, :head], use_cache=True).cache.layers]
    for pair, told, right in zip(cache_layers(found.cache), cache_layers(fed.cache), own, strict=True):
        for part, part_told, part_right in zip(pair, told, right, strict=True):
            torch.testing.assert_close(part[:, :, :head], part_right, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(part[:, :, head:], part_told[:, :, head:], rtol=0, atol=0)
            assert (part[:, :, :head] - part_told[:, :, :head]).abs().max() > 0.1


def test_a_wrong_document_without_tokens_is_refused(source, model, identity_mapper):
    with pytest.raises(KvferryError, match="wrong_document: the other text has no tokens"):
        WrongDocument(Handoff(source, model, identity_mapper(model, [[0, 1, 2]] * 3)), torch.arange(0))
