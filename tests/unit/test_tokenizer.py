"""Two tokenizers are one exactly if nothing is found in which they differ; where they differ is said."""

import json

import pytest
from tokenizers import Tokenizer

from kvferry.errors import KvferryError
from kvferry.files import read_json
from kvferry.prepare.models import save_model
from kvferry.prepare.pairs import prepare_pair
from kvferry.prepare.tokenizer import check_same_tokenizer, differences, tokenizer_id


def copied(tokenizer, directory):
    tokenizer.save_pretrained(directory)
    return type(tokenizer).from_pretrained(directory)


def rewritten(tokenizer, change):
    """The tokenizer with its rules changed."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    change(rules)
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules))


def swap_two_tokens(rules):
    words = rules["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]


def one_merge_less(rules):
    rules["model"]["merges"].pop()


def another_first_merge(rules):
    merges = rules["model"]["merges"]
    merges[0], merges[3] = merges[3], merges[0]


def spaces_first(rules):
    rules["pre_tokenizer"]["add_prefix_space"] = True


def unknown_tokens(rules):
    rules["model"]["fuse_unk"] = True


CHANGES = {
    "a token more": (lambda own: own.add_tokens(["<more>"]), ["264 and 265 tokens; token 264 is none and '<more>'"]),
    "two tokens in each other's place": (
        lambda own: rewritten(own, swap_two_tokens),
        ["token 35 is 'A' and 'B'"],
    ),
    "another end": (lambda own: setattr(own, "eos_token", "<pad>"), ["eos_token is '<eos>' and '<pad>'"]),
    "no padding": (lambda own: setattr(own, "pad_token", None), ["pad_token is '<pad>' and none"]),
    "a merge less": (lambda own: rewritten(own, one_merge_less), ["merge 4 of 5 and 4 is 'Ġ' + 'a' and none"]),
    "merges in another order": (
        lambda own: rewritten(own, another_first_merge),
        ["merge 0 of 5 and 5 is 't' + 'h' and 'i' + 'n'"],
    ),
    "another split": (lambda own: rewritten(own, spaces_first), ["other rules: pre_tokenizer"]),
    "another rule of the model": (lambda own: rewritten(own, unknown_tokens), ["other rules: fuse_unk"]),
}


@pytest.mark.parametrize("case", CHANGES)
def test_where_two_tokenizers_differ_is_said_and_their_ids_differ(case, tokenizer, tmp_path):
    change, words = CHANGES[case]
    other = copied(tokenizer, tmp_path)
    assert list(differences(tokenizer, other)) == []
    change(other)
    found = "; ".join(differences(tokenizer, other))
    assert all(word in found for word in words), found
    assert tokenizer_id(tokenizer) != tokenizer_id(other)
    with pytest.raises(KvferryError) as caught:
        check_same_tokenizer(tokenizer, other, "mine")
    assert str(caught.value) == (
        f"mine: the models have different tokenizers ({found}), so their caches do not stand for the same tokens; "
        "choose models of one family"
    )


def test_two_differences_are_both_named(tokenizer, tmp_path):
    other = copied(tokenizer, tmp_path)
    other.add_tokens(["<more>"])
    rewritten(other, one_merge_less)
    found = list(differences(tokenizer, other))
    assert any("tokens" in clause for clause in found)
    assert any(clause.startswith("merge 4") for clause in found)


def prepared(model, tokenizer, directory):
    """A directory as far as a pair reads it: a card that names where the tokenizer lies."""
    save_model(model, tokenizer, directory)
    (directory / "card.json").write_text(json.dumps({"location": str(directory)}))
    return directory


def test_a_pair_of_one_tokenizer_is_written(tiny_model, tokenizer, tmp_path):
    """Though one model has room for more tokens than the other, as Qwen2.5 models do."""
    source = prepared(tiny_model("llama", 1), tokenizer, tmp_path / "source")
    target = prepared(tiny_model("llama", 1, vocabulary=300), tokenizer, tmp_path / "target")
    prepare_pair("mine", source, target, tmp_path / "pair" / "tokenizer.json")
    assert read_json(tmp_path / "pair" / "tokenizer.json") == {"tokenizer_sha256": tokenizer_id(tokenizer)}


def test_a_pair_of_two_tokenizers_is_refused_and_nothing_written(tiny_model, tokenizer, tmp_path):
    other = copied(tokenizer, tmp_path / "other")
    other.add_tokens(["<more>"])
    source = prepared(tiny_model("llama", 1), tokenizer, tmp_path / "source")
    target = prepared(tiny_model("llama", 1), other, tmp_path / "target")
    with pytest.raises(
        KvferryError, match=r"^pairs\.yaml: mine: the models have different tokenizers \(264 and 265 tokens"
    ):
        prepare_pair("mine", source, target, tmp_path / "pair" / "tokenizer.json")
    assert not (tmp_path / "pair").exists()
