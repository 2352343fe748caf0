"""Evaluation records: one typed JSON a (system, benchmark), the only thing that tables and figures are made from.

Knows the schema and how a score follows from its items. Does not know models, torch, or how a table looks.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvferry.errors import KvferryError
from kvferry.files import SEAL, is_sealed, write_sealed

FORMAT = 1
NATIVE = "native"
NATIVE_INJECTED = "native_injected"
IDENTITY = "identity"
ZERO_CACHE = "zero_cache"
RANDOM_MAPPER = "random_mapper"
WRONG_DOCUMENT = "wrong_document"
PERPLEXITY = "prefix_perplexity"
NEXT_TOKEN_KL = "next_token_kl"
TOP1_AGREEMENT = "top1_agreement"
APPLY_TIME = "apply_time"
COQA = "coqa"
COQA_HANDOFF = "coqa_handoff"
COQA_ALTERNATE = "coqa_alternate"
ATTENTION_COSINE = "attention_cosine"
ATTENTION_COSINE_HELD_OUT = "attention_cosine_held_out"
K_CONCENTRATION = "k_concentration"
V_CONCENTRATION = "v_concentration"
R2_K = "r2_k"
R2_V = "r2_v"
LATENCY = "latency"
NATIVE_TOKENS = "native_tokens"
NATIVE_TOKENS_TIME = "native_tokens_time"
# What the ids of LATENCY items begin with (what/tokens/trial), and those of native tokens (where/count/…).
MAPPER, SOURCE_PREFILL, TARGET_PREFILL, LOAD = "mapper", "source_prefill", "target_prefill", "load"
LAST, FIRST = "last", "first"


@dataclass(frozen=True)
class Item:
    """One answered item: `score` is 0 or 1 for accuracies, nats a token for perplexity and KL, ms for times.

    weight: tokens behind the score, 1 for a whole item. response: what the score is made from; None where a part has no value.
    """

    id: str
    score: float
    weight: float = 1.0
    response: list[float | None] | str | None = None


@dataclass(frozen=True)
class Record:
    """What one system did on one benchmark. `pair` and `source` are None for a model that answers on its own."""

    system: str
    target: str
    benchmark: str
    metric: str
    items: list[Item]
    pair: str | None = None
    source: str | None = None
    chance: float | None = None
    seeds: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    format: int = FORMAT

    @property
    def n(self) -> int:
        """Number of items."""
        return len(self.items)

    @property
    def value(self) -> float:
        """Mean score over items, weighted; exp of it for perplexity."""
        total = sum(item.weight for item in self.items)
        mean = sum(item.weight * item.score for item in self.items) / total
        return math.exp(mean) if self.metric == "perplexity" else mean

    def write(self, path: Path) -> None:
        """Write as sealed JSON, whole or not at all."""
        write_sealed(path, asdict(self) | {"n": self.n, "value": self.value})


def _item(raw: dict[str, Any]) -> Item:
    """An item whose numbers are numbers."""
    for key in ("score", "weight"):
        if not isinstance(raw[key], int | float):
            raise TypeError(f"{key} is {raw[key]!r}")
    return Item(**raw)


def read_record(path: Path) -> Record:
    """Read and check one record.

    Raises:
        KvferryError: the file is not JSON, lacks a field, has another format, is empty, or its value does not follow
            from its items; or it was changed since it was written.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        stated, n = float(raw["value"]), raw["n"]
        own = {key: part for key, part in raw.items() if key not in ("value", "n", SEAL)}
        record = Record(**(own | {"items": [_item(item) for item in raw["items"]]}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KvferryError(f"{path}: not an evaluation record ({error}); delete it and run again") from error
    if record.format != FORMAT:
        raise KvferryError(
            f"{path}: record format {record.format}, this version reads {FORMAT}; delete it and run again"
        )
    if not record.items or n != record.n:
        raise KvferryError(f"{path}: holds {record.n} items but states n={n}; delete it and run again")
    if not sum(item.weight for item in record.items) > 0:
        raise KvferryError(f"{path}: its items weigh nothing; delete it and run again")
    if not all(math.isfinite(item.score) for item in record.items) or not math.isclose(
        stated, record.value, rel_tol=1e-9
    ):
        raise KvferryError(f"{path}: the value does not follow from its items; delete it and run again")
    if not is_sealed(raw):
        raise KvferryError(f"{path}: the record was changed since it was written; delete it and run again")
    return record
