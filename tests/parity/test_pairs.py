"""Pairs of every architecture from their files to a greedy answer, by the steps of a run: cards, dumps, probe, ranking, ridge,
saved mapper, hand-off.

In each pair the target computes the source's function with one layer more, so its mapper is known: what the chain fits must
give the target's own logits and texts, and those must be transformers' own.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deeper import ORDER, deepen
from huggingface_hub import constants
from transformers import PreTrainedModel

from kvferry.errors import KvferryError
from kvferry.evaluate.controls import ZeroCache
from kvferry.evaluate.decode import decode, read_to_end
from kvferry.fit.artifact import Calibration, fit_artifacts
from kvferry.fit.pair import Extent, accumulate, load_moments, save_moments
from kvferry.fit.probe import probe
from kvferry.fit.selection import rank_layers
from kvferry.kv.dump import read_shards, write_dump
from kvferry.kv.handoff import Handoff, read
from kvferry.kv.mapper import load_mapper, read_manifest
from kvferry.kv.prefill import Span
from kvferry.prepare.calibration import Draw, draw_sequences
from kvferry.prepare.corpora import Document
from kvferry.prepare.models import Loaded, load_model, prepare_by_reference, read_card
from kvferry.prepare.pairs import prepare_pair

# Two fits and two forward passes in float32, of weights that are drawn wide.
CLOSE = {"rtol": 1e-3, "atol": 1e-3}
COMMIT = "c" * 40
SEQUENCES, HELD_OUT, LENGTH = 16, 4, 32
HOW = {"corpus": "noise", "sequences": SEQUENCES, "held_out": HELD_OUT, "length": LENGTH, "stride": 1, "seed": 5}
RECIPE = {
    "method": "ridge",
    "k": 1,
    "lambda": 1e-7,
    "lambda_scale": "token",
    "rope": "stripped",
    "support": "all_heads",
    "row_weights": "uniform",
    "native_head": 0,
    "head_rows": "kept",
    "corpus": "noise",
    "sequences": SEQUENCES,
    "dtype": "float32",
}
RECIPES = {
    "paper": RECIPE,
    "two layers": RECIPE | {"k": 2},
    "same head": RECIPE | {"support": "same_head"},
}
FACTOR = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 8}
FACTOR |= {"llama_4_scaling_beta": 0.1}
# kind of both, what is particular of both, what is particular of the target, whether they are inside a vision model
PAIRS = {
    "Llama 3": ("llama3", {}, {}, False),
    "SmolLM2": ("tied", {}, {}, False),
    "Mistral": ("mistral", {}, {}, False),
    "Qwen3": ("qwen3", {}, {}, False),
    "Qwen2.5": ("qwen2", {}, {"kv_heads": 4, "head_dim": 16, "hidden_size": 32, "vocabulary": 280}, False),
    "Ministral 3": ("ministral3", {}, {}, True),
    "Ministral 3 with an attention factor": ("ministral3", {"rope_parameters": FACTOR}, {}, True),
}


@dataclass
class Chain:
    """A pair after the chain: models as built, models as loaded, and where everything lies."""

    plain: dict[str, PreTrainedModel]
    loaded: dict[str, Loaded]
    ranking: list[list[int]]
    rows: Calibration
    directory: Path

    def mapper(self, name: str) -> Any:
        cards = (self.loaded[role].card for role in ("source", "target"))
        return load_mapper(self.directory / "mappers" / name, *cards)[0]

    def handoff(self, name: str) -> Handoff:
        return Handoff(self.loaded["source"].model, self.loaded["target"].model, self.mapper(name))

    def fit(self, recipes: dict[str, Any]) -> None:
        fit_artifacts(self.rows, recipes, {name: self.directory / "mappers" / name for name in recipes})


def built(name, tiny_model, with_vision):
    """Source and target in memory."""
    kind, both, own, inside = PAIRS[name]
    source = tiny_model(kind, 2, seed=4, **both)
    pair = {"source": source, "target": deepen(source, tiny_model(kind, len(ORDER), seed=5, **both, **own))}
    return {role: with_vision(model) for role, model in pair.items()} if inside else pair


def prepared(plain, tokenizer, directory):
    """Save both in the hub's layout and prepare them: the source from the hub's cache here, the target as a directory."""
    hub = directory / "hub" / "models--owner--source"
    places = {"source": hub / "snapshots" / COMMIT, "target": directory / "saved"}
    for role, place in places.items():
        plain[role].save_pretrained(place)
        tokenizer.save_pretrained(place)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(COMMIT)
    entries = {
        "source": {"kind": "hub", "repository": "owner/source", "revision": "unpinned"},
        "target": {"kind": "local", "path": str(places["target"])},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(directory / "hub"))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        for role, entry in entries.items():
            prepare_by_reference(role, entry, directory / role)
    return {role: load_model(directory / role) for role in entries}


def noise(count=40, length=120):
    """Documents of random bytes, so that every token is met."""
    drawn = torch.randint(33, 127, (count, length), generator=torch.Generator().manual_seed(8))
    return [Document(str(number), "".join(map(chr, row))) for number, row in enumerate(drawn.tolist())]


@pytest.fixture(scope="module", params=PAIRS)
def chain(request, tiny_model, with_vision, tokenizer, tmp_path_factory):
    """A pair, from its files to fitted mappers."""
    directory = tmp_path_factory.mktemp("pair")
    plain = built(request.param, tiny_model, with_vision)
    loaded = prepared(plain, tokenizer, directory)
    prepare_pair("pair", directory / "source", directory / "target", directory / "tokenizer.json")
    sides = {"fit": SEQUENCES, "held_out": HELD_OUT}
    for role, own in loaded.items():
        drawn = {
            side: draw_sequences(noise(), own.tokenizer, Draw(side, count, LENGTH, HOW["seed"]), "noise")
            for side, count in sides.items()
        }
        write_dump(own.model, own.card, drawn, HOW, directory / "kv" / role)
    dumps = (directory / "kv" / "source", directory / "kv" / "target")
    save_moments(accumulate(*dumps, Extent(SEQUENCES, 0, "all", 1000)), directory / "moments.safetensors")
    moments = load_moments(directory / "moments.safetensors")
    ranking = rank_layers(probe(moments))
    found = Chain(plain, loaded, ranking, Calibration(*dumps, ranking, moments, 1000), directory)
    equal = loaded["source"].card["kv_heads"] == loaded["target"].card["kv_heads"]
    found.fit({name: recipe for name, recipe in RECIPES.items() if equal or name != "same head"})
    return found


def mappers_of(chain):
    return sorted(path.name for path in (chain.directory / "mappers").iterdir())


def prompt(length, seed=13):
    return torch.randint(3, 264, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_a_loaded_model_is_the_saved_one_and_its_card_has_the_geometry_of_its_cache(chain):
    ids = prompt(60)
    for role, plain in chain.plain.items():
        own = chain.loaded[role]
        wanted = plain(input_ids=ids, use_cache=True)
        torch.testing.assert_close(own.model(input_ids=ids).logits, wanted.logits, rtol=1e-5, atol=1e-5)
        first, layers = wanted.cache.layers[0].keys, len(wanted.cache.layers)
        assert (own.card["layers"], own.card["kv_heads"], own.card["head_dim"]) == (
            layers,
            first.shape[1],
            first.shape[3],
        )
        assert own.card["parameters"] == sum(
            parameter.numel()
            for name, parameter in plain.named_parameters()
            if "vision" not in name and "modal" not in name
        )


def test_a_source_from_the_hub_is_pinned_to_its_commit(chain):
    assert read_card(chain.directory / "source")["origin"].endswith(f" at {COMMIT}")


@torch.inference_mode()
def test_a_dump_holds_the_cache_of_the_saved_model(chain):
    (shard, *_) = read_shards(chain.directory / "kv" / "target", "held_out")
    ids = shard.ids.view(-1, LENGTH)
    wanted = chain.plain["target"](input_ids=ids, use_cache=True).cache.layers
    for layer, own in enumerate(wanted):
        for found, kept in ((shard.keys, own.keys), (shard.values, own.values)):
            torch.testing.assert_close(found[layer], kept.transpose(1, 2).flatten(0, 1), rtol=1e-4, atol=1e-4)


def test_the_probe_finds_for_each_target_layer_the_source_layer_that_it_was_made_of(chain):
    assert [ranked[0] for ranked in chain.ranking] == ORDER


def test_a_mapper_explains_its_target_on_held_out_rows(chain):
    for name in mappers_of(chain):
        r2 = read_manifest(chain.directory / "mappers" / name)["r2"]["held_out"]
        assert min(r2["k"] + r2["v"]) > 1 - 1e-5, name


def test_after_a_handoff_the_logits_are_those_of_a_plain_forward(chain):
    ids, cut = prompt(48), 44
    wanted = chain.plain["target"](input_ids=ids).logits[0, cut:]
    for name in mappers_of(chain):
        system = chain.handoff(name)
        prefix = system.extend(system.start(1), Span.of(ids[:, :cut].tolist(), ids.device))
        found, _ = read(system.target, prefix, Span.of(ids[:, cut:].tolist(), ids.device))
        torch.testing.assert_close(found[0], wanted, **CLOSE)


def test_after_a_handoff_of_nothing_they_are_not(chain):
    ids, cut = prompt(48), 44
    source, target = (chain.loaded[role] for role in ("source", "target"))
    system = Handoff(source.model, target.model, ZeroCache.like(target.card))
    prefix = system.extend(system.start(1), Span.of(ids[:, :cut].tolist(), ids.device))
    found, _ = read(target.model, prefix, Span.of(ids[:, cut:].tolist(), ids.device))
    assert (found[0] - chain.plain["target"](input_ids=ids).logits[0, cut:]).abs().max() > 0.1


def test_the_greedy_answer_after_a_handoff_is_transformers_own(chain):
    ids, limit = prompt(40, seed=14), 24
    plain = chain.plain["target"]
    wanted = plain.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=2,
    )[0, ids.shape[1] :].tolist()
    system = chain.handoff("paper")
    prefix = system.extend(system.start(1), Span.of(ids[:, :-1].tolist(), ids.device))
    logits, prefix = read_to_end(system.target, prefix, Span.of(ids[:, -1:].tolist(), ids.device))
    (written,) = decode(system.target, prefix, logits, lambda _: False, limit)
    assert written == wanted
    assert len(set(written)) > 3


def test_head_to_head_maps_are_refused_where_the_numbers_of_heads_differ(chain):
    heads = {own.card["kv_heads"] for own in chain.loaded.values()}
    if len(heads) == 1:
        assert "same head" in mappers_of(chain)
        return
    with pytest.raises(
        KvferryError, match="same_head needs as many KV heads on both sides, not 2 and 4; use all_heads"
    ):
        chain.fit({"same head": RECIPES["same head"]})
    assert "same head" not in mappers_of(chain)


def test_a_theta_that_changed_since_is_refused_also_inside_a_vision_model(chain, tmp_path):
    altered = shutil.copytree(chain.directory / "saved", tmp_path / "saved")
    prepare_by_reference("target", {"kind": "local", "path": str(altered)}, tmp_path / "target")
    config = (altered / "config.json").read_text()
    (altered / "config.json").write_text(config.replace('"rope_theta": ', '"rope_theta": 1'))
    with pytest.raises(KvferryError, match="its config changed since the model was prepared"):
        load_model(tmp_path / "target")
