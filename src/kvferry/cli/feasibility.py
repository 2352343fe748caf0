"""Whether two models can share a cache by a mapper, as far as configs and tokenizers tell, and why not.

Says what is the same and what is not; knows no sizes and prints nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from huggingface_hub.utils import disable_progress_bars
from transformers import PreTrainedConfig

from kvferry.cli.candidates import Candidate, find
from kvferry.cli.checkout import in_checkout, project_of
from kvferry.prepare.architecture import reasons
from kvferry.prepare.models import quiet
from kvferry.prepare.tokenizer import differences


@dataclass(frozen=True)
class Feasibility:
    """A source and a target beside each other."""

    source: Candidate
    target: Candidate

    @cached_property
    def faults(self) -> list[str]:
        """Clauses that say why the pair cannot transfer; none where it can."""
        own = [f"{model.name}: {what}" for model in (self.source, self.target) for what in _faults_of(model)]
        tokens = self.tokenizer_differences or []
        return own + ([f"the tokenizers differ: {'; '.join(tokens)}"] if tokens else [])

    @cached_property
    def tokenizer_differences(self) -> list[str] | None:
        """In what the tokenizers differ, the source first in each clause; None where one is not there to compare."""
        own, other = self.source.tokenizer, self.target.tokenizer
        if isinstance(own, str) or isinstance(other, str):
            return None
        return list(differences(own, other))

    @property
    def matched(self) -> bool:
        """Whether both caches have as many KV heads of the same size; the mapper takes others too, but not head by head."""
        own, other = self.source.geometry, self.target.geometry
        return (own.kv_heads, own.head_dim) == (other.kv_heads, other.head_dim)

    @property
    def positions(self) -> float:
        """Tokens that both models have positions for."""
        return min(self.source.positions, self.target.positions)


def pair_of(source: str, target: str) -> Feasibility:
    """The two models of these names; those of the registry too, in a checkout.

    Raises:
        KvferryError: one of the models is not there or cannot be read.
    """
    quiet()
    disable_progress_bars()
    project = project_of() if in_checkout() else None
    return Feasibility(find(source, project), find(target, project))


def _faults_of(model: Candidate) -> list[str]:
    """What speaks against one model."""
    return [*reasons(model.config), *([model.tokenizer] if isinstance(model.tokenizer, str) else [])]


def facts(model: Candidate) -> dict[str, Any]:
    """What a config says of a model, by what it is called in the output; None where it does not say."""
    own = model.decoder
    heads = _said(own, "num_attention_heads")
    return {
        "architecture": own.model_type,
        "layers": _said(own, "num_hidden_layers"),
        "KV heads": _said(own, "num_key_value_heads") or heads,
        "head_dim": _said(own, "head_dim") or _share(_said(own, "hidden_size"), heads),
        "query heads": heads,
        "rotary type": _rotary(own),
        "rotary base": _base(own),
        "sliding window": _window(own),
        "positions": _said(own, "max_position_embeddings"),
        "vocabulary": _said(own, "vocab_size"),
        "tokens": None if isinstance(model.tokenizer, str) else len(model.tokenizer),
    }


def _said(config: PreTrainedConfig, name: str) -> Any:
    """What a config says; None where it does not, or says something else of every layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _share(size: Any, heads: Any) -> int | None:
    """Of each head; None where a config has lists in place of numbers."""
    return size // heads if isinstance(size, int) and isinstance(heads, int) and heads else None


def _rotary(config: PreTrainedConfig) -> str | None:
    rope = _said(config, "rope_parameters") or {}
    share = rope.get("partial_rotary_factor") or 1
    return rope.get("rope_type") and rope["rope_type"] + ("" if share == 1 else f", {share:.0%} of a head")


def _base(config: PreTrainedConfig) -> float | None:
    return (_said(config, "rope_parameters") or {}).get("rope_theta")


def _window(config: PreTrainedConfig) -> str | None:
    """The window and how many layers have one; a size that no layer uses is none."""
    window, kinds = _said(config, "sliding_window"), _said(config, "layer_types")
    if not window:
        return None
    windowed = sum("sliding" in kind for kind in kinds) if kinds else _said(config, "num_hidden_layers")
    return f"{window:,} in {windowed} layers" if windowed else None
