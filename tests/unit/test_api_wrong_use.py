"""Every wrong use of the API is refused in one sentence that says what is wrong and what to do, and changes nothing."""

import shutil

import pytest
import torch
from small_family import (
    EXACT,
    FITTED,
    HEADED,
    LARGE,
    SMALL,
    build_family,
    loaded,
    mapper_of,
    read_by,
)
from small_fits import flip_a_byte
from transformers import DynamicCache, LlamaForCausalLM

from kvferry.api import Handoff, Session, load_mapper, load_model
from kvferry.api.models import identified
from kvferry.errors import KvferryError
from kvferry.kv.cache import cache_length

IDS = torch.arange(5, 17).view(1, -1)


@pytest.fixture(scope="module")
def results(tmp_path_factory, tiny_model, tokenizer, save_prepared, identity_mapper):
    return build_family(tmp_path_factory.mktemp("results"), tiny_model, tokenizer, save_prepared, identity_mapper)


@pytest.fixture(scope="module")
def models(results):
    return {name: loaded(results, name) for name in (SMALL, LARGE)}


@pytest.fixture(scope="module")
def handoff(results, models):
    return Handoff(models[SMALL], models[LARGE], mapper_of(results, SMALL, LARGE))


@pytest.fixture(scope="module")
def source_cache(handoff):
    return read_by(handoff.source.model, IDS)


def refused(call):
    """The sentence of a refusal: one line."""
    with pytest.raises(KvferryError) as caught:
        call()
    sentence = str(caught.value)
    assert sentence
    assert "\n" not in sentence
    return sentence


WHERE = [
    ("nowhere", "nowhere: is no directory; give the directory of a model"),
    ("/nowhere/owner", "/nowhere/owner: is no directory; give the directory of a model"),
    ("./owner/name", "./owner/name: is no directory; give the directory of a model"),
    ("results", "results: holds neither card.json nor config.json; give the directory of a model"),
]


@pytest.mark.parametrize(("where", "sentence"), WHERE)
def test_where_there_is_no_model(where, sentence, tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    assert refused(lambda: load_model(where)).startswith(sentence)


COMPUTE = [
    ({"dtype": "float12"}, "dtype: 'float12' is not known; use one of float32, bfloat16, float16"),
    ({"device": "meta"}, "device: 'meta' is not supported; use one of cpu, cuda"),
    ({"device": "mps"}, "device: 'mps' is not supported; use one of cpu, cuda"),
    ({"device": "cdua"}, "device: 'cdua' is no device of torch; use cpu or cuda"),
]


@pytest.mark.parametrize(("compute", "sentence"), COMPUTE)
def test_an_unknown_device_or_dtype(compute, sentence, results):
    assert refused(lambda: load_model(results / "models" / SMALL, **compute)) == sentence


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(results):
    sentence = refused(lambda: load_model(results / "models" / SMALL, device="cuda:0"))
    assert sentence == "device: cuda:0 is asked for, but torch sees no CUDA device here; use cpu"


def test_what_is_no_model(models, results):
    assert refused(lambda: identified("smollm2-24l")).startswith("a str is no model; give what kvferry.load_model")
    made = LlamaForCausalLM(models[LARGE].model.config)
    made.name_or_path = ""
    assert "does not say which files it was loaded from" in refused(lambda: identified(made))


def test_where_there_is_no_mapper(models, tmp_path):
    for load in (Handoff.load, lambda path: load_mapper(path, models[SMALL], models[LARGE])):
        assert refused(lambda load=load: load(tmp_path)).startswith(
            f"{tmp_path}: holds no mapper (no manifest.json); give"
        )


def test_a_mapper_of_other_models(results, models):
    directory = mapper_of(results, SMALL, LARGE)
    sentence = refused(lambda: load_mapper(directory, models[LARGE], models[SMALL]))
    assert f"was fitted for another source ({SMALL}" in sentence
    assert f"was fitted for another target ({LARGE}" in refused(
        lambda: Handoff(models[SMALL], models[SMALL], directory)
    )


def test_an_altered_mapper(results, models, tmp_path):
    directory = shutil.copytree(mapper_of(results, SMALL, LARGE), tmp_path / "mapper")
    flip_a_byte(directory / "mapper.safetensors")
    assert "altered" in refused(lambda: load_mapper(directory, models[SMALL], models[LARGE]))
    (directory / "mapper.safetensors").unlink()
    assert "missing" in refused(lambda: load_mapper(directory, models[SMALL], models[LARGE]))


def test_models_that_are_not_where_the_run_keeps_them(results, tmp_path):
    directory = shutil.copytree(mapper_of(results, SMALL, LARGE), tmp_path / "a/pairs/b/mappers/c")
    assert f"its source {SMALL} is not at {tmp_path / 'a/models'}" in refused(lambda: Handoff.load(directory))
    found = refused(lambda: Handoff.load(directory, source=results / "models" / SMALL))
    assert f"its target {LARGE} is not at" in found
    assert found.endswith("give target: the directory of the model or its name on the hub")


def test_a_mapper_that_was_loaded_for_other_models_in_memory(results, handoff, models):
    again = loaded(results, LARGE)
    assert "loaded for another target in memory" in refused(lambda: Handoff(models[SMALL], again, handoff.mapper))


def caches(handoff, source_cache):
    """Caches that are not the source's, by what is wrong."""
    layers = [(layer.keys, layer.values) for layer in source_cache.layers]
    short = [(layers[0][0][:, :, 3:], layers[0][1][:, :, 3:]), *layers[1:]]
    return {
        "give the DynamicCache": layers,
        "the source cache is empty": DynamicCache(),
        "has layers of 9 to 12 tokens": DynamicCache(short),
        f"has 3 layers with 2 KV heads of 8, but {SMALL} has 2 layers": read_by(handoff.target.model, IDS),
        "has 2 layers with 1 KV heads of 8, but": DynamicCache(
            [(keys[:, :1], values[:, :1]) for keys, values in layers]
        ),
        "257 tokens are more than the 256 positions": DynamicCache(
            [(torch.zeros(1, 2, 257, 8), torch.zeros(1, 2, 257, 8))] * 2
        ),
    }


@pytest.mark.parametrize("number", range(6))
def test_a_cache_that_is_not_the_sources(number, handoff, source_cache):
    sentence, cache = list(caches(handoff, source_cache).items())[number]
    assert sentence in refused(lambda: handoff.mapper.translate(cache))


def test_a_mask_or_ids_or_a_cache_to_grow_that_do_not_belong_to_it(handoff, source_cache):
    translate, ones = handoff.mapper.translate, torch.ones(1, 11).long()
    assert "attention_mask is [1, 11], but the source cache has 1 rows of 12 slots" in refused(
        lambda: translate(source_cache, attention_mask=ones)
    )
    assert "input_ids is [2, 12], but" in refused(lambda: translate(source_cache, input_ids=IDS.expand(2, -1)))
    longer = translate(read_by(handoff.source.model, IDS.repeat(1, 2)))
    assert "into has 3 layers of 1 rows, 24 slots" in refused(lambda: translate(source_cache, into=longer))
    assert "is no cache of" in refused(lambda: translate(source_cache, into=source_cache))
    assert cache_length(longer) == 24


def test_a_native_head_without_ids(results, models, source_cache):
    mapper = load_mapper(mapper_of(results, SMALL, LARGE, HEADED), models[SMALL], models[LARGE])
    sentence = refused(lambda: mapper.translate(source_cache))
    assert sentence == "this mapper leaves the first 3 tokens to the target (native_head); give input_ids"


PROMPTS = [
    ("", "the prompt is empty; give a text of at least one token"),
    ([], "the prompt is empty; give a text of at least one token"),
    (
        ["one", "two"],
        "the prompt must be one text or one row of token ids, not 2 of str; for a batch use Handoff.inputs",
    ),
    (IDS.repeat(3, 1), "the prompt must be one text or one row of token ids, not 3 of list"),
    ([5, 6, 264], f"token 264 is not one of the 264 of {SMALL}"),
    ([5, -1], "token -1 is not one of"),
    ([7] * 257, f"257 tokens are more than the 256 positions of {SMALL}; shorten the text or ask for less"),
    ([7] * 250, f"258 tokens are more than the 256 positions of {LARGE}"),
]


@pytest.mark.parametrize(("prompt", "sentence"), PROMPTS, ids=range(len(PROMPTS)))
def test_a_prompt_that_cannot_be_read(prompt, sentence, handoff):
    assert refused(lambda: handoff.generate(prompt, 8)).startswith(sentence)


@pytest.mark.parametrize("value", [0, -3])
def test_counts_less_than_one(value, handoff):
    for call, name in (
        (lambda: handoff.generate("the", value), "max_new_tokens"),
        (lambda: handoff.alone("the", value), "max_new_tokens"),
        (lambda: handoff.generate("the", 2, hold_back=value), "hold_back"),
        (lambda: handoff.inputs("the", hold_back=value), "hold_back"),
    ):
        assert refused(call) == f"{name}: {value} is too little; it must be 1 or more"


def test_a_count_that_is_no_whole_number(handoff):
    sentence = "max_new_tokens: 2.5 is no whole number; give one of 1 or more"
    assert refused(lambda: handoff.generate("the", 2.5)) == sentence


@pytest.mark.parametrize("prompt", ["", [], torch.empty(0, dtype=torch.long)])
def test_a_prompt_without_tokens(prompt, handoff):
    for call in (handoff.generate, handoff.alone):
        assert refused(lambda call=call: call(prompt, 4)).startswith("the prompt is empty")


def test_a_model_of_ones_own_with_a_cut_file_is_not_to_be_deleted(results, tmp_path):
    own = shutil.copytree(results / "models" / SMALL, tmp_path / "own", ignore=shutil.ignore_patterns("card.json"))
    (weights,) = own.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    assert refused(lambda: load_model(own)).endswith("give a whole copy of it")


def test_the_folder_of_a_prepared_model_from_within(results, monkeypatch):
    monkeypatch.chdir(results / "models" / SMALL)
    assert load_model(".").card["model"] == SMALL


def test_a_batch_that_transformers_could_not_go_on_from(handoff):
    right = torch.tensor([[1] * 12, [1] * 8 + [0] * 4])
    assert "a row ends in padding; pad the batch on the left" in refused(
        lambda: handoff.inputs(IDS.repeat(2, 1), right)
    )
    assert "attention_mask is [2, 11] and input_ids [2, 12]" in refused(
        lambda: handoff.inputs(IDS.repeat(2, 1), right[:, 1:])
    )
    assert "input_ids must be a tensor of [batch, tokens]" in refused(lambda: handoff.inputs(IDS[0]))
    assert "input_ids must be a tensor of [batch, tokens]" in refused(lambda: handoff.inputs(IDS[:, :0]))
    assert "257 tokens are more than" in refused(lambda: handoff.inputs(torch.full((2, 257), 7)))
    assert "token 300 is not one of" in refused(lambda: handoff.inputs(torch.tensor([[5, 6], [300, 7]])))


def test_mappers_that_are_not_there_and_back(results, models, handoff):
    exact = load_mapper(mapper_of(results, LARGE, LARGE, EXACT), models[LARGE], models[LARGE])
    assert "is not the way back" in refused(lambda: Session(handoff.mapper, handoff.mapper))
    assert "is not the way back" in refused(lambda: Session(handoff.mapper, exact))
    again = load_mapper(mapper_of(results, LARGE, SMALL, FITTED), loaded(results, LARGE), models[SMALL])
    assert "with the same two models in memory" in refused(lambda: Session(handoff.mapper, again))


def test_a_session_refuses_and_stays_as_it_was(handoff):
    session = Session(handoff.mapper)
    assert refused(lambda: session.generate(3)) == "there is nothing to go on from; add a text first"
    session.add([5, 6, 7])
    assert "is not one of" in refused(lambda: session.add([5, 999]))
    assert "positions" in refused(lambda: session.add([5] * 254))
    assert "positions" in refused(lambda: session.generate(254))
    assert session.tokens == (5, 6, 7)
    assert session.switch().to == LARGE
    assert refused(session.switch) == f"there is no mapper from {LARGE} back; give one to go on with the other model"
    assert session.model == LARGE
    assert session.generate(2).tokens
