"""Recipes of mappers in words: what one is, or in what it differs from another. Knows the keys of a recipe only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Recipe = Mapping[str, Any]

WORDS = {
    "method": {"ridge": "ridge", "ols": "OLS", "mlp": "MLP"},
    "rope": {"stripped": "RoPE stripped", "not_reapplied": "RoPE not re-applied", "coupled": "RoPE coupled"},
    "support": {"all_heads": "all heads", "same_head": "same head"},
    "row_weights": {"uniform": "uniform rows", "sink": "sink rows weighted", "attention": "attention-weighted rows"},
    "head_rows": {"kept": "head rows kept", "left_out": "head rows left out"},
}
PATTERNS = {
    "k": "k={}",
    "lambda": "λ={:g}",
    "lambda_scale": "λ scale {}",
    "corpus": "{}",
    "sequences": "{} sequences",
    "native_head": "native head {}",
}
# In the order in which the paper takes the parts away.
ORDER = ("rope", "k", "method", "support", "row_weights", "native_head", "head_rows", "lambda", "lambda_scale")
ORDER += ("corpus", "sequences")
OF_RIDGE = ("lambda", "lambda_scale")


def whole(recipe: Recipe) -> str:
    """The recipe as the paper names one: `k=8, ridge, RoPE stripped`."""
    parts = _phrases(recipe)
    return ", ".join(parts[key] for key in ("k", "method", "rope") if key in parts)


def difference(recipe: Recipe, base: Recipe) -> str:
    """In what a recipe differs from `base`; the whole of it if in nothing that has a word."""
    own, other = _phrases(recipe), _phrases(base)
    return ", ".join(phrase for key, phrase in own.items() if phrase != other.get(key)) or whole(recipe)


def _phrases(recipe: Recipe) -> dict[str, str]:
    """A phrase for each key; the penalty is that of ridge, so it says nothing about another method."""
    keys = [key for key in ORDER if key in recipe and (key not in OF_RIDGE or recipe.get("method") == "ridge")]
    return {key: _phrase(key, recipe[key]) for key in keys}


def _phrase(key: str, value: Any) -> str:
    return WORDS[key].get(value, str(value)) if key in WORDS else PATTERNS[key].format(value)
