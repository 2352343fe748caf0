"""One benchmark, answered by one system: lm-eval's tasks, the lm-eval model of the system, and the items that come of it.

Does not know where records go, or which systems a table needs.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from transformers import set_seed

from kvferry.errors import KvferryError
from kvferry.evaluate.harness import SystemLM
from kvferry.evaluate.setting import Contestant, Outcome, Setting
from kvferry.evaluate.tasks import BENCHMARKS, Benchmark, draw_items
from kvferry.kv.handoff import System
from kvferry.provenance import Stopwatch
from kvferry.records import Item

Samples = dict[str, list[dict[str, Any]]]


def quiet_harness() -> None:
    """Only errors from lm-eval: its advice on settings that are chosen here would fill every log."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def run_benchmark(who: Contestant, system: System, setting: Setting, name: str) -> Outcome:
    """Answer a benchmark, as many items as the contestant's limit says.

    Raises:
        KvferryError: items that were asked for were not answered, or logits of one are not finite.
    """
    quiet_harness()
    benchmark, evaluation = BENCHMARKS[name], setting.evaluation
    tasks = setting.questions.tasks(name)
    watch, drawn = Stopwatch(), draw_items(tasks, who.limits[name], evaluation["seed"], who.shard)
    model = SystemLM(
        system,
        setting.target.tokenizer,
        evaluation["hold_back"],
        evaluation["batch_tokens"],
        evaluation["max_new_tokens"],
        item_of=lambda request: f"{who.name}, item {request.task_name}/{drawn[request.task_name][request.doc_id]}",
    )
    samples = _answered(model, [task for task in tasks if task.config.task in drawn], drawn, evaluation["seed"])
    items = [item for task, own in samples.items() for item in read_samples(task, own, name)]
    asked = sum(map(len, drawn.values()))
    if len(items) != asked:
        raise KvferryError(
            f"{name}: {len(items)} items were answered, {asked} were asked for; run again and report this"
        )
    facts = _task_facts(tasks, benchmark) | {"max_new_tokens": evaluation["max_new_tokens"]}
    facts |= {"shard": list(who.shard)} if who.shard else {}
    return Outcome(
        name,
        benchmark.metric,
        items,
        watch.seconds(),
        facts,
        setting.questions.facts(),
        evaluation["seed"],
        benchmark.chance,
    )


def _answered(model: SystemLM, tasks: list[ConfigurableTask], drawn: dict[str, list[int]], seed: int) -> Samples:
    """lm-eval's samples by task. Its `simple_evaluate` does the same, and then asks pip for half a second what is installed."""
    set_seed(seed)
    for task in tasks:
        task.set_fewshot_seed(seed=seed)
    loaded = TaskManager(include_defaults=False).load(tasks)
    return evaluate(lm=model, task_dict=loaded, samples=drawn, bootstrap_iters=0, log_samples=True)["samples"]


def _task_facts(tasks: list[ConfigurableTask], benchmark: Benchmark) -> dict[str, Any]:
    """What a record says of the benchmark as lm-eval defines it."""
    return {
        "num_fewshot": benchmark.shots,
        "task_version": float(tasks[0].config.metadata["version"]),
        "items_total": sum(len(task.eval_docs) for task in tasks),
        "filter": benchmark.filter,
    }


def read_samples(task: str, samples: list[dict[str, Any]], name: str) -> list[Item]:
    """Items of one task from lm-eval's samples: the reported metric, with log-likelihoods or the text as the response."""
    benchmark = BENCHMARKS[name]
    own = sorted(
        (sample for sample in samples if sample["filter"] == benchmark.filter), key=lambda sample: sample["doc_id"]
    )
    return [
        Item(f"{task}/{sample['doc_id']}", float(sample[benchmark.metric]), response=_response(sample["resps"]))
        for sample in own
    ]


def _response(answers: list[list[Any]]) -> list[float] | str:
    """The log-likelihood of each choice, or the generated text."""
    first = answers[0][0]
    return first if isinstance(first, str) else [float(answer[0][0]) for answer in answers]
