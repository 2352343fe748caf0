"""Architectures: which models can transfer, as far as a config says it; no weights are needed.

A cache can be mapped token by token where every layer keeps keys and values of every token, and one rotary embedding turns
the keys of all layers. Whether that is laid out in halves does not show in a config: `kv.rope` checks it on keys. Does not
know files, cards or pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvferry.errors import KvferryError

FULL = "full_attention"
# Parts of the names of layer types whose tokens see a window of earlier ones.
WINDOWED = ("sliding", "chunked", "window")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_architecture(config: PreTrainedConfig, name: str) -> None:
    """Refuse a model that cannot transfer, given by its config as it is on disk; `name` is what the message calls it.

    Raises:
        KvferryError: with the first of the reasons.
    """
    for reason in reasons(config):
        raise KvferryError(
            f"{name}: a {config.model_type} model cannot be used: {reason}; choose another model or checkpoint"
        )


def reasons(config: PreTrainedConfig) -> Iterator[str]:
    """What speaks against a model, given by its config as it is on disk: clauses; none where it can transfer."""
    nothing_causal = _nothing_causal(config)
    if nothing_causal:
        yield nothing_causal
        return
    decoder = config.get_text_config(decoder=True)
    if decoder.is_heterogeneous:
        yield "its config gives its layers different shapes, and a mapper knows one shape for all layers"
        return
    if decoder is not config and getattr(config, "quantization_config", None):
        yield "its weights are quantised inside a larger model, out of which only plain weights can be read"
    yield from filter(None, (check(decoder) for check in (_compressed, _stateful, _windowed, _unrotated)))


def _nothing_causal(config: PreTrainedConfig) -> str | None:
    """No causal language model, neither by itself nor inside a larger one."""
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, which reads its prompt in an encoder that keeps no KV cache"
    decoder = config.get_text_config(decoder=True)
    if type(decoder) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"transformers has no causal language model of {type(decoder).__name__}"
    # Encoders can be made decoders by this switch. GPT-NeoX, a decoder, has it too, but no encoder has the other key.
    if getattr(decoder, "is_decoder", True) or hasattr(decoder, "rope_parameters"):
        return None
    return "it is an encoder, whose tokens attend to later ones, so that there is no KV cache to go on from"


def _compressed(config: PreTrainedConfig) -> str | None:
    """Multi-head latent attention."""
    rank = getattr(config, "kv_lora_rank", None)
    if not rank:
        return None
    return f"it has multi-head latent attention (kv_lora_rank: {rank}), whose keys and values are not those of KV heads"


def _stateful(config: PreTrainedConfig) -> str | None:
    """Hybrids: layers that are neither attention over all tokens nor over a window."""
    kinds = getattr(config, "layer_types", None) or []
    others = [kind for kind in kinds if kind != FULL and not _is_windowed(kind)]
    if not others:
        return None
    what = "which do not keep plain keys and values of every token"
    return f"{len(others)} of its {len(kinds)} layers are {' or '.join(dict.fromkeys(others))}, {what}"


def _windowed(config: PreTrainedConfig) -> str | None:
    """Layers whose tokens see a window of earlier ones only. A window that no prompt outgrows is none."""
    kinds = getattr(config, "layer_types", None)
    window, most = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", math.inf)
    if kinds:
        windowed = [kind for kind in kinds if _is_windowed(kind)]
    else:
        windowed = ["sliding_attention"] * config.num_hidden_layers if window else []
    if not windowed or (window or 0) >= most:
        return None
    size = f" (sliding_window: {window})" if window else ""
    what = "whose tokens do not see all earlier ones"
    return f"{len(windowed)} of its {config.num_hidden_layers} layers are {windowed[0]}{size}, {what}"


def _is_windowed(kind: str) -> bool:
    return any(part in kind for part in WINDOWED) and "hybrid" not in kind


def _unrotated(config: PreTrainedConfig) -> str | None:
    """No rotary embedding, several, one of another type, or layers without."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return "its config names no rotary embedding (rope_parameters), which is what keys are mapped without"
    if "rope_type" not in rope:
        return f"its rotary embeddings differ between layers ({', '.join(rope)}), and keys are mapped with one for all"
    if rope["rope_type"] not in ROPE_TYPES:
        return f"its rotary embedding is of type {rope['rope_type']}, and known are {', '.join(ROPE_TYPES)}"
    turned = getattr(config, "no_rope_layers", None) or []
    if not all(turned):
        return f"{turned.count(0)} of its {len(turned)} layers have no rotary embedding, and keys are mapped with one for all"
    return None
