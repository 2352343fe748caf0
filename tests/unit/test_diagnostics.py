"""Diagnostics against caches, attention and sums that are made another way, and errors whose place is known."""

import itertools

import numpy as np
import pytest
import torch

from kvferry.errors import KvferryError
from kvferry.evaluate.controls import Passthrough, ZeroCache
from kvferry.evaluate.diagnostics import (
    Ferry,
    diagnose,
    k_concentration,
    look,
    reading_weights,
    v_concentration,
)
from kvferry.kv import attention
from kvferry.kv.attention import Attention, attend
from kvferry.kv.cache import cache_layers, forward, make_cache
from kvferry.kv.mapper import COUPLED, NOT_REAPPLIED, Affine, Mapper
from kvferry.kv.rope import rotation

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 3
WIDTH = KV_HEADS * DIM
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


@pytest.fixture(scope="module")
def texts():
    torch.manual_seed(8)
    return {f"text-{length}": tuple(torch.randint(3, 250, (length,)).tolist()) for length in (21, 9, 14)}


@pytest.fixture(scope="module")
def source(tiny_model):
    return tiny_model("llama", 2, seed=3)


@pytest.fixture(scope="module")
def target(tiny_model):
    return tiny_model("llama", LAYERS, seed=4)


def some_mapper(seed, rope="stripped"):
    torch.manual_seed(seed)
    keys, values = (
        [Affine(0.3 * torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)) for _ in range(LAYERS)] for _ in range(2)
    )
    return Mapper([[0], [1], [0]], keys, values, KV_HEADS, rope)


@torch.inference_mode()
def own_cache(model, tokens):
    """Keys and values of a plain forward pass, and a rotation of its positions."""
    ids = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    cache = make_cache([], model)
    forward(model, ids, cache, torch.ones_like(ids), positions)
    return cache_layers(cache), rotation(model, positions)


@torch.inference_mode()
def by_transformers_alone(model, tokens):
    """A layer: queries with rotation `[heads, tokens, dim]` and eager attention `[heads, tokens, tokens]`, float64."""
    before = []
    hooks = [
        (getattr(layer.self_attn, "q_norm", None) or layer.self_attn.q_proj).register_forward_hook(
            lambda _m, _i, out: before.append(out)
        )
        for layer in model.model.layers
    ]
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    output = model(torch.tensor([tokens]), cache=make_cache([], model), use_cache=True, output_attentions=True)
    model.set_attn_implementation(own)
    for hook in hooks:
        hook.remove()
    turn = rotation(model, torch.arange(len(tokens))[None]).for_heads()
    queries = [turn.apply(out.reshape(1, len(tokens), HEADS, -1).transpose(1, 2))[0].double() for out in before]
    return list(zip(queries, (part[0].double() for part in output.attentions), strict=True))


def mapped_cache(mapper, source, target, tokens, native_head=0):
    """The cache of the target that a mapper makes, and the target's own: float64 `[kv_heads, tokens, dim]`."""
    (layers, own), (true, turned) = own_cache(source, tokens), own_cache(target, tokens)
    mapped = mapper.translate(layers, own, turned)
    for made, kept in zip(mapped, true, strict=True):
        for part, other in zip(made, kept, strict=True):
            part[:, :, :native_head] = other[:, :, :native_head]
    in_double = [[tuple(part[0].double() for part in pair) for pair in each] for each in (mapped, true)]
    return *in_double, turned


def softmax(scores, allowed):
    weights = np.where(allowed, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return weights / weights.sum(-1, keepdims=True)


def expected(mapper, source, target, tokens, native_head=0):
    """(cosine, K concentration, V concentration) of each layer by the letter of their definitions, in numpy."""
    mapped, true, _ = mapped_cache(mapper, source, target, tokens, native_head)
    found = []
    for (query, eager), made, own in zip(by_transformers_alone(target, tokens), mapped, true, strict=True):
        found.append(of_layer(query.numpy(), eager.numpy(), *(part.numpy() for part in (*made, *own))))
    return np.array(found)


def of_layer(query, eager, key, value, true_key, true_value):
    cosines, on_keys, on_values = [], [], []
    for head in range(HEADS):
        kv = head * KV_HEADS // HEADS
        again = softmax(query[head] @ key[kv].T * DIM**-0.5, eager[head] > 0) @ value[kv]
        own = eager[head] @ true_value[kv]
        cosines.append(((again * own).sum(1) / np.linalg.norm(again, axis=1) / np.linalg.norm(own, axis=1)).mean())
        error = np.square(value[kv] - true_value[kv]).sum(1)
        squares, seen = np.square(eager[head]), eager[head] > 0
        even = sum(squares[u].sum() * error[seen[u]].mean() for u in range(len(error)))
        on_values.append((squares @ error).sum() / even)
    for kv in range(KV_HEADS):
        group = [query[head] for head in range(HEADS) if head * KV_HEADS // HEADS == kv]
        _, singular, right = np.linalg.svd(np.concatenate(group), full_matrices=False)
        along = np.square((key[kv] - true_key[kv]) @ right.T).sum(0)
        on_keys.append((singular**2 @ along) / ((singular**2).sum() * along.mean()))
    return np.mean(cosines), np.mean(on_keys), np.mean(on_values)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"kv_heads": 2, "heads": 4}),
        ("qwen3", {}),
        ("yarn", {}),
        ("partial", {}),
        ("qwen2", SLIDING),
    ],
)
@pytest.mark.parametrize("block", [4, 64])
def test_all_three_follow_their_definitions(kind, changes, block, tiny_model, texts, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", block)
    source, target, mapper = tiny_model(kind, 2, seed=3), tiny_model(kind, LAYERS, seed=4, **changes), some_mapper(1)
    found = diagnose(source, target, {"m": Ferry(mapper)}, texts)["m"]
    for text, tokens in texts.items():
        names = (found.cosine, found.k_concentration, found.v_concentration)
        mine = np.array([by_text[text] for by_text in names]).T
        np.testing.assert_allclose(mine, expected(mapper, source, target, tokens), rtol=2e-4)


def test_a_native_head_has_no_error_and_nothing_else_changes(source, target, texts):
    found = diagnose(source, target, {"m": Ferry(some_mapper(1), 5)}, texts)["m"]
    for text, tokens in texts.items():
        wanted = expected(some_mapper(1), source, target, tokens, native_head=5)
        np.testing.assert_allclose(found.cosine[text], wanted[:, 0], rtol=2e-4)
        np.testing.assert_allclose(found.k_concentration[text], wanted[:, 1], rtol=2e-4)
        np.testing.assert_allclose(found.v_concentration[text], wanted[:, 2], rtol=2e-4)


@pytest.mark.parametrize("rope", ["stripped", NOT_REAPPLIED, COUPLED])
@pytest.mark.parametrize("native_head", [0, 4])
def test_r2_is_that_of_all_tokens_of_all_texts_together(rope, native_head, source, target, texts):
    mapper = some_mapper(2, rope)
    found = diagnose(source, target, {"m": Ferry(mapper, native_head)}, texts)["m"]
    parts = [mapped_cache(mapper, source, target, tokens, native_head) for tokens in texts.values()]
    for layer, kind in itertools.product(range(LAYERS), range(2)):
        made, own = ([part[side][layer][kind] for part in parts] for side in (0, 1))
        if kind == 0:
            turns = [part[2].for_heads() for part in parts]
            made, own = (
                [turn.strip(keys[None])[0] for turn, keys in zip(turns, side, strict=True)] for side in (made, own)
            )
        made, own = (np.concatenate([part.numpy() for part in side], axis=1) for side in (made, own))
        about_mean = np.square(own - own.mean(1, keepdims=True)).sum((1, 2))
        wanted = (1 - np.square(made - own).sum((1, 2)) / about_mean).mean()
        assert (found.r2_k, found.r2_v)[kind][layer] == pytest.approx(wanted, rel=1e-4)


def test_the_targets_own_cache_has_cosine_and_r2_one_and_no_concentration_at_all(target, texts):
    class Own:
        def translate(self, layers, *_):
            return layers

    found = diagnose(target, target, {"own": Ferry(Own()), "turned": Ferry(Passthrough())}, texts)
    for diagnosis in found.values():
        assert np.allclose([*diagnosis.cosine.values()], 1, atol=1e-6)
        assert diagnosis.r2_k == pytest.approx([1] * LAYERS, abs=1e-6)
        assert diagnosis.r2_v == pytest.approx([1] * LAYERS, abs=1e-6)
    all_native = diagnose(target, target, {"own": Ferry(ZeroCache(LAYERS, KV_HEADS, DIM), 99)}, texts)["own"]
    assert all_native.cosine.keys() == texts.keys()
    assert np.allclose([*all_native.cosine.values()], 1, atol=1e-12)
    assert all_native.k_concentration == all_native.v_concentration == {}
    assert all_native.r2_k == all_native.r2_v == [1.0] * LAYERS


def truth_of(tokens=40, seed=0, mask=None):
    """A layer's attention to random queries, keys and values, observed."""
    torch.manual_seed(seed)
    query = torch.randn(1, HEADS, tokens, DIM) * torch.linspace(0.1, 3, DIM)
    key, value = torch.randn(2, 1, KV_HEADS, tokens, DIM)
    seen = Attention(0, query, key, value, mask, DIM**-0.5, *attend(query, key, value, mask, DIM**-0.5))
    return seen, look(seen)


def window(tokens, width):
    """True for a query's own key and the `width` before it."""
    ones = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
    return ones.tril() & ones.triu(-width)


@pytest.mark.parametrize("mask", [None, window(40, 6)])
@pytest.mark.parametrize("block", [7, 64])
def test_an_evenly_spread_error_has_concentration_one(mask, block, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", block)
    seen, truth = truth_of(mask=mask)
    # One error along each direction of the queries: eight tokens, equal sizes.
    keys, values = seen.key.clone(), seen.value.clone()
    for head in range(KV_HEADS):
        keys[0, head, :DIM] += 0.3 * truth.directions[head].T
    values += 0.2 * torch.nn.functional.normalize(torch.randn(values.shape), dim=-1)
    assert k_concentration(truth, keys) == pytest.approx(1, abs=1e-5)
    assert v_concentration(truth, values) == pytest.approx(1, abs=1e-5)


def test_a_key_error_along_one_direction_of_the_queries_is_concentrated_by_its_share():
    seen, truth = truth_of()
    shares, keys = [], {place: seen.key.clone() for place in (0, -1)}
    for head in range(KV_HEADS):
        group = seen.query[0, 2 * head : 2 * head + 2].flatten(0, 1).double().numpy()
        _, singular, right = np.linalg.svd(group, full_matrices=False)
        shares.append(singular**2 / np.mean(singular**2))
        for place, changed in keys.items():
            changed[0, head, 3] += 0.5 * torch.from_numpy(right[place]).float()
    strongest, weakest = (k_concentration(truth, keys[place]) for place in (0, -1))
    assert strongest == pytest.approx(np.mean([share[0] for share in shares]), rel=1e-4)
    assert weakest == pytest.approx(np.mean([share[-1] for share in shares]), rel=1e-3)
    assert strongest > 2 > 0.1 > weakest


def test_a_value_error_where_attention_reads_is_concentrated_and_elsewhere_is_not():
    seen, _ = truth_of()
    seen.query[0, :, :, 0] = 8.0
    seen.key[0, :, 2, 0] = 8.0  # every later query reads position 2
    parts = seen.query, seen.key, seen.value
    sink = Attention(0, *parts, None, 1.0, *attend(*parts, None, 1.0))
    truth = look(sink)
    for position, above in ((2, True), (20, False)):
        values = sink.value.clone()
        values[0, :, position] += 1
        assert (v_concentration(truth, values) > 1) == above
    # Queries before the last token do not see it: only its own reading counts, over forty positions.
    values = sink.value.clone()
    values[0, :, -1] += 1
    (block,) = sink.blocks
    last = block.probabilities[0, :, :, -1].double().square().flatten(0, 1)
    assert v_concentration(truth, values) == pytest.approx(float((40 * last[:, -1] / last.sum(1)).mean()), rel=1e-6)


@pytest.mark.parametrize("mask", [None, window(40, 3)])
def test_reading_is_what_is_spread_evenly(mask):
    seen, _ = truth_of(mask=mask)
    reading, even = reading_weights(seen)
    torch.testing.assert_close(reading.sum(1), even.sum(1), rtol=1e-12, atol=0)
    assert (even > 0).all()


def test_heads_without_an_error_are_left_out_of_the_mean():
    seen, truth = truth_of()
    keys = seen.key.clone()
    keys[0, 1] += torch.randn(40, DIM)
    both = keys.clone()
    both[0, 0] += torch.randn(40, DIM)
    alone = k_concentration(truth, keys)
    other = both.clone()
    other[0, 1] = seen.key[0, 1]
    assert k_concentration(truth, both) == pytest.approx((alone + k_concentration(truth, other)) / 2)
    assert k_concentration(truth, seen.key) is v_concentration(truth, seen.value) is None


def test_a_layer_without_an_error_has_no_concentration_and_the_others_do(target, texts):
    class Shifted:
        """The target's own cache, with an error in the last layer alone."""

        def translate(self, layers, *_):
            *own, (keys, values) = layers
            return [*own, (keys + 1, values + 1)]

    # The first layer's keys and values come from embeddings alone, so they are the same to the last bit in either pass.
    found = diagnose(target, target, {"shifted": Ferry(Shifted())}, texts)["shifted"]
    for by_text in (found.k_concentration, found.v_concentration):
        assert by_text.keys() == texts.keys()
        for values in by_text.values():
            assert values[0] is None
            assert values[-1] > 0
    assert found.r2_k[0] == found.r2_v[0] == 1 > found.r2_v[-1]


def test_mappers_together_are_as_each_alone_and_each_model_reads_a_text_once(source, target, texts):
    ferries = {"one": Ferry(some_mapper(1)), "two": Ferry(some_mapper(2), 3), "three": Ferry(some_mapper(3, COUPLED))}
    calls = []
    hooks = [
        model.register_forward_pre_hook(lambda _m, _a, words: calls.append(words["input_ids"].shape), with_kwargs=True)
        for model in (source, target)
    ]
    together = diagnose(source, target, ferries, texts)
    for hook in hooks:
        hook.remove()
    assert len(calls) == 2 * len(texts)
    for name, ferry in ferries.items():
        assert diagnose(source, target, {name: ferry}, texts)[name] == together[name]
    assert len({str(found) for found in together.values()}) == 3


def test_texts_alone_have_the_cosines_that_they_have_among_others(source, target, texts):
    ferries = {"m": Ferry(some_mapper(1))}
    whole = diagnose(source, target, ferries, texts)["m"]
    for text, tokens in texts.items():
        assert diagnose(source, target, ferries, {text: tokens})["m"].cosine[text] == whole.cosine[text]


def test_in_bfloat16_the_mapped_cache_is_rounded_as_the_target_would(source, target, texts, tiny_model):
    models = tiny_model("llama", 2, seed=3).bfloat16(), tiny_model("llama", LAYERS, seed=4).bfloat16()
    found = diagnose(*models, {"m": Ferry(some_mapper(1))}, texts)["m"]
    wanted = diagnose(source, target, {"m": Ferry(some_mapper(1))}, texts)["m"]
    assert found.r2_k == pytest.approx(wanted.r2_k, rel=0.05)
    for text in texts:
        assert found.cosine[text] == pytest.approx(wanted.cosine[text], abs=0.05)


@pytest.mark.parametrize("length", [0, 257])
def test_a_text_that_the_target_has_no_positions_for_is_refused(length, source, target):
    with pytest.raises(KvferryError, match=f"text odd: {length} tokens, where the target has 1 to 256 positions"):
        diagnose(source, target, {"m": Ferry(some_mapper(1))}, {"odd": (5,) * length})


def test_one_token_has_no_r2(source, target):
    with pytest.raises(KvferryError, match="R² is undefined"):
        diagnose(source, target, {"m": Ferry(some_mapper(1))}, {"short": (5,)})


def test_a_mapper_that_is_not_finite_is_refused(source, target, texts):
    mapper = some_mapper(1)
    mapper.values[1].bias[3] = torch.inf
    with pytest.raises(KvferryError, match="bad: its keys or values for layer 1 are not finite on text text-21"):
        diagnose(source, target, {"bad": Ferry(mapper)}, texts)
