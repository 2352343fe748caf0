"""How benchmarks, kinds of cache and columns are called where people read them. Knows words only."""

from __future__ import annotations

BENCHMARKS = {
    "arc_challenge": "ARC-C",
    "hellaswag": "HellaSwag",
    "winogrande": "WinoGrande",
    "mmlu": "MMLU",
    "gsm8k": "GSM8K",
    "piqa": "PIQA",
    "boolq": "BoolQ",
    "arc_easy": "ARC-E",
    "prefix_perplexity": "prefix PPL",
}
MEASURES = {"next_token_kl": "KL, nats/token", "top1_agreement": "top-1 agreement, %"}

KINDS = {"k_rope": "K with RoPE", "k_stripped": "K, RoPE stripped", "v": "V"}

COLUMNS = (
    BENCHMARKS
    | MEASURES
    | {
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
        "storage_gib": "GiB",
        "share_of_target": "% of target",
        "r2_k_in_sample": "R² K in sample",
        "r2_k_held_out": "R² K held out",
        "r2_v_in_sample": "R² V in sample",
        "r2_v_held_out": "R² V held out",
        "source_layers": "of source layers",
        "hellaswag_retention": "HellaSwag retention",
        "hellaswag_vs_ridge": "HellaSwag retention − ridge",
        "next_token_kl_vs_ridge": "KL − ridge",
        "next_token_kl_selection": "KL, selection half",
        "apply_time": "apply, ms/1,024 tokens",
        "scale": "λ scale",
        "k_without_hellaswag": "k without HellaSwag",
        "k_without_mmlu": "k without MMLU",
        "k_without_arc_challenge": "k without ARC-C",
        "largest_move_pp": "largest move, pp",
        "k_by_kl": "k by KL",
        "attention_cosine": "attention-output cosine",
        "attention_cosine_held_out": "cosine on held-out text",
        "k_concentration": "K concentration",
        "v_concentration": "V concentration",
        "r2_k": "R² K",
        "r2_v": "R² V",
        "r2_k_vs_ridge": "R² K − ridge",
        "r2_v_vs_ridge": "R² V − ridge",
        "k_concentration_vs_ridge": "K concentration − ridge",
        "v_concentration_vs_ridge": "V concentration − ridge",
        "attention_cosine_vs_ridge": "cosine − ridge",
        "pearson": "Pearson r",
        "spearman": "Spearman ρ",
        "retention": "retention, %",
        "source_retention": "source alone, %",
        "weakest_retention": "its retention, %",
        "items_differing": "items unlike the target's own",
        "p_target": "McNemar p, target",
        "only_right_target": "right where target is wrong",
        "only_wrong_target": "wrong where target is right",
        "p_source": "McNemar p, source",
        "only_right_source": "right where source is wrong",
        "only_wrong_source": "wrong where source is right",
        "p_headline": "McNemar p, headline",
        "only_right_headline": "right where headline is wrong",
        "only_wrong_headline": "wrong where headline is right",
        "mean_accuracy": "accuracy at k",
        "mean_accuracy_by_kl": "accuracy at k by KL",
        "coqa_f1": "F1, %",
        "coqa_drift": "drift, points",
        "coqa_slope": "drift slope, points/turn",
        "mapper_ms": "mapper, ms",
        "target_prefill_ms": "re-prefill by target, ms",
        "source_prefill_ms": "prefill by source, ms",
        "load_ms": "loading the mapper, ms",
        "warm": "speed-up warm, ×",
        "cold": "speed-up cold, ×",
        "warm_least": "least warm, ×",
        "warm_most": "most warm, ×",
        "warm_from": "warm pays from, tokens",
        "cold_least": "least cold, ×",
        "cold_most": "most cold, ×",
        "cold_from": "cold pays from, tokens",
        "native_at": "native at the",
        "native_count": "native tokens",
        "next_token_kl_gained": "KL − that without",
        "handoff_ms": "hand-off, ms",
        "added_ms": "added, ms",
        "gradient_free": "gradient-free",
        "cross_scale": "cross-scale",
        "moves_kv_values": "moves KV values",
        "papers_pair": "the paper's pair",
        "difference": "ours − paper",
    }
)
OF_ALL, GAINED = "_of_all", "_vs_headline"


def column(name: str) -> str:
    """Heading of a column of a table."""
    if name.endswith(OF_ALL):
        return f"{column(name.removesuffix(OF_ALL))}, % of all layers"
    if name.endswith(GAINED):
        return f"{column(name.removesuffix(GAINED))} − headline"
    return COLUMNS.get(name, name.replace("_", " "))
