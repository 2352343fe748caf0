"""How benchmarks, kinds of cache and columns are called where people read them. Knows words only."""

from __future__ import annotations

BENCHMARKS = {
    "arc_challenge": "ARC-C",
    "hellaswag": "HellaSwag",
    "winogrande": "WinoGrande",
    "mmlu": "MMLU",
    "gsm8k": "GSM8K",
    "prefix_perplexity": "prefix PPL",
}

KINDS = {"k_rope": "K with RoPE", "k_stripped": "K, RoPE stripped", "v": "V"}

COLUMNS = BENCHMARKS | {
    "avg": "Avg",
    "avg_floor_normalised": "Avg floor-norm.",
    "gap_recovered": "gap recovered",
    "gap_recovered_perplexity": "gap recovered, log PPL",
    "gap_recovered_log": "gap recovered, log scale",
    "kv_heads": "KV heads",
    "matched_kv": "matched KV",
    "items_total": "of",
    "features": "features p",
    "rows": "rows n",
    "p_over_n": "p/n",
    "weights_bytes": "bytes",
    "share_of_target": "% of target",
    "r2_k_in_sample": "R² K in sample",
    "r2_k_held_out": "R² K held out",
    "r2_v_in_sample": "R² V in sample",
    "r2_v_held_out": "R² V held out",
}


def column(name: str) -> str:
    """Heading of a column of a table."""
    return COLUMNS.get(name, name.replace("_", " "))
