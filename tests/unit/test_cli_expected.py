"""Expected speed-ups: their FLOPs are those that torch counts, and their bytes those of weights and caches."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MixtralConfig

from kvferry.cli.candidates import Candidate
from kvferry.cli.expected import LENGTHS, expected
from kvferry.cli.settings import Wanted, plan_for, settings_for

TOKENS = 64


def candidate(config, name="tiny"):
    return Candidate(name, {"kind": "local", "path": name}, False, config, "none")


def counted(model, tokens):
    """FLOPs of a prefill as torch counts them, by matrix products of which those of attention are not causal."""
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.zeros(1, tokens, dtype=torch.long), logits_to_keep=1)
    return counter.get_total_flops()


def outlook(model, lengths=(TOKENS,)):
    one = candidate(model.config)
    settings = settings_for(one.geometry, one.geometry, one.positions, Wanted())
    return expected(one, one, plan_for(one.geometry, one.geometry, settings, settings.headline), "float32", lengths)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_flops_of_a_prefill_are_those_that_torch_counts(tiny_model, kind):
    model = tiny_model(kind, 4, heads=4, kv_heads=2, head_dim=16)
    [own] = outlook(model)
    head = 2 * model.config.hidden_size * model.config.vocab_size  # of the last token, which is left out
    half = 2 * 4 * 4 * 16 * TOKENS**2  # the upper triangle of the attention
    assert own.prefill_flops == pytest.approx(counted(model, TOKENS) - head - half, rel=0.01)


def test_of_a_mixture_the_experts_that_a_token_goes_through_count():
    shape = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 64,
        "tie_word_embeddings": False,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = MixtralConfig(**shape, **heads, num_local_experts=8, num_experts_per_tok=2)
    weights = candidate(config).weights
    assert weights.total == AutoModelForCausalLM.from_config(config).num_parameters()
    assert weights.inside == weights.total - 2 * 64 * 32
    idle, norms = 2 * 6 * 3 * 32 * 48, 5 * 32  # layers · idle experts · their three matrices
    assert weights.inside - weights.a_token == idle + norms


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_no_arithmetic_tied_or_not(tiny_model, tied):
    weights = candidate(tiny_model("llama", 3, tie_word_embeddings=tied).config).weights
    embedding = 264 * 32
    assert weights.total - weights.inside == embedding * (1 if tied else 2)
    assert weights.inside - weights.a_token == 7 * 32  # two norms a layer and one at the end


def test_bytes_are_weights_once_and_caches_once(tiny_model):
    model = tiny_model("llama", 4)
    [own] = outlook(model)
    weights = candidate(model.config).weights
    cache = TOKENS * 2 * 4 * 16 * 4
    mapper = 2 * 4 * 2 * 16 * 16 * 4  # k = 2
    assert own.prefill_bytes == 4 * weights.inside + cache
    assert own.mapper_bytes == mapper * 1 + 2 * cache


def test_longer_prompts_gain_more_arithmetic(tiny_model):
    ratios = [own.by_flops for own in outlook(tiny_model("llama", 4), LENGTHS)]
    assert ratios == sorted(ratios)
    assert ratios[-1] > 2 * ratios[0]
