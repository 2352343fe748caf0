"""A model is found wherever a user has it, and is known by its files."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvferry.api import models as module
from kvferry.api.models import card_at, identified, load_model
from kvferry.errors import KvferryError
from kvferry.prepare.models import CARD

IDENTITY = ("config_sha256", "tokenizer_sha256", "weights_id")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tiny_model, tokenizer, save_prepared):
    return save_prepared(tmp_path_factory.mktemp("models"), tiny_model("llama", 2), tokenizer, "tiny")


@pytest.fixture
def plain(prepared, tmp_path):
    """The same files without a card."""
    directory = shutil.copytree(prepared[0], tmp_path / "plain")
    (directory / CARD).unlink()
    return directory


@pytest.fixture
def snapshot(plain, tmp_path):
    """The same files in the hub's cache."""
    return shutil.copytree(plain, tmp_path / "hub/models--owner--tiny/snapshots" / COMMIT)


def identity(card):
    return {key: card[key] for key in IDENTITY}


def test_a_prepared_model_is_loaded_also_after_its_folder_was_moved(prepared, tmp_path):
    moved = shutil.copytree(prepared[0], tmp_path / "elsewhere" / prepared[0].name)
    found = load_model(moved)
    assert found.card == prepared[1]
    assert found.model.name_or_path == str(moved)


def test_a_directory_without_a_card_is_the_same_model(prepared, plain):
    found = load_model(str(plain), dtype="bfloat16")
    assert identity(found.card) == identity(prepared[1])
    assert found.model.dtype == torch.bfloat16
    assert not (plain / CARD).exists()


def test_a_snapshot_of_the_hub_is_the_same_model_from_its_commit(snapshot, prepared):
    card = load_model(snapshot).card
    assert identity(card) == identity(prepared[1])
    assert (card["model"], card["kind"]) == ("tiny", "hub")
    assert card["origin"] == f"owner/tiny at {COMMIT}"


@pytest.mark.parametrize(("asked", "revision"), [("owner/tiny", "unpinned"), ("owner/tiny@v2", "v2")])
def test_a_name_is_fetched_from_the_hub_at_its_revision(asked, revision, snapshot, monkeypatch):
    wanted = []
    monkeypatch.setattr(module, "fetch_snapshot", lambda *of: wanted.append(of) or (snapshot, COMMIT))
    assert load_model(asked).card["origin"] == f"owner/tiny at {COMMIT}"
    assert wanted == [("owner/tiny", revision)]


def test_a_model_in_memory_is_known_by_its_files(prepared, plain, snapshot):
    for directory in (prepared[0], plain):
        own = AutoModelForCausalLM.from_pretrained(directory)
        found = identified(own)
        assert found.model is own
        assert identity(found.card) == identity(prepared[1])
        assert found.tokenizer("the")["input_ids"]
    assert identity(identified(AutoModelForCausalLM.from_pretrained(snapshot)).card) == identity(prepared[1])


def test_a_model_in_memory_from_the_hub_is_looked_up_at_its_commit(snapshot, monkeypatch):
    wanted = []
    monkeypatch.setattr(module, "fetch_snapshot", lambda *of: wanted.append(of) or (snapshot, COMMIT))
    own = AutoModelForCausalLM.from_pretrained(snapshot)
    own.name_or_path, own.config._commit_hash = "owner/tiny", COMMIT
    assert identified(own).card["origin"] == f"owner/tiny at {COMMIT}"
    assert wanted == [("owner/tiny", COMMIT)]


def test_other_weights_have_another_card(prepared, plain):
    tensors = load_file(plain / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    assert card_at(plain)["weights_id"] != prepared[1]["weights_id"]


def test_files_that_changed_since_a_run_prepared_them_are_refused(prepared, tmp_path):
    directory = shutil.copytree(prepared[0], tmp_path / "changed" / prepared[0].name)
    own = AutoModelForCausalLM.from_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for use in (lambda: load_model(directory), lambda: identified(own)):
        with pytest.raises(KvferryError, match="its weights changed since the model was prepared"):
            use()


def test_a_model_whose_config_was_changed_in_memory_is_refused(prepared):
    own = AutoModelForCausalLM.from_pretrained(prepared[0])
    own.config.rope_parameters["rope_theta"] = 77.0
    with pytest.raises(KvferryError, match="its config is not that of the model in memory"):
        identified(own)
