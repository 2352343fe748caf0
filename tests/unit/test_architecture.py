"""What a config alone tells: what can transfer passes, all else is refused with its reason before any weights are read."""

import pytest
from huggingface_hub import constants
from transformers import (
    BertConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Mistral3Config,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    T5Config,
    ViTConfig,
    WhisperConfig,
    Zamba2Config,
)

from kvferry.errors import KvferryError
from kvferry.prepare.architecture import check_architecture, reasons
from kvferry.prepare.models import make_card, prepare_by_reference

ROPE = {"rope_theta": 10000.0}
QUANTISED = {"quant_method": "fp8"}
TEXT = {"model_type": "ministral3"}

REFUSED = {
    "a window in every layer": (MistralConfig(), "32 of its 32 layers are sliding_attention (sliding_window: 4096)"),
    "a window in some": (
        Qwen2Config(num_hidden_layers=4, use_sliding_window=True, sliding_window=64, max_window_layers=3),
        "1 of its 4 layers are sliding_attention (sliding_window: 64), whose tokens do not see all earlier ones",
    ),
    "a window in every other": (Gemma2Config(), "13 of its 26 layers are sliding_attention"),
    "chunks": (Llama4TextConfig(), "36 of its 48 layers are chunked_attention"),
    "a window inside a larger model": (
        Mistral3Config(text_config={"model_type": "mistral", "sliding_window": 128}),
        "are sliding_attention (sliding_window: 128)",
    ),
    "linear attention": (Qwen3NextConfig(), "36 of its 48 layers are linear_attention, which do not keep plain keys"),
    "Mamba beside attention": (JambaConfig(), "28 of its 32 layers are linear_attention"),
    "Mamba with attention": (FalconH1Config(), "32 of its 32 layers are hybrid"),
    "Mamba with shared attention": (Zamba2Config(), "54 of its 54 layers are linear_attention or hybrid"),
    "Mamba alone": (MambaConfig(), "32 of its 32 layers are linear_attention"),
    "convolutions": (
        Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        "1 of its 2 layers are conv",
    ),
    "MLA of 2024": (DeepseekV2Config(), "it has multi-head latent attention (kv_lora_rank: 512)"),
    "MLA": (DeepseekV3Config(), "it has multi-head latent attention (kv_lora_rank: 512)"),
    "an encoder": (
        BertConfig(architectures=["BertForMaskedLM"]),
        "it is an encoder, whose tokens attend to later ones",
    ),
    "an encoder-decoder": (T5Config(), "it is an encoder-decoder, which reads its prompt in an encoder"),
    "speech to text": (WhisperConfig(), "it is an encoder-decoder"),
    "pictures alone": (ViTConfig(), "transformers has no causal language model of ViTConfig"),
    "a decoder that is no language model by itself": (
        Qwen2VLConfig(),
        "transformers has no causal language model of Qwen2VLTextConfig",
    ),
    "learned positions": (GPT2Config(), "its config names no rotary embedding (rope_parameters)"),
    "layers without rotation": (SmolLM3Config(), "9 of its 36 layers have no rotary embedding"),
    "two rotations": (
        Gemma3Config(text_config={"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
        "its rotary embeddings differ between layers (",
    ),
    "a rotation that changes with the length": (
        LlamaConfig(rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 2.0}),
        "its rotary embedding is of type dynamic, and known are default, linear, llama3, yarn",
    ),
    "quantised inside a larger model": (
        Mistral3Config(text_config=TEXT, quantization_config=QUANTISED),
        "its weights are quantised inside a larger model",
    ),
}
USABLE = {
    "no window": MistralConfig(sliding_window=None),
    "a window that no prompt outgrows": MistralConfig(sliding_window=8192, max_position_embeddings=8192),
    "a window that is off": Qwen2Config(use_sliding_window=False, sliding_window=64),
    "Ministral 3": Mistral3Config(text_config=TEXT),
    "a decoder with an encoder's switch": GPTNeoXConfig(),
    "SmolLM2": LlamaConfig(tie_word_embeddings=True),
}


def only_config(config: PretrainedConfig, directory):
    """A directory in the hub's layout as far as its config goes."""
    config.save_pretrained(directory)
    return {"kind": "local", "path": str(directory)}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_transfer_is_refused_with_its_reason_before_weights_are_looked_for(case, tmp_path):
    config, words = REFUSED[case]
    entry = only_config(config, tmp_path / "model")
    with pytest.raises(KvferryError) as caught:
        prepare_by_reference("mine", entry, tmp_path / "cards" / "mine")
    message = str(caught.value)
    assert message.startswith(f"model mine: a {config.model_type} model cannot be used: ")
    assert words in message
    assert message.endswith("; choose another model or checkpoint")
    assert "\n" not in message
    assert list((tmp_path / "cards").iterdir()) == []


@pytest.mark.parametrize("case", USABLE)
def test_nothing_speaks_against_what_can_transfer(case):
    assert list(reasons(USABLE[case])) == []


def test_every_claimed_kind_passes(half_split_model, with_vision):
    check_architecture(half_split_model.config, "mine")
    if half_split_model.config.model_type == "ministral3":
        check_architecture(with_vision(half_split_model).config, "mine")


def test_all_reasons_are_given_to_who_asks_for_them():
    found = list(reasons(Llama4TextConfig()))
    assert len(found) == 2
    assert "chunked_attention" in found[0]
    assert "no rotary embedding" in found[1]


def test_layers_of_different_shapes_are_refused():
    config = LlamaConfig(num_hidden_layers=2, per_layer_config={0: {"num_key_value_heads": 2}})
    with pytest.raises(KvferryError, match="its config gives its layers different shapes"):
        check_architecture(config, "mine")


def test_a_model_that_transformers_does_not_know_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "transformer_of_tomorrow"}')
    with pytest.raises(KvferryError) as caught:
        make_card("mine", {"kind": "local", "path": str(tmp_path)}, tmp_path)
    message = str(caught.value)
    assert "config.json: its config is not one of a model that transformers knows" in message
    assert "transformer_of_tomorrow" in message
    assert "\n" not in message


def test_of_a_repository_that_cannot_be_used_only_the_config_is_fetched(tmp_path, monkeypatch):
    folder, asked = tmp_path / "hub" / ("d" * 40), []
    JambaConfig().save_pretrained(folder)

    def give(repository, revision, allow_patterns):
        asked.append((repository, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", give)
    entry = {"kind": "hub", "repository": "owner/hybrid", "revision": "main"}
    with pytest.raises(KvferryError, match="a jamba model cannot be used"):
        prepare_by_reference("mine", entry, tmp_path / "cards" / "mine")
    assert asked == [("owner/hybrid", "main", ["config.json"])]
