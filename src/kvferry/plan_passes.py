"""Tokens that each model of a run reads, stage by stage, and the operations of these forward passes.

A pass takes 2 operations a weight and token; attention, and headers that few-shot prompts share, come on top and are left out.
Sources read a context once for all systems of a job, as the evaluation does; generated answers count at their full length. Knows
the checked config and about how long the items of a benchmark are. Reads no data and no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvferry import asked
from kvferry.config import Project
from kvferry.plan_jobs import dumps
from kvferry.records import PERPLEXITY
from kvferry.work import calibration_on


class Items(NamedTuple):
    """Of a benchmark: all items, and on average an item's tokens of context and of all its continuations together."""

    all: int
    context: float
    continuations: float


# Tokens are of SmolLM2's tokenizer and 100 items each, without few-shot examples.
ITEMS = {
    "arc_challenge": Items(1172, 30, 23),
    "hellaswag": Items(10042, 47, 111),
    "winogrande": Items(1267, 35, 11),
    "mmlu": Items(14042, 99, 4),
    "gsm8k": Items(1319, 67, 0),
    "piqa": Items(1838, 13, 49),
    "boolq": Items(3270, 146, 2),
    "arc_easy": Items(2376, 25, 16),
}
GENERATED = ("gsm8k",)

# Operations that a system's mapper takes a token, by pair and system.
Apply = Mapping[tuple[str, str], float]


class Passes:
    """The forward passes of a run. Every method gives operations of a stage."""

    def __init__(self, project: Project, weights: Mapping[str, float], apply: Apply) -> None:
        """weights: of each model of the run."""
        self.project, self.config, self.weights, self.apply = project, project.config, weights, apply

    def dumps(self) -> float:
        """The calibration sequences of each corpus, once a model."""
        return sum(self._read(model, self._calibrated(corpus)) for model, corpus in dumps(self.project))

    def evaluation(self) -> float:
        """Benchmarks and perplexity: each model alone, and each pair."""
        models = sum(self._alone(model) for model in self.project.models_of_run())
        return models + sum(self._mapped(pair) for pair in self.config["pairs"])

    def measures(self) -> float:
        """Conversations, diagnostics, times, and native tokens."""
        return self._conversations() + self._diagnostics() + self._times() + self._native_tokens()

    def _read(self, model: str, tokens: float) -> float:
        return 2 * self.weights[model] * tokens

    def _both(self, pair: str, tokens: float) -> float:
        return sum(self._read(self.project.pair(pair)[role], tokens) for role in ("source", "target"))

    def _calibrated(self, corpus: str) -> int:
        how = calibration_on(self.project, corpus)
        return (how["sequences"] + how["held_out"]) * how["length"]

    def _alone(self, model: str) -> float:
        """The model reads contexts once for itself and its controls, and what follows for each."""
        jobs = asked.native_jobs(self.project, model).values()
        contexts, tails = sum(map(self._contexts, jobs)), sum(sum(self._tails(job).values()) for job in jobs)
        return self._read(model, contexts + tails)

    def _mapped(self, pair: str) -> float:
        """The source reads contexts, a mapper a system maps them, and the target reads what follows."""
        entry, total = self.project.pair(pair), 0.0
        for job in asked.evaluation_jobs(self.project, pair).values():
            tails, contexts = self._tails(job), self._contexts(job)
            total += self._read(entry["source"], contexts) + self._read(entry["target"], sum(tails.values()))
            total += contexts * sum(self.apply.get((pair, system), 0) for system in tails)
        return total

    def _contexts(self, job: asked.Job) -> float:
        """Tokens of the contexts that some system of the job is asked about, and of prefixes."""
        counts: dict[str, float] = {}
        for system in job.limits:
            for name, count in self._counts(job, system).items():
                counts[name] = max(count, counts.get(name, 0))
        prefixes = self._chunks("prefix") if any(PERPLEXITY in names for names in job.records.values()) else 0
        return prefixes + sum(count * ITEMS[name].context for name, count in counts.items())

    def _tails(self, job: asked.Job) -> dict[str, float]:
        """By system, tokens after the contexts: continuations, answers, and what the target holds back."""
        held, most = self.config["evaluation"]["hold_back"], self.config["evaluation"]["max_new_tokens"]
        answers = {name: most if name in GENERATED else ITEMS[name].continuations for name in ITEMS}
        return {
            system: (self._chunks("scored") if PERPLEXITY in names else 0)
            + sum(count * (answers[name] + held) for name, count in self._counts(job, system).items())
            for system, names in job.records.items()
        }

    def _counts(self, job: asked.Job, system: str) -> dict[str, float]:
        """Items of each benchmark, those of a shard where the job is one."""
        shards = job.shard[1] if job.shard else 1
        return {
            name: min(limit or ITEMS[name].all, ITEMS[name].all) / shards for name, limit in job.limits[system].items()
        }

    def _chunks(self, part: str) -> int:
        return self.config["perplexity"]["chunks"] * self.config["perplexity"][part]

    def _conversations(self) -> float:
        """Every conversation at its most tokens: by each model alone, and by both of a pair for each variant and protocol."""
        coqa = self.config.get("coqa")
        if not coqa:
            return 0.0
        tokens = coqa["conversations"] * (coqa["max_tokens"] + coqa["turns"] * coqa["max_new_tokens"])
        rounds = {pair: sum(map(len, asked.dialogues(self.project, pair).values())) for pair in coqa["pairs"]}
        alone = sum(self._read(model, tokens) for model in asked.dialogue_models(self.project))
        return alone + sum(count * self._both(pair, tokens) for pair, count in rounds.items())

    def _diagnostics(self) -> float:
        """Both models of each pair read the texts once."""
        how = self.config.get("diagnostics")
        if not how:
            return 0.0
        item = ITEMS[how["benchmark"]]
        tokens = (
            how["texts"] * (item.context + item.continuations) + how["held_out"] * self.config["calibration"]["length"]
        )
        return sum(self._both(pair, tokens) for pair in self.config["pairs"])

    def _times(self) -> float:
        """All lengths with all trials, also those that the time limit or a model's positions will leave out."""
        how = self.config.get("latency")
        tokens = (how["warm_up"] + how["trials"]) * how["batch"] * sum(how["lengths"]) if how else 0
        return sum(self._both(pairs[0], tokens) for pairs in asked.timed_together(self.project))

    def _native_tokens(self) -> float:
        """Both ends and all counts: the chunks of perplexity, and the timed hand-off."""
        how = self.config.get("native_tokens")
        if not how:
            return 0.0
        a_count = self._chunks("prefix") + self._chunks("scored") + how["trials"] * how["length"]
        return sum(self._both(pair, 2 * len(how["counts"]) * a_count) for pair in how["pairs"])
