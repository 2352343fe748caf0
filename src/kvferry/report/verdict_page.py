"""The verdict on a pair as a page of markdown for a serving engineer: what to do, and the numbers it follows from.

Every sentence is made from records. What was not measured is said, with what to add to the config. Judges nothing itself.
"""

from __future__ import annotations

import math
from pathlib import Path

from kvferry.files import write_text
from kvferry.report.inputs import Results
from kvferry.report.labels import difference, whole
from kvferry.report.names import BENCHMARKS
from kvferry.report.paper import FIVE
from kvferry.report.stats import Quantity, Sampled, Undefined
from kvferry.report.verdict import NOT_DECIDED, TIERS, Pace, Verdict, verdict_of

MEGABYTE = 1e6


def write_pages(results: Results, directory: Path) -> None:
    """Write `directory`/{pair}.md for every pair, each whole or not at all.

    Raises:
        KvferryError: a record is missing or broken, or a file cannot be written.
    """
    for pair in results.pairs:
        write_text(directory / f"{pair.name}.md", page(results, verdict_of(results, pair)))


def page(results: Results, own: Verdict) -> str:
    """The page of one pair."""
    recipe = results.recipe(own.pair.name, own.system)
    opening = [
        f"# {own.pair.name}: {own.tier}",
        f"Can `{own.pair.target}` go on from the cache that `{own.pair.source}` computed? Judged is the recipe "
        f"`{own.system}` ({whole(recipe)}). Intervals are of 95 %.",
    ]
    sections = {
        "What to do": _advice(own),
        "Quality kept": _quality(own),
        "Speed": _speed(own),
        "Size": _size(results, own),
        "Best recipe": [_recipe(results, own)],
        "How the tier is found": _rules(own),
    }
    parts = [f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines) for title, lines in sections.items()]
    return "\n\n".join([*opening, *parts]) + "\n"


def _advice(own: Verdict) -> list[str]:
    lines = [_by_tier(own), _by_source(own), _by_pace(own)]
    if own.beside_random is not None and own.beside_random.interval()[1] >= 0:
        lines.insert(0, "Do not use this mapper: by next-token KL these samples do not tell it from a random one.")
    weakest = own.weakest
    if weakest is not None:
        kept = own.by_benchmark[weakest]
        lines.append(
            f"The weakest benchmark is {BENCHMARKS[weakest]}, where {_percent(kept.retention)} of the target's accuracy is kept "
            f"(n = {kept.n:,}): try work of that kind first."
        )
    return lines


def _by_tier(own: Verdict) -> str:
    """What the tier means for whoever has to decide."""
    if own.tier == NOT_DECIDED:
        worst, best = own.possible
        if not own.names:
            return "Measure more before deciding: add hellaswag to `evaluation.benchmarks`."
        return (
            f"Measure more before deciding: these samples allow anything from *{worst.name}* to *{best.name}*. "
            f"Raise `limit` under `evaluation.benchmarks`, or set `evaluation.full`.{_without(own)}"
        )
    advice = {
        TIERS[0].name: "Hand over",
        TIERS[1].name: "Hand over only where the loss is acceptable",
        TIERS[2].name: "Do not hand over with this recipe",
    }[own.tier]
    return f"{advice}: {_grounds(own)}."


def _without(own: Verdict) -> str:
    """Which benchmarks leave the mean retention undefined."""
    names = [BENCHMARKS[name] for name in own.names if isinstance(own.by_benchmark[name].retention, Undefined)]
    if not names:
        return ""
    return (
        f" Retention on {', '.join(names)} is undefined, and with it the mean: give more items there, or leave it out."
    )


def _grounds(own: Verdict) -> str:
    """What a tier that was decided follows from: without a retention, it is the cosine alone."""
    if isinstance(own.retention, Sampled):
        return f"{_percent(own.retention)} of the target's accuracy is kept"
    return f"the attention-output cosine is {_cosine(own)}, and retention is {_percent(own.retention)}"


def _by_source(own: Verdict) -> str:
    """Whether the hand-off is worth more than the source's own answers."""
    source, moved = f"`{own.pair.source}` alone", own.beside_source
    if isinstance(moved, Undefined):
        return f"Whether the hand-off answers better than {source} is undefined ({moved.reason})."
    low, high = moved.interval()
    by = f"{100 * moved.value:+.1f} points of accuracy [{100 * low:+.1f}, {100 * high:+.1f}]"
    if low > 0:
        return f"The hand-off answers better than {source}: {by}."
    if high < 0:
        return (
            f"{source} answers better than the hand-off, which stands at {by}: serve the source's own answers instead."
        )
    return f"These samples do not tell the hand-off from {source} ({by}), which costs no mapping."


def _by_pace(own: Verdict) -> str:
    """When it pays."""
    if own.pace is None:
        return f"Whether it saves time: {_not_measured('latency', own)}."
    pace, up_to = own.pace, f"measured up to {own.pace.longest.length:,} tokens"
    if pace.warm_from is None:
        return f"It saves no time at the longest length, even with the source's cache already there ({up_to})."
    warm = f"It pays from {pace.warm_from:,} tokens on if the source's cache is already there; "
    if pace.cold_from is None:
        return warm + f"not at the longest length if the source must prefill first ({up_to})."
    return warm + f"from {pace.cold_from:,} tokens on if the source must prefill first ({up_to})."


def _quality(own: Verdict) -> list[str]:
    of = {len(FIVE): "mean of five benchmarks", 0: "no benchmark"}.get(len(own.names), "HellaSwag")
    lines = [f"Retention, {of}: {_percent(own.retention)}; `{own.pair.source}` alone {_percent(own.source_retention)}."]
    lines.append(
        f"Share of the gap between source and target recovered: {_percent(own.gap)} in accuracy ({of}), "
        f"{_percent(own.gap_in_perplexity)} in log perplexity."
    )
    lines += [
        f"{BENCHMARKS[name]}: {_percent(kept.retention)} (n = {kept.n:,})." for name, kept in own.by_benchmark.items()
    ]
    beside = "" if own.beside_random is None else f"; less that of a random mapper, {_small(own.beside_random)}"
    lines.append(f"Next-token KL to the target's own: {_number(own.kl, 3)} nats a token{beside}.")
    return [*lines, f"Attention-output cosine: {_cosine(own)}."]


def _cosine(own: Verdict) -> str:
    return _not_measured("diagnostics", own) if own.cosine is None else _number(own.cosine, 3)


def _speed(own: Verdict) -> list[str]:
    pace = own.pace
    if pace is None:
        return [f"{_not_measured('latency', own)}."]
    longest = pace.longest
    return [
        f"At {longest.length:,} tokens, the longest measured ({longest.trials} trials, medians): mapper "
        f"{longest.mapper_ms.median:,.1f} ms, prefill by the source {longest.source_prefill_ms.median:,.1f} ms, by the target "
        f"{longest.target_prefill_ms.median:,.1f} ms.",
        f"Warm (the source's cache is there): {longest.warm:.2f}× the speed of the target's own prefill.",
        f"Cold (the source prefills first): {longest.cold:.2f}×.",
        f"Loading the mapper: {pace.load.median:,.1f} ms once a process{_repaid(pace)}.",
    ]


def _repaid(pace: Pace) -> str:
    """After how many hand-offs the loading is repaid."""
    saved = pace.longest.target_prefill_ms.median - pace.longest.mapper_ms.median
    if saved <= 0:
        return ""
    count = math.ceil(pace.load.median / saved)
    words = ("hand-off", "repays") if count == 1 else ("hand-offs", "repay")
    return f", which {count:,} warm {words[0]} of {pace.longest.length:,} tokens {words[1]}"


def _size(results: Results, own: Verdict) -> list[str]:
    manifest = results.manifests[own.pair.name, own.system]
    share = 100 * manifest["parameters"] / results.cards[own.pair.target]["parameters"]
    return [
        f"{manifest['parameters']:,} parameters ({share:.1f} % of the target's), "
        f"{manifest['weights_bytes'] / MEGABYTE:,.1f} MB on disk."
    ]


def _recipe(results: Results, own: Verdict) -> str:
    if own.recipe is None:
        return f"{_not_measured('the sweep `improved`', own)}."
    name = own.recipe.name
    if name == own.system:
        return f"`{name}` itself: no closed-form recipe of the sweep has a lower next-token KL."
    manifests = results.manifests
    recipe, base = (results.recipe(own.pair.name, each) for each in (name, own.system))
    size = manifests[own.pair.name, name]["parameters"] / manifests[own.pair.name, own.system]["parameters"]
    gained = own.recipe.gained
    undecided = "" if gained.interval()[1] < 0 else f" These do not tell it from `{own.system}`."
    return (
        f"`{name}` ({difference(recipe, base)}), of {size:.2f}× the parameters: next-token KL {_small(gained)} nats a token "
        f"beside `{own.system}`, on chunks that did not choose it.{undecided}"
    )


def _rules(own: Verdict) -> list[str]:
    lines = [
        f"*{tier.name}*: at least {100 * tier.retention:.0f} % retention and an attention cosine of at least {tier.cosine:.2f}."
        for tier in TIERS[:-1]
    ]
    lines.append(f"*{TIERS[-1].name}*: anything below.")
    lines.append(f"Both with their whole interval; where one leaves two tiers open, the tier is *{NOT_DECIDED}*.")
    lines.append("The bounds are ours, not the paper's, and those of the cosine a guess until more pairs are measured.")
    return lines + ([] if own.cosine is not None else ["The cosine was not measured here, so retention alone decides."])


def _not_measured(what: str, own: Verdict) -> str:
    """That something was not, and what to add."""
    return f"not measured (add {what} for {own.pair.name} to the config)"


def _percent(quantity: Quantity) -> str:
    """In percent with its interval, or why there is no value."""
    if isinstance(quantity, Undefined):
        return f"undefined ({quantity.reason})"
    low, high = quantity.interval()
    return f"{100 * quantity.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _number(sampled: Sampled, decimals: int) -> str:
    """With its interval."""
    low, high = sampled.interval()
    return f"{sampled.value:.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"


def _small(sampled: Sampled) -> str:
    """A difference that may be tiny, with its interval: two significant digits each."""
    low, high = sampled.interval()
    return f"{sampled.value:+.2g} [{low:+.2g}, {high:+.2g}]"
