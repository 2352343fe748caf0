"""A decoder is read whole, by itself or out of a larger model, whatever the layout; gaps are refused, never filled."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mistral3ForConditionalGeneration

from kvferry.errors import KvferryError
from kvferry.prepare.decoder import decoder_config, load_decoder
from kvferry.prepare.models import load_model, prepare_by_reference, save_model

IDS = torch.arange(3, 60)[None]
HUB, OWN = True, False


@torch.inference_mode()
def logits(model):
    return model(input_ids=IDS).logits


def edit_config(directory, change):
    path = directory / "config.json"
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


def forget_ties(settings):
    """As checkpoints that rely on the defaults of their classes."""
    for part in (settings, settings["text_config"]):
        part.pop("tie_word_embeddings", None)


@pytest.mark.parametrize("layout", [HUB, OWN], ids=["the hub's layout", "transformers' own"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("said", [True, False], ids=["ties said", "ties left to defaults"])
def test_out_of_a_vision_model_comes_its_decoder(layout, tied, said, tiny_model, with_vision, tmp_path):
    decoder = tiny_model("ministral3", tie_word_embeddings=tied)
    whole = with_vision(decoder)
    whole.save_pretrained(tmp_path, save_original_format=layout)
    if not said:
        edit_config(tmp_path, forget_ties)
    model = load_decoder(tmp_path, torch.float32)
    assert type(model) is type(decoder)
    assert model.num_parameters() == decoder.num_parameters()
    torch.testing.assert_close(logits(model), logits(whole), rtol=0, atol=0)
    again = Mistral3ForConditionalGeneration.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(model), logits(again), rtol=0, atol=0)


def test_a_decoder_by_itself_is_read_as_transformers_does(half_split_model, tmp_path):
    half_split_model.save_pretrained(tmp_path)
    model = load_decoder(tmp_path, torch.float32)
    torch.testing.assert_close(logits(model), logits(half_split_model), rtol=0, atol=0)
    assert decoder_config(tmp_path).to_dict() == model.config.to_dict()


def test_a_decoder_that_is_saved_again_is_a_model_by_itself(tiny_model, with_vision, tokenizer, tmp_path):
    whole = with_vision(tiny_model("ministral3"))
    whole.save_pretrained(tmp_path / "whole")
    save_model(load_decoder(tmp_path / "whole", torch.float32), tokenizer, tmp_path / "alone")
    alone, report = AutoModelForCausalLM.from_pretrained(tmp_path / "alone", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(logits(alone), logits(whole), rtol=0, atol=0)


def without_a_norm(tensors):
    del tensors["model.layers.1.input_layernorm.weight"]


def with_a_cut_norm(tensors):
    tensors["model.layers.1.input_layernorm.weight"] = tensors["model.layers.1.input_layernorm.weight"][:-1].clone()


def under_other_names(tensors):
    for name in list(tensors):
        tensors[f"decoder.{name}"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without_a_norm, "1 of its weights are missing, the first is model.layers.1.input_layernorm.weight"),
        (with_a_cut_norm, "1 of its weights are mismatched, the first is .*model.layers.1.input_layernorm.weight"),
        (under_other_names, "30 of its weights are missing"),
    ],
)
def test_weights_that_are_not_all_there_are_refused(spoil, words, tiny_model, tokenizer, tmp_path):
    save_model(tiny_model("llama"), tokenizer, tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "saved" / "model.safetensors", metadata={"format": "pt"})
    prepare_by_reference("tiny", {"kind": "local", "path": str(tmp_path / "saved")}, tmp_path / "tiny")
    with pytest.raises(KvferryError, match=words):
        load_model(tmp_path / "tiny")


def test_cut_weights_of_a_vision_model_are_refused_in_one_sentence(tiny_model, with_vision, tokenizer, tmp_path):
    """Of which some are looked at before their checksum, since they say whether the output head is the embedding."""
    saved = tmp_path / "saved"
    with_vision(tiny_model("ministral3", tie_word_embeddings=True)).save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    entry = {"kind": "local", "path": str(saved)}
    prepare_by_reference("tiny", entry, tmp_path / "tiny")
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    with pytest.raises(KvferryError, match=r"model tiny cannot be loaded \(.+\); delete"):
        load_model(tmp_path / "tiny")
    with pytest.raises(KvferryError, match=r"model tiny: .+; this model cannot be used"):
        prepare_by_reference("tiny", entry, tmp_path / "again")
    assert not (tmp_path / "again").exists()
