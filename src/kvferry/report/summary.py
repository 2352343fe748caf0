"""The plain-text table at the end of a run: a block a pair, a line a benchmark, at most 110 columns. Writes nothing."""

from __future__ import annotations

import numpy as np

from kvferry.records import PERPLEXITY
from kvferry.report import compare
from kvferry.report.inputs import SOURCE, Pair, Results
from kvferry.report.items import TARGET, record_of
from kvferry.report.names import BENCHMARKS
from kvferry.report.stats import Quantity, Sampled, Undefined, wilson

WIDTH = 110
LAYOUT = "{:<10} {:>6}  {:<22} {:<22} {:<22} {}"
HEAD = ("", "n", "target", "source alone", "transfer", "gap recovered, %")


def headline(results: Results) -> str:
    """Scores of target, source alone and headline transfer with 95 % intervals, and the share of the gap recovered.

    Accuracies and shares in percent (Wilson, paired bootstrap); prefix perplexity with an interval over chunks,
    its share of the gap on the log scale.
    """
    blocks = ["\n".join(_block(results, pair)) for pair in results.pairs]
    note = (
        "95 % intervals: Wilson for accuracies, bootstrap over items otherwise. Perplexity's gap is on the log scale.\n"
        "undefined: the target is not better than the source, or not clearly so on these items."
    )
    return "\n\n".join([*blocks, note])


def _block(results: Results, pair: Pair) -> list[str]:
    headline = results.headline(pair)
    title = f"{pair.name}: {pair.source} to {pair.target}, {headline}, k = {results.k(pair.name, headline)}"
    names = (*results.benchmarks, PERPLEXITY)
    return [title[:WIDTH], _line(HEAD), *(_line(_entries(results, pair, name)) for name in names)]


def _line(entries: tuple[str, ...]) -> str:
    return LAYOUT.format(*entries).rstrip()


def _entries(results: Results, pair: Pair, benchmark: str) -> tuple[str, ...]:
    systems = (TARGET, SOURCE, results.headline(pair))
    score = _perplexity if benchmark == PERPLEXITY else _accuracy
    share = compare.gap_recovered(results, pair, results.headline(pair), benchmark, log=benchmark == PERPLEXITY)
    _, record = record_of(results, pair, TARGET, benchmark)
    return (
        BENCHMARKS[benchmark],
        f"{record.n:,}",
        *(score(results, pair, system, benchmark) for system in systems),
        _share(share),
    )


def _accuracy(results: Results, pair: Pair, system: str, benchmark: str) -> str:
    _, record = record_of(results, pair, system, benchmark)
    low, high = wilson(sum(item.score for item in record.items), record.n)
    return f"{100 * record.value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _perplexity(results: Results, pair: Pair, system: str, benchmark: str) -> str:
    _, _, nats = compare.paired(results, pair, system, benchmark)
    return _with_interval(nats.map(np.exp), 2 if nats.value < np.log(100) else 0)


def _share(quantity: Quantity) -> str:
    return (
        "undefined" if isinstance(quantity, Undefined) else _with_interval(quantity.map(lambda share: 100 * share), 0)
    )


def _with_interval(sampled: Sampled, decimals: int) -> str:
    low, high = sampled.interval()
    return f"{sampled.value:.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"
