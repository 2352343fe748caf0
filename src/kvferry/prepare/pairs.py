"""Pairs: two prepared models that are to share a cache stand for the same tokens. Does not know caches or mappers."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from kvferry.files import write_json
from kvferry.prepare.models import quiet, read_card
from kvferry.prepare.tokenizer import check_same_tokenizer, tokenizer_id


def prepare_pair(name: str, source: Path, target: Path, output: Path) -> None:
    """Write the id of the tokenizer that the prepared models in two directories share.

    Raises:
        KvferryError: they have different ones; in what is said.
    """
    quiet()
    own, other = (AutoTokenizer.from_pretrained(read_card(directory)["location"]) for directory in (source, target))
    check_same_tokenizer(own, other, f"pairs.yaml: {name}")
    write_json(output, {"tokenizer_sha256": tokenizer_id(own)})
