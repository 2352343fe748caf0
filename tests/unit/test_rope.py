"""Rotation comes off cached keys and goes back on, for every kind of RoPE that is claimed; any other is refused."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import KvferryError
from kvferry.kv import rope
from kvferry.kv.rope import Rotation, check_rotation, rotary_module, rotation

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TOKENS = 24


@torch.inference_mode()
def keys_before_and_in_cache(model, ids, positions):
    """What k_norm or k_proj gives, and what transformers then keeps, `[layers][batch, kv_heads, tokens, head_dim]`."""
    seen = []
    modules = [getattr(layer.self_attn, "k_norm", None) or layer.self_attn.k_proj for layer in model.model.layers]
    hooks = [module.register_forward_hook(lambda _m, _i, out: seen.append(out)) for module in modules]
    cached = [layer.keys for layer in model(input_ids=ids, position_ids=positions, use_cache=True).cache.layers]
    for hook in hooks:
        hook.remove()
    batch, heads, tokens, dim = cached[0].shape
    return [out.reshape(batch, tokens, heads, dim).transpose(1, 2) for out in seen], cached


def turned_by_hand(keys, angle, factor=1.0):
    """Rotate the pairs (i, i + half) as complex numbers; angle `[tokens, half]`."""
    first, second = keys.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.full_like(angle, factor), angle)
    return torch.cat((turned.real, turned.imag), -1)


def refusal_of(model):
    with pytest.raises(KvferryError) as caught:
        check_rotation(model)
    return str(caught.value)


@pytest.mark.parametrize("first", [0, 150])
def test_stripped_cached_keys_are_the_keys_before_rotation(half_split_model, first):
    torch.manual_seed(2)
    ids = torch.randint(3, 250, (2, TOKENS))
    positions = torch.arange(first, first + TOKENS).expand_as(ids)
    before, cached = keys_before_and_in_cache(half_split_model, ids, positions)
    turned = rotation(half_split_model, positions).for_heads()
    for layer, (plain, keys) in enumerate(zip(before, cached, strict=True)):
        assert (plain - keys).abs().max() > 0.1, f"layer {layer} was not rotated at all"
        torch.testing.assert_close(turned.strip(keys), plain, **CLOSE)
        torch.testing.assert_close(turned.apply(plain), keys, **CLOSE)


def test_a_usable_layout_passes_the_check(half_split_model):
    check_rotation(half_split_model)


def test_default_rotation_is_the_textbook_one(tiny_model):
    torch.manual_seed(3)
    keys, positions = torch.randn(1, 2, 5, 8), torch.tensor([[0, 1, 7, 90, 200]])
    angle = positions[0, :, None].double() * 10000.0 ** (-torch.arange(4).double() / 4)
    applied = rotation(tiny_model("llama"), positions).for_heads().apply(keys)
    torch.testing.assert_close(applied.double(), turned_by_hand(keys, angle), rtol=0, atol=1e-4)


def test_yarn_scales_keys_by_its_attention_factor_and_stripping_takes_it_off(tiny_model):
    table = rotation(tiny_model("yarn"), torch.arange(200)[None])
    factor = 0.1 * math.log(4.0) + 1
    torch.testing.assert_close(table.cos.square() + table.sin.square(), torch.full((1, 200, 8), factor**2), **CLOSE)
    keys = torch.ones(1, 200, 8)
    assert table.apply(keys).norm() == pytest.approx(factor * float(keys.norm()), rel=1e-5)
    assert table.strip(keys).norm() == pytest.approx(float(keys.norm()) / factor, rel=1e-5)


@pytest.mark.parametrize("mscale", [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}])
def test_scaling_queries_by_position_leaves_keys_as_they_are(mscale, tiny_model):
    """Ministral 3 scales queries from the original length on; its own two mscales make the attention factor 1."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 4, **mscale}
    models = [
        tiny_model("ministral3", rope_parameters=rope | {"llama_4_scaling_beta": beta}, seed=6) for beta in (0.0, 0.5)
    ]
    ids, positions = torch.arange(3, 3 + TOKENS)[None], torch.arange(TOKENS)[None]
    (before, plain), (_, scaled) = (keys_before_and_in_cache(model, ids, positions) for model in models)
    torch.testing.assert_close(plain[0], scaled[0], rtol=0, atol=0)
    assert (plain[-1] - scaled[-1]).abs().max() > 0.01
    table = rotation(models[1], positions).for_heads()
    torch.testing.assert_close(table.strip(scaled[0]), before[0], **CLOSE)
    factor = 1.0 if mscale else 0.1 * math.log(16.0) + 1
    assert float(scaled[0].norm() / before[0].norm()) == pytest.approx(factor, rel=1e-4)
    check_rotation(models[1])


def test_partial_rotary_leaves_the_other_coordinates_as_they_are(tiny_model):
    torch.manual_seed(4)
    keys = torch.randn(1, 2, 9, 8)
    turned = rotation(tiny_model("partial"), torch.arange(9)[None]).for_heads().apply(keys)
    torch.testing.assert_close(turned[..., 4:], keys[..., 4:], rtol=0, atol=0)
    assert (turned[..., :4] - keys[..., :4]).abs().max() > 0.1


@given(
    heads=st.integers(1, 4),
    pairs=st.integers(1, 5),
    rest=st.integers(0, 5),
    positions=st.lists(st.integers(0, 100_000), min_size=1, max_size=12),
    factor=st.floats(0.5, 2.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_applying_and_stripping_undo_each_other(heads, pairs, rest, positions, factor, seed):
    torch.manual_seed(seed)
    angle = torch.tensor(positions).double()[:, None] * 500.0 ** (-torch.arange(pairs).double() / pairs)
    both = torch.cat((angle, angle), -1)
    table = Rotation((factor * both.cos()).float()[None], (factor * both.sin()).float()[None]).for_heads()
    keys = torch.randn(1, heads, len(positions), 2 * pairs + rest)
    torch.testing.assert_close(table.strip(table.apply(keys)), keys, **CLOSE)
    torch.testing.assert_close(table.apply(table.strip(keys)), keys, **CLOSE)
    by_hand = turned_by_hand(keys[..., : 2 * pairs], angle, factor)
    torch.testing.assert_close(table.apply(keys)[..., : 2 * pairs].double(), by_hand, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keys_keep_their_dtype_and_are_turned_in_float32(dtype, tiny_model):
    torch.manual_seed(5)
    keys = torch.randn(1, 2, 9, 8).to(dtype)
    table = rotation(tiny_model("llama"), torch.arange(100, 109)[None]).for_heads()
    assert table.apply(keys).dtype == dtype
    torch.testing.assert_close(table.apply(keys), table.apply(keys.float()).to(dtype), rtol=0, atol=0)


def test_positions_may_differ_between_rows_of_a_batch(tiny_model):
    model, positions = tiny_model("llama3"), torch.tensor([[0, 1, 2], [90, 91, 91]])
    together = rotation(model, positions)
    for row in range(2):
        alone = rotation(model, positions[row : row + 1])
        torch.testing.assert_close(together.cos[row], alone.cos[0], rtol=0, atol=0)
        torch.testing.assert_close(together.sin[row], alone.sin[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["llama", "llama3", "yarn", "ministral3", "qwen3", "partial"])
def test_tables_of_a_wrong_theta_are_detected(kind, tiny_model, monkeypatch):
    model = tiny_model(kind)
    wrong = copy.deepcopy(rotary_module(model))
    wrong.inv_freq = wrong.inv_freq**1.05
    monkeypatch.setattr(rope, "rotary_module", lambda _: wrong)
    assert "layout of" in refusal_of(model)


def test_tables_without_the_attention_factor_are_detected(tiny_model, monkeypatch):
    model = tiny_model("yarn")
    wrong = copy.deepcopy(rotary_module(model))
    wrong.attention_scaling = 1.0
    monkeypatch.setattr(rope, "rotary_module", lambda _: wrong)
    assert "layout of" in refusal_of(model)


@pytest.mark.parametrize("kind", ["interleaved", "interleaved_partial"])
def test_an_interleaved_layout_is_refused_in_one_sentence(kind, tiny_model):
    model = tiny_model(kind)
    message = refusal_of(model)
    assert f"the rotary layout of {type(model).__name__} is not understood" in message
    assert message.endswith("this model cannot be used")
    assert "\n" not in message


def test_a_norm_after_k_proj_that_the_check_does_not_know_is_refused(tiny_model):
    assert "not understood" in refusal_of(tiny_model("partial", qk_layernorm=True))


def test_a_model_without_one_rotary_module_is_refused(tiny_model):
    model = tiny_model("llama", layers=1)
    del model.model.rotary_emb
    with pytest.raises(KvferryError, match="no single rotary module of a known type in LlamaForCausalLM"):
        rotary_module(model)


@pytest.mark.parametrize("kv_heads", [16, 2])
def test_as_many_heads_as_probe_tokens_do_not_confuse_the_check(kv_heads, tiny_model):
    for kind in ("llama", "qwen3"):
        check_rotation(tiny_model(kind, layers=1, heads=16, kv_heads=kv_heads, head_dim=4))


def test_a_vocabulary_smaller_than_the_probe_is_no_obstacle(tiny_model):
    check_rotation(tiny_model("llama", layers=1, vocabulary=7))


def test_the_check_leaves_no_hooks_behind(tiny_model):
    model = tiny_model("qwen3")
    check_rotation(model)
    assert not any(module._forward_hooks for module in model.modules())
