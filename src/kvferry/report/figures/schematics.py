"""Schematics of the hand-off (figure 1) and of the mapper (figure 3), with the facts of the run's first pair and its headline.

Knows cards, manifests and recipes. Does not know how a box is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.records import PERPLEXITY
from kvferry.report import style
from kvferry.report.figures.boxes import Box, draw_boxes
from kvferry.report.inputs import SOURCE, Pair, Results
from kvferry.report.labels import Recipe, whole
from kvferry.report.papers_recipe import COUPLED, NETWORK, NOT_REAPPLIED, OLS, method_of

TARGET, TRANSFER, PLAIN = style.TARGET, style.TRANSFER, "plain"
LANES = (1.55, 1.0)  # of the hand-off and of re-prefill
MOST_LAYERS = 4  # boxes of source layers; where there are more, those in the middle share one
# What λ is multiplied by, as in `lambda_scale` of a recipe.
SCALES = {"sum": "", "token": "n", "trace": "τ"}
MEANINGS = {"sum": "", "token": "; n: {}", "trace": "; τ: mean diagonal of the Gram"}
STRIP, KEEP = "keys: source RoPE stripped; values: as they are", "keys with the source's RoPE; values: as they are"
ROTATE, LEAVE = ("keys:", "target RoPE put on"), ("keys:", "as they are mapped")

Card = Mapping[str, Any]


def fig1_pipeline(results: Results, stem: Path) -> None:
    """The hand-off of a prompt's cache beside plain re-prefill, both ending in the target's decoding.

    Raises:
        KvferryError: a file cannot be written.
    """
    pair = results.pairs[0]
    draw_boxes(pipeline(results, pair), f"{pair.name}: from prompt to decoding, two ways", stem, LANES)


def fig3_mapper(results: Results, stem: Path) -> None:
    """How the headline mapper makes keys and values of one head of the layer in the middle of the target.

    Raises:
        KvferryError: a file cannot be written.
    """
    pair = results.pairs[0]
    draw_boxes(
        mapper(results, pair),
        f"{pair.name}, mapper {results.headline(pair)}, target layer {_middle(results, pair)}",
        stem,
    )


def pipeline(results: Results, pair: Pair) -> list[list[Box | None]]:
    """The boxes of figure 1: the hand-off on the left, re-prefill on the right."""
    source, target = results.cards[pair.source], results.cards[pair.target]
    first = ("source prefill:", pair.source, f"{source['layers']} layers")
    again = ("plain re-prefill:", pair.target, f"{target['layers']} layers")
    return [
        [Box("prompt", PLAIN, ("prompt",), ("source prefill", "re-prefill"))],
        [
            Box("source prefill", SOURCE, first, ("source cache",)),
            Box("re-prefill", TARGET, again, ("own cache",)),
        ],
        [Box("source cache", SOURCE, ("source cache:", _shape(source)), ("mapper",)), None],
        [Box("mapper", TRANSFER, _of_mapper(results, pair), ("mapped cache",)), None],
        [
            Box("mapped cache", TRANSFER, _mapped(results, pair), ("decode",)),
            Box("own cache", TARGET, ("target's own cache:", _shape(target)), ("decode",)),
        ],
        [Box("decode", TARGET, _decoding(results, pair))],
    ]


def _shape(card: Card) -> str:
    return f"{card['layers']} layers × {card['kv_heads']} KV heads × {card['head_dim']}"


def _of_mapper(results: Results, pair: Pair) -> tuple[str, ...]:
    manifest, k = results.manifests[pair.name, results.headline(pair)], results.k(pair.name, results.headline(pair))
    share = 100 * manifest["parameters"] / results.cards[pair.target]["parameters"]
    return (
        f"mapper {results.headline(pair)}:",
        f"{whole(manifest['recipe'])}",
        f"each target layer reads {k} of {results.cards[pair.source]['layers']} source layers",
        f"{manifest['parameters']:,} parameters ({share:.1f} % of target)",
    )


def _mapped(results: Results, pair: Pair) -> tuple[str, ...]:
    """The cache that is handed over, and what of it is the target's own."""
    native = results.recipe(pair.name, results.headline(pair))["native_head"]
    own = (f"first {_tokens(native)} by the target itself",) if native else ()
    return ("mapped cache:", _shape(results.cards[pair.target]), *own)


def _decoding(results: Results, pair: Pair) -> tuple[str, ...]:
    """The target going on; how many last tokens it reads itself, where a record says."""
    held = results.transfers[pair.name, results.headline(pair), PERPLEXITY].settings.get("hold_back")
    reads = () if held is None else (f"after a hand-off it reads the last {_prompt_tokens(held)} itself",)
    return (f"decoding by the target: {pair.target}", *reads)


def _tokens(count: int) -> str:
    return f"{count:,} token{'s' if count != 1 else ''}"


def _prompt_tokens(count: int) -> str:
    return "prompt token" if count == 1 else f"{count:,} prompt tokens"


def mapper(results: Results, pair: Pair) -> list[list[Box | None]]:
    """The boxes of figure 3: source layers, features, fitted map, and what is put into the target's cache."""
    recipe, target = results.recipe(pair.name, results.headline(pair)), results.cards[pair.target]
    layers = _layers(results, pair)
    steps = _network(results, pair) if method_of(recipe) == NETWORK else _linear(results, pair)
    rotated = recipe["rope"] not in (COUPLED, NOT_REAPPLIED)
    out_of = (f"cache of the source {pair.source}:", _shape(results.cards[pair.source]))
    into = f"layer {_middle(results, pair)}, each of its {target['kv_heads']} KV heads"
    return [
        [Box("source cache", SOURCE, out_of, tuple(layers))],
        [Box(name, SOURCE, lines, ("features",)) for name, lines in layers.items()],
        [Box("features", TRANSFER, _features(results, pair), (steps[0].name,))],
        *([step] for step in steps),
        [
            Box("keys", TRANSFER, ROTATE if rotated else LEAVE, ("target cache",)),
            Box("values", TRANSFER, ("values:", "as they are mapped"), ("target cache",)),
        ],
        [Box("target cache", TARGET, (f"cache of the target {pair.target}:", into))],
    ]


def _middle(results: Results, pair: Pair) -> int:
    """The target layer that is drawn."""
    return len(results.manifests[pair.name, results.headline(pair)]["selected_layers"]) // 2


def _layers(results: Results, pair: Pair) -> dict[str, tuple[str, ...]]:
    """Text of the boxes of source layers by name, in the order of the mapper's features."""
    chosen = results.manifests[pair.name, results.headline(pair)]["selected_layers"][_middle(results, pair)]
    if len(chosen) <= MOST_LAYERS:
        return {f"layer {layer}": ("layer", str(layer)) for layer in chosen}
    boxes = {f"layer {layer}": ("layer", str(layer)) for layer in chosen[: MOST_LAYERS - 2]}
    boxes |= {"more layers": (f"{len(chosen) - MOST_LAYERS + 1} more", "layers")}
    return boxes | {f"layer {chosen[-1]}": ("layer", str(chosen[-1]))}


def _features(results: Results, pair: Pair) -> tuple[str, ...]:
    """What the map reads: which heads of how many layers, with what done to keys."""
    manifest, source = results.manifests[pair.name, results.headline(pair)], results.cards[pair.source]
    recipe, k = manifest["recipe"], results.k(pair.name, results.headline(pair))
    every = f"all {source['kv_heads']} KV heads"
    heads = "the same KV head" if recipe["support"] == "same_head" else every
    layers = f"k = {k} layer{'s' if k != 1 else ''}"
    return (
        KEEP if recipe["rope"] == COUPLED else STRIP,
        f"concatenated: {heads} of {layers}, {source['head_dim']} each",
        f"X: {manifest['features']:,} features, of keys and of values apart",
    )


def _linear(results: Results, pair: Pair) -> list[Box]:
    """Centring, the closed form (the paper, equation 4), and the bias."""
    manifest = results.manifests[pair.name, results.headline(pair)]
    recipe, out = manifest["recipe"], results.cards[pair.target]["head_dim"]
    rows = f"centred over {manifest['rows']:,} calibration rows:"
    less = f"X, and Y of the target's own cache, less their {'weighted ' if _is_weighted(recipe) else ''}means"
    size = f"{manifest['features']:,} × {out} for a head; keys and values apart"
    return [
        Box("centre", TRANSFER, (rows, less), ("map",)),
        Box("map", TRANSFER, (_formula(recipe), *_symbols(recipe), size), ("bias",)),
        Box("bias", TRANSFER, ("mapped: X·W + b, with the bias b = mean(Y) − mean(X)·W",), ("keys", "values")),
    ]


def _formula(recipe: Recipe) -> str:
    weights = "R" if _is_weighted(recipe) else ""
    penalty = "" if method_of(recipe) == OLS else f" + {SCALES[recipe['lambda_scale']]}λI"
    return f"W = (Xᵀ{weights}X{penalty})⁻¹ Xᵀ{weights}Y"


def _is_weighted(recipe: Recipe) -> bool:
    return recipe["row_weights"] != "uniform"


def _symbols(recipe: Recipe) -> tuple[str, ...]:
    """What λ, its scale and the weights of rows are; nothing where the formula has none of them."""
    said = []
    if method_of(recipe) != OLS:
        counted = "their sum" if _is_weighted(recipe) else "number of rows"
        said.append(f"λ = {recipe['lambda']:g}" + MEANINGS[recipe["lambda_scale"]].format(counted))
    if _is_weighted(recipe):
        said.insert(0, f"R: weights of rows ({recipe['row_weights']})")
    return ("; ".join(said),) if said else ()


def _network(results: Results, pair: Pair) -> list[Box]:
    """The paper's fallback (section 4.5), which is trained and not solved."""
    manifest = results.manifests[pair.name, results.headline(pair)]
    how, out = manifest["recipe"]["mlp"], results.cards[pair.target]["head_dim"]
    sizes = f"{manifest['features']:,} → {how['width']:,} → {how['width']:,} → {out} for a head; keys and values apart"
    trained = f"{how['epochs']:,} epochs of Adam over {manifest['rows']:,} rows"
    return [Box("map", TRANSFER, ("MLP with two ReLU layers:", sizes, trained), ("keys", "values"))]
