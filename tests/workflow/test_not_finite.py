"""A number that is not finite, in a model or in a mapper, stops the job with the place and the item in one sentence."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from lm_eval.api.instance import Instance
from safetensors.torch import load_file, save_file
from tiny import HEADLINE, RESULTS, SOURCE, TARGET, mapper_of
from transformers import AutoTokenizer

from kvferry.errors import KvferryError
from kvferry.evaluate.decode import decode
from kvferry.evaluate.diagnostics import diagnose
from kvferry.evaluate.finite import NotFinite, check_finite
from kvferry.evaluate.harness import SystemLM
from kvferry.files import read_sealed, sha256_file, write_sealed
from kvferry.kv.handoff import Native, read
from kvferry.kv.mapper import MANIFEST, WEIGHTS
from kvferry.kv.prefill import Span

BEFORE = ("prepare", "dump", "moments", "fit", "train", "identity")


@pytest.fixture(scope="module")
def fitted(tiny_project, tmp_path_factory):
    """A project with its mappers, of which nothing is answered yet."""
    place = shutil.copytree(tiny_project, tmp_path_factory.mktemp("fitted") / "project")
    before = Path.cwd()
    try:
        tiny.run(place, BEFORE)
    finally:
        os.chdir(before)
    return place


@pytest.fixture
def project(fitted, tmp_path, monkeypatch):
    """A copy of it as the working directory, with cards of the copied models."""
    monkeypatch.chdir(shutil.copytree(fitted, tmp_path / "project"))
    tiny.prepare(tiny.read_project())


def spoil(model: str, tensor: str, place: object, number: float = torch.inf) -> None:
    """Put a number into a model's weights, and prepare it again as it is now."""
    path = Path(model) / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor][place] = number
    save_file(tensors, path, metadata={"format": "pt"})
    tiny.prepare(tiny.read_project())


def refusal(job: str) -> str:
    with pytest.raises(KvferryError) as caught:
        tiny.JOBS[job](tiny.read_project())
    message = str(caught.value)
    assert "\n" not in message
    assert "look at the model" in message
    return message


def token(letter: str) -> int:
    return AutoTokenizer.from_pretrained(TARGET).convert_tokens_to_ids(letter)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("layer", [1, 2])
def test_a_dump_names_layer_and_sequence(layer, number):
    spoil(TARGET, f"model.layers.{layer}.self_attn.v_proj.weight", (0, 0), number)
    assert f"fit-00000: layer {layer} gave a value that is not finite in sequence 0, at token 0" in refusal("dump")


@pytest.mark.usefixtures("project")
def test_a_dump_names_the_layer_that_follows_a_broken_mlp():
    spoil(TARGET, "model.layers.1.mlp.down_proj.weight", (0, 0))
    assert "layer 2 gave a key that is not finite in sequence 0, at token 0" in refusal("dump")


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("model.layers.1.self_attn.v_proj.weight", "layer 1 of the target's cache holds a value that is not finite"),
        (
            "model.layers.0.mlp.up_proj.weight",
            "layer 1 of the target's cache holds a key that is not finite, of token 0",
        ),
        ("model.norm.weight", "the target's logits are not finite, though its cache is in every layer"),
    ],
)
def test_a_chunk_is_named_with_the_layer_of_the_models_own_cache(tensor, words):
    spoil(SOURCE, tensor, 0)
    message = refusal("evaluate_models")
    assert "the target on its own, chunk 0 " in message
    assert words in message
    assert not list((RESULTS / "records" / "native" / SOURCE).glob("**/*.json"))


@pytest.mark.usefixtures("project")
def test_the_one_item_that_has_a_broken_token_is_named():
    """No text but that of one item holds this digit, in a benchmark of nine of which six are drawn."""
    spoil(SOURCE, "model.embed_tokens.weight", token("5"))
    message = refusal("evaluate_models")
    assert "native, item winogrande/5: layer 0 of the target's cache holds a key that is not finite" in message
    record = RESULTS / "records" / "native" / SOURCE / "prefix_perplexity.json"
    assert list((record.parent / ".kept").glob("prefix_perplexity-*"))
    assert not record.exists()


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(("name", "what"), [("k.1.weight", "key"), ("v.2.bias", "value")])
def test_a_mapped_cache_is_named_by_its_mapper(name, what):
    weights, layer = mapper_of(HEADLINE) / WEIGHTS, name.split(".")[1]
    tensors = load_file(weights)
    tensors[name].view(-1)[0] = torch.inf
    save_file(tensors, weights)
    manifest = read_sealed(weights.with_name(MANIFEST), "manifest")
    write_sealed(weights.with_name(MANIFEST), manifest | {"weights_sha256": sha256_file(weights)})
    message = refusal("evaluate_pair")
    assert f"{HEADLINE}, chunk 0 " in message
    assert f"layer {layer} of the target's cache holds a {what} that is not finite, of token 0" in message


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_keeps_its_number_when_others_have_left_the_batch(place, tiny_model):
    """Row 0 is done at once; the broken token is what another row writes next."""
    model = tiny_model("llama", 2)
    ids = torch.tensor([[7, 8, 9], [10, 11, 12], [13, 14, 15]])
    span = Span(ids, torch.ones_like(ids))
    logits, prefix = read(model, Native(model).start(3), span, logits_to_keep=1)
    first = logits[:, -1].argmax(-1)
    with torch.no_grad():
        model.model.embed_tokens.weight[first[place]] = torch.nan
    ready = [] if place == 0 else [first[0].item()]
    with pytest.raises(NotFinite) as caught:
        decode(model, prefix, logits[:, -1], lambda written: written == ready, 4)
    assert caught.value.row == place
    assert "layer 0 of the target's cache holds a key that is not finite, of token 3" in str(caught.value)


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("places", [None, [0, 0, 2, 1]])
def test_the_row_of_a_place_is_found(number, places, tiny_model):
    model = tiny_model("llama", 2)
    ids = torch.tensor([[7, 8], [9, 10], [11, 12]])
    _, prefix = read(model, Native(model).start(3), Span(ids, torch.ones_like(ids)))
    logits = torch.zeros(3 if places is None else 4, 20)
    numbers = [40, 41, 42]
    check_finite(logits, prefix, numbers, places)
    logits[2, 7] = number
    with pytest.raises(NotFinite) as caught:
        check_finite(logits, prefix, numbers, places)
    assert caught.value.row == 42
    assert "logits are not finite" in str(caught.value)


def test_a_question_that_is_answered_in_words_is_named(tiny_model, tokenizer):
    model = tiny_model("llama", 2)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids("7")] = torch.nan
    how = {"until": ["\n"], "max_gen_toks": 3, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (f"the cat {number} in the hat", how), 0, ("gsm8k", number, 1))
        for number in (5, 7)
    ]
    answering = SystemLM(Native(model), tokenizer, hold_back=2, batch_tokens=400)
    with pytest.raises(
        KvferryError, match="gsm8k, question 7: layer 0 of the target's cache holds a key that is not finite"
    ):
        answering.generate_until(requests)
    assert len(answering.generate_until(requests[:1])) == 1


def test_diagnostics_name_the_text_and_the_layer(tiny_model):
    source, target = tiny_model("llama", 2), tiny_model("llama", 3, seed=1)
    with torch.no_grad():
        target.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.inf
    with pytest.raises(
        KvferryError, match="text hellaswag/3: the target's attention is not finite in layer 1; use another"
    ):
        diagnose(source, target, {}, {"hellaswag/3": (5, 6, 7)})
