"""The text decoder of a checkpoint, which may lie inside a model that also sees, as in Ministral 3's.

Only the decoder's weights are read, and all of them must be there: transformers itself would fill gaps with random numbers.
Does not know cards, nor which architectures can transfer.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvferry.config import Geometry
from kvferry.errors import KvferryError, first_line

# Where a decoder's weights lie inside a larger model: in the hub's layout, and in the one that transformers itself has now.
INSIDE = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
HEAD = "lm_head.weight"


def read_config(location: Path, **how: Any) -> PreTrainedConfig:
    """The config of a directory in the hub's layout; `how` goes to transformers.

    Raises:
        ValueError: it is of no model that transformers knows, or has values of the wrong kind; says why.
    """
    try:
        return AutoConfig.from_pretrained(location, **how)
    except Exception as error:  # each kind of config has checks of its own, which raise what they like
        raise ValueError(f"its config is not one of a model that transformers knows ({first_line(error)})") from error


def decoder_config(location: Path) -> PreTrainedConfig:
    """The config of the causal language model at `location`, or inside the larger one there.

    A larger model may keep to itself that its output head is the embedding; the decoder's own config then says so too.
    """
    whole = AutoConfig.from_pretrained(location)
    config = whole.get_text_config(decoder=True)
    if config is not whole and whole.tie_word_embeddings and not _has_head(location):
        config.tie_word_embeddings = True
    return config


def geometry_of(config: PreTrainedConfig) -> Geometry:
    """The shape of the KV cache of a decoder with this config."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Geometry(config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, head_dim)


def positions_of(config: PreTrainedConfig) -> int | float:
    """Tokens that a model with this config has positions for; infinite where it does not say."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf


def check_positions(config: PreTrainedConfig, tokens: int, key: str) -> None:
    """Refuse texts that are longer than the model has positions for; `key` says where in a config their length stands.

    Raises:
        KvferryError: they are.
    """
    most = positions_of(config)
    if tokens > most:
        raise KvferryError(f"{key}: {tokens:,} tokens are more than the {most:,} positions of a model; lower it")


def _has_head(location: Path) -> bool:
    """Whether the weights hold an output head."""
    for file in location.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            if any(name.endswith(HEAD) for name in tensors.keys()):  # noqa: SIM118
                return True
    return False


def load_decoder(location: Path, dtype: torch.dtype, where: dict[str, str] | None = None) -> PreTrainedModel:
    """The causal language model at `location`, or inside the larger one there.

    where: the device of each module; the CPU if it is not given.

    Raises:
        ValueError: weights are missing or of another shape.
    """
    whole, config = AutoConfig.from_pretrained(location), decoder_config(location)
    model, found = AutoModelForCausalLM.from_pretrained(
        location,
        config=config,
        dtype=dtype,
        device_map=where,
        key_mapping=INSIDE if type(config) is not type(whole) else None,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    for what in ("missing", "mismatched"):
        names = sorted(str(key) for key in found[f"{what}_keys"])
        if names:
            raise ValueError(f"{len(names)} of its weights are {what}, the first is {names[0]}")
    return model
