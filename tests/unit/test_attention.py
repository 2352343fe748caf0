"""Observed attention is the model's own; row weights are the sums they claim to be; the model is left as it was."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from kvferry.errors import KvferryError
from kvferry.kv import attention
from kvferry.kv.attention import Attention, attend, observed, row_weights
from kvferry.kv.cache import cache_layers, forward, make_cache
from kvferry.kv.rope import rotation

# Float32 sums of some dozens of products of order 1, in another order.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
MODELS = {
    "llama": ("llama", {}),
    "llama, 3 queries a head": ("llama", {"heads": 6}),
    "llama, no groups": ("llama", {"kv_heads": 4}),
    "yarn": ("yarn", {}),
    "qwen2": ("qwen2", {}),
    "qwen2, second layer sliding": ("qwen2", SLIDING),
    "qwen3": ("qwen3", {}),
    "partial": ("partial", {}),
}


@pytest.fixture(params=MODELS)
def model(request, tiny_model):
    kind, changes = MODELS[request.param]
    return tiny_model(kind, 2, **changes)


@pytest.fixture
def ids():
    torch.manual_seed(3)
    return torch.randint(3, 250, (2, 13))


def run(model, ids, observer=None):
    """Logits of all tokens, keys and values, and what the observer saw, for whole sequences."""
    cache, seen = make_cache([], model), None
    arguments = (model, ids, cache, torch.ones_like(ids), torch.arange(ids.shape[1]).expand_as(ids), 0)
    if observer is None:
        logits = forward(*arguments)
    else:
        with observed(model, observer) as seen:
            logits = forward(*arguments)
    return logits, cache_layers(cache), seen


@torch.inference_mode()
def by_transformers_alone(model, ids):
    """A layer: queries with rotation, values and eager attention probabilities, in float64."""
    before = []
    for layer in model.model.layers:
        module = getattr(layer.self_attn, "q_norm", None) or layer.self_attn.q_proj
        module.register_forward_hook(lambda _m, _i, out: before.append(out))
    model.set_attn_implementation("eager")
    # Of transformers' own caches those of sliding layers forget rows.
    output = model(ids, cache=make_cache([], model), use_cache=True, output_attentions=True)
    turn = rotation(model, torch.arange(ids.shape[1])[None]).for_heads()
    heads = model.config.num_attention_heads
    queries = [turn.apply(out.reshape(*ids.shape, heads, -1).transpose(1, 2)).double() for out in before]
    values = [layer.values.double() for layer in output.cache.layers]
    return zip(queries, values, (part.double() for part in output.attentions), strict=True)


def naive_weights(query, value, probabilities):
    """r_K and r_V by the letter, one product of scalars and vectors at a time."""
    batch, heads, tokens, head_dim = query.shape
    group = heads // value.shape[1]
    r_k, r_v = torch.zeros(2, *value.shape[:3], dtype=torch.float64)
    for b, h, u in itertools.product(range(batch), range(heads), range(tokens)):
        a, q, v = probabilities[b, h, u], query[b, h, u], value[b, h // group]
        o = sum(a[i] * v[i] for i in range(u + 1))
        for i in range(u + 1):
            r_v[b, h // group, i] += a[i] ** 2
            r_k[b, h // group, i] += a[i] ** 2 * ((v[i] - o) ** 2).sum() * (q**2).sum() / head_dim
    return r_k, r_v


@pytest.mark.parametrize("block", [4, 64])
def test_row_weights_are_the_sums_over_all_queries_and_heads_of_the_group(block, model, ids, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", block)
    _, _, seen = run(model, ids, row_weights)
    assert sorted(seen) == [0, 1]
    for layer, states in enumerate(by_transformers_alone(model, ids)):
        for found, wanted in zip(seen[layer], naive_weights(*states), strict=True):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.max()))
            assert wanted.std() > 0.01


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_logits_and_cache_are_those_of_the_models_own_attention(own, model):
    model.set_attn_implementation(own)
    ids = torch.randint(3, 250, (2, 2 * attention.BLOCK + 7))
    (logits, layers, _), (own_logits, own_layers, _) = run(model, ids, row_weights), run(model, ids)
    torch.testing.assert_close(logits, own_logits, **CLOSE)
    for found, wanted in zip(layers, own_layers, strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_attention_in_bfloat16_is_computed_in_float32_and_given_back_as_bfloat16(tiny_model, ids):
    model = tiny_model("llama", 2).bfloat16()
    (logits, layers, seen), (own_logits, own_layers, _) = run(model, ids, lambda layer: layer), run(model, ids)
    assert logits.dtype == layers[1][0].dtype == torch.bfloat16
    for found, wanted in ((logits, own_logits), *zip(layers[1], own_layers[1], strict=True)):
        # As many steps of bfloat16 (2^-8 each) as two layers may add.
        assert (found - wanted).float().norm() < 4 * 2**-8 * wanted.float().norm()
    assert {part.dtype for part in (seen[1].query, seen[1].key, seen[1].value, seen[1].output)} == {torch.float32}


def test_the_observer_sees_what_the_model_used(model, ids):
    _, layers, seen = run(model, ids, lambda layer: layer)
    for layer, (query, value, probabilities) in enumerate(by_transformers_alone(model, ids)):
        shown = seen[layer]
        torch.testing.assert_close(shown.query.double(), query, **CLOSE)
        torch.testing.assert_close((shown.key, shown.value), layers[layer], rtol=0, atol=0)
        (block,) = shown.blocks
        torch.testing.assert_close(block.probabilities.flatten(1, 2).double(), probabilities, **CLOSE)
        group = query.shape[1] // value.shape[1]
        outputs = probabilities @ value.repeat_interleave(group, 1)
        torch.testing.assert_close(shown.output.double(), outputs, **CLOSE)
        again, _ = attend(shown.query, shown.key, shown.value, shown.mask, shown.scaling)
        torch.testing.assert_close(again, shown.output, rtol=0, atol=0)


def attention_of(query, key, value):
    scaling = query.shape[-1] ** -0.5
    return Attention(0, query, key, value, None, scaling, *attend(query, key, value, None, scaling))


def test_row_weights_are_squared_norms_of_the_derivatives_of_the_outputs():
    torch.manual_seed(4)
    tokens, head_dim = 6, 4
    query, key, value = (torch.randn(1, heads, tokens, head_dim) for heads in (3, 1, 1))

    def by_row(which):
        """For every row the sum over heads and queries of the squared spectral norm of d output / d row."""
        inputs = [query, key, value]

        def output(changed):
            return attend(*inputs[:which], changed, *inputs[which + 1 :], None, head_dim**-0.5)[0]

        slopes = torch.autograd.functional.jacobian(output, inputs[which])[0, :, :, :, 0, 0]
        return torch.linalg.matrix_norm(slopes.permute(0, 1, 3, 2, 4), ord=2).square().sum((0, 1))

    for found, which in zip(row_weights(attention_of(query, key, value)), (1, 2), strict=True):
        torch.testing.assert_close(found[0, 0], by_row(which), **CLOSE)


def test_a_row_that_no_output_depends_on_weighs_nothing_and_no_weight_is_negative():
    """Where all values are the same, an error in a key moves nothing; rounding must not turn that below zero."""
    torch.manual_seed(5)
    query, key = torch.randn(1, 4, 50, 8), torch.randn(1, 2, 50, 8)
    value = torch.randn(1, 2, 1, 8).expand(-1, -1, 50, -1)
    r_k, r_v = row_weights(attention_of(query, key, value))
    assert (r_k >= 0).all()
    assert r_k.max() < 1e-4
    assert r_v.min() > 0


@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("place", ["body", "observer", "nowhere"])
def test_the_models_setting_comes_back_whatever_happens(own, place, tiny_model, ids):
    model, calls = tiny_model("llama", 2), []
    model.set_attn_implementation(own)
    before = run(model, ids)[0]

    def observer(layer):
        calls.append(layer.layer)
        if place == "observer":
            raise ZeroDivisionError

    def look():
        with observed(model, observer):
            run(model, ids)
            if place == "body":
                raise ZeroDivisionError

    if place == "nowhere":
        look()
    else:
        with pytest.raises(ZeroDivisionError):
            look()
    assert calls == ([0] if place == "observer" else [0, 1])
    assert model.config._attn_implementation == own
    assert torch.equal(run(model, ids)[0], before)
    assert len(calls) < 3


def test_an_observation_inside_another_takes_over_and_gives_back(tiny_model, ids):
    model = tiny_model("llama", 2)
    with observed(model, lambda _: "outer") as outer:
        with observed(model, lambda _: "inner") as inner:
            run(model, ids)
        assert (inner, outer) == ({0: "inner", 1: "inner"}, {})
        run(model, ids)
    assert outer == {0: "outer", 1: "outer"}


def test_layers_that_were_not_seen_are_an_error(tiny_model):
    model = tiny_model("llama", 2)
    with (
        pytest.raises(KvferryError, match="LlamaForCausalLM: attention was seen in 0 of 2 layers"),
        observed(model, id),
    ):
        pass


def test_a_pass_on_top_of_a_cache_is_refused(tiny_model, ids):
    model = tiny_model("llama", 2)
    cache, positions = make_cache(run(model, ids)[1], model), torch.tensor([[13], [13]])
    with pytest.raises(KvferryError, match="1 queries and 14 keys"), observed(model, row_weights):
        forward(model, ids[:, :1], cache, torch.ones(2, 14), positions)


def test_attention_that_is_more_than_scaled_products_is_refused(ids):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(Gemma2Config(**sizes, **heads), attn_implementation="eager").eval()
    with pytest.raises(KvferryError, match="Gemma2Attention: attention with softcap is not understood"):
        run(model, ids, row_weights)
    assert model.config._attn_implementation == "eager"
