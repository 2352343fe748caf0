"""Model cards: geometry and identity of what transformers would load, and refusals in one sentence; the hub is a folder."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig

from kvferry.errors import KvferryError
from kvferry.files import sha256_file
from kvferry.prepare.hub import fetch_snapshot
from kvferry.prepare.models import (
    CARD,
    config_id,
    load_model,
    make_card,
    prepare_by_reference,
    read_card,
    save_model,
    tokenizer_id,
    weights_id,
)

COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40
IDS = torch.arange(3, 15)[None]
IDENTITY = ("config_sha256", "tokenizer_sha256", "weights_id")


@pytest.fixture(scope="module")
def saved(tiny_model, tokenizer, tmp_path_factory):
    """A directory in the hub's layout."""
    directory = tmp_path_factory.mktemp("saved") / "tiny"
    save_model(tiny_model("llama", 3, seed=1), tokenizer, directory)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    """The same directory, to be altered."""
    return shutil.copytree(saved, tmp_path / "copy")


def local(directory):
    return {"kind": "local", "path": str(directory), "licence": "Apache-2.0"}


def weights_of(directory):
    (path,) = directory.glob("*.safetensors")
    return path


def logits(model):
    with torch.inference_mode():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("llama", {"heads": 4, "kv_heads": 2, "head_dim": 8}),
        ("llama", {"heads": 4, "kv_heads": 4, "head_dim": 4}),
        ("qwen2", {"heads": 4, "kv_heads": 2, "head_dim": 8}),
        ("qwen3", {"heads": 2, "kv_heads": 1, "head_dim": 16}),
    ],
)
def test_a_card_holds_the_geometry_that_the_cache_has(tiny_model, tokenizer, tmp_path, kind, shape):
    model = tiny_model(kind, 2, **shape)
    save_model(model, tokenizer, tmp_path)
    card = make_card("tiny", local(tmp_path), tmp_path)
    with torch.inference_mode():
        cache = model(input_ids=IDS, use_cache=True)["cache"]
    assert card["layers"] == len(cache.layers)
    assert (1, card["kv_heads"], IDS.shape[1], card["head_dim"]) == tuple(cache.layers[0].keys.shape)
    assert card["query_heads"] == shape["heads"]
    assert card["hidden_size"] == model.get_input_embeddings().weight.shape[1]
    assert card["vocab_size"] == model.get_input_embeddings().weight.shape[0]
    assert card["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_a_card_says_where_the_model_comes_from(saved):
    card = make_card("tiny", local(saved), saved)
    assert card["model"] == "tiny"
    assert card["kind"] == "local"
    assert card["origin"] == f"directory {saved}"
    assert card["location"] == str(saved)
    assert card["licence"] == "Apache-2.0"
    assert all(len(card[key]) == 64 for key in IDENTITY)


def test_the_same_model_saved_twice_has_the_same_ids(tiny_model, tokenizer, saved, tmp_path):
    save_model(tiny_model("llama", 3, seed=1), tokenizer, tmp_path / "elsewhere")
    one, other = (make_card("tiny", local(path), path) for path in (saved, tmp_path / "elsewhere"))
    assert [one[key] for key in IDENTITY] == [other[key] for key in IDENTITY]


def test_a_model_saved_after_loading_has_the_same_ids(saved, tmp_path):
    prepare_by_reference("tiny", local(saved), tmp_path / "tiny")
    loaded = load_model(tmp_path / "tiny")
    save_model(loaded.model, loaded.tokenizer, tmp_path / "again")
    again = make_card("tiny", local(tmp_path / "again"), tmp_path / "again")
    assert [again[key] for key in IDENTITY] == [loaded.card[key] for key in IDENTITY]


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"seed": 2}, {"weights_id"}),
        ({"rms_norm_eps": 1e-3}, {"config_sha256"}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, {"config_sha256"}),
    ],
    ids=["seed", "epsilon", "theta"],
)
def test_another_model_differs_where_it_is_another(tiny_model, tokenizer, saved, tmp_path, changes, differing):
    save_model(tiny_model("llama", 3, **{"seed": 1, **changes}), tokenizer, tmp_path)
    one, other = (make_card("tiny", local(path), path) for path in (saved, tmp_path))
    assert {key for key in IDENTITY if one[key] != other[key]} == differing


@pytest.mark.parametrize(
    ("key", "value"),
    [("transformers_version", "0.0"), ("dtype", "float16"), ("_name_or_path", "x"), ("use_cache", False)],
)
def test_what_does_not_change_the_computation_does_not_change_the_id_of_a_config(saved, key, value):
    config = AutoConfig.from_pretrained(saved).to_dict()
    assert config_id(config | {key: value}) == config_id(config)
    assert config_id(config | {"num_hidden_layers": 4}) != config_id(config)


def changed(tokenizer, change, directory):
    """A copy of the tokenizer, changed."""
    tokenizer.save_pretrained(directory)
    copy = type(tokenizer).from_pretrained(directory)
    change(copy)
    return copy


def without_a_merge(tokenizer):
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["model"]["merges"].pop()
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules))


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: tokenizer.add_tokens(["<more>"]),
        lambda tokenizer: setattr(tokenizer, "eos_token", "<pad>"),
        without_a_merge,
    ],
    ids=["one token more", "another end token", "one merge less"],
)
def test_another_tokenizer_has_another_id(tokenizer, tmp_path, change):
    assert tokenizer_id(changed(tokenizer, change, tmp_path)) != tokenizer_id(tokenizer)


def test_padding_and_truncation_do_not_make_another_tokenizer(tokenizer, tmp_path):
    def use(tokenizer):
        tokenizer(["in the hat", "a cat"], padding=True, truncation=True, max_length=4)

    assert tokenizer_id(changed(tokenizer, use, tmp_path)) == tokenizer_id(tokenizer)


def test_a_local_model_stays_where_it_is_and_loads_by_its_card(tiny_model, tokenizer, saved, tmp_path):
    prepare_by_reference("tiny", local(saved), tmp_path / "tiny")
    assert [file.name for file in (tmp_path / "tiny").iterdir()] == [CARD]
    loaded = load_model(tmp_path / "tiny")
    assert loaded.card == read_card(tmp_path / "tiny") == make_card("tiny", local(saved), saved)
    assert not loaded.model.training
    assert loaded.tokenizer.get_vocab() == tokenizer.get_vocab()
    torch.testing.assert_close(logits(loaded.model), logits(tiny_model("llama", 3, seed=1)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_loads_in_the_dtype_that_is_asked_for(saved, tmp_path, dtype):
    prepare_by_reference("tiny", local(saved), tmp_path / "tiny")
    assert load_model(tmp_path / "tiny", dtype=dtype).model.dtype == getattr(torch, dtype)


def nudge(path):
    tensors = load_file(path)
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (nudge, "weights changed since the model was prepared"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), "weights changed since the model was prepared"),
        (lambda path: path.unlink(), "no .safetensors weights"),
    ],
    ids=["a number", "truncated", "gone"],
)
def test_weights_that_changed_since_are_refused(copy, tmp_path, alter, message):
    prepare_by_reference("tiny", local(copy), tmp_path / "tiny")
    alter(weights_of(copy))
    with pytest.raises(KvferryError, match=message) as caught:
        load_model(tmp_path / "tiny")
    assert str(copy) in str(caught.value)


def test_a_model_that_is_broken_otherwise_is_refused(copy, tmp_path):
    prepare_by_reference("tiny", local(copy), tmp_path / "tiny")
    (copy / "config.json").write_text("{}")
    with pytest.raises(KvferryError, match=r"model tiny cannot be loaded \(.+\); delete .+ and run again"):
        load_model(tmp_path / "tiny")


def test_a_model_without_a_card_is_refused(tmp_path):
    with pytest.raises(KvferryError, match=r"card\.json: unreadable model card"):
        load_model(tmp_path)


def no_weights(directory):
    weights_of(directory).rename(directory / "pytorch_model.bin")


def no_tokenizer(directory):
    (directory / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    "spoil",
    [no_weights, no_tokenizer, lambda directory: (directory / "config.json").unlink(), shutil.rmtree],
    ids=["no safetensors", "no tokenizer", "no config", "no directory"],
)
def test_a_directory_that_is_no_model_is_refused_and_leaves_no_card(copy, tmp_path, spoil):
    spoil(copy)
    with pytest.raises(KvferryError) as caught:
        prepare_by_reference("tiny", local(copy), tmp_path / "cards" / "tiny")
    assert str(copy) in str(caught.value)
    assert list((tmp_path / "cards").iterdir()) == []


def test_weights_in_several_files_have_an_id_of_all_of_them(copy):
    before = weights_id(copy)
    save_file({"more": torch.zeros(1)}, copy / "more.safetensors")
    assert weights_id(copy) != before


def test_weights_are_the_same_in_the_hubs_cache_and_in_a_copy_and_not_read_there(copy, tmp_path, monkeypatch):
    blobs, snapshot = tmp_path / "models--owner--tiny/blobs", tmp_path / "models--owner--tiny/snapshots" / COMMIT
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in copy.iterdir():
        blob = blobs / sha256_file(file)
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    wanted = weights_id(copy)
    monkeypatch.setattr("kvferry.prepare.models.sha256_file", lambda *of: pytest.fail("a file of the cache is read"))
    assert weights_id(snapshot) == wanted


@pytest.fixture
def hub(saved, tmp_path, monkeypatch):
    """The hub's cache on this machine with one repository at two commits, of which main is the first; no network."""
    repository = tmp_path / "hub" / "models--owner--tiny"
    for commit in (COMMIT, OTHER_COMMIT):
        shutil.copytree(saved, repository / "snapshots" / commit)
    for name, commit in (("main", COMMIT), ("v2", OTHER_COMMIT)):
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repository


@pytest.mark.parametrize(
    ("revision", "commit"),
    [("unpinned", COMMIT), ("main", COMMIT), ("v2", OTHER_COMMIT), (OTHER_COMMIT, OTHER_COMMIT)],
)
def test_a_snapshot_is_found_and_its_commit_recorded(hub, tmp_path, revision, commit):
    entry = {"kind": "hub", "repository": "owner/tiny", "revision": revision}
    assert fetch_snapshot("owner/tiny", revision) == (hub / "snapshots" / commit, commit)
    prepare_by_reference("tiny", entry, tmp_path / "tiny")
    card = read_card(tmp_path / "tiny")
    assert card["weights_id"] == weights_id(hub / "snapshots" / commit)
    assert card["location"] == str(hub / "snapshots" / commit)
    assert card["origin"] == f"owner/tiny at {commit}"
    assert load_model(tmp_path / "tiny").model.config.num_hidden_layers == card["layers"] == 3
