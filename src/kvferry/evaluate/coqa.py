"""CoQA, answered turn by turn: by a model on its own, by the target on mapped caches, by source and target in turn.

All systems of a job answer the same conversations, a few at a time: what the source has read of these is shared by all
mappers, and forgotten before the next few. As many mappers as `pair.together` allows are loaded at once. Does not know
which conversations they are, how one becomes tokens, nor how an answer is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvferry.errors import KvferryError
from kvferry.evaluate.dialogue import FORMAT, Answers, Dialogue, Voice, alternate, answers, open_up
from kvferry.evaluate.kept import keep, missing, publish
from kvferry.evaluate.material import Material, make_material
from kvferry.evaluate.pair import DECIDING, together
from kvferry.evaluate.planning import batches
from kvferry.evaluate.setting import Contestant, Outcome, Setting, record_of
from kvferry.kv.cache import layer_devices
from kvferry.kv.handoff import Handoff, Native
from kvferry.kv.mapper import load_mapper, read_manifest
from kvferry.kv.prefill import Memory
from kvferry.prepare.models import Loaded
from kvferry.progress import bar
from kvferry.provenance import Stopwatch
from kvferry.records import COQA, COQA_ALTERNATE, COQA_HANDOFF, NATIVE, Item

METRIC = "f1"

# what answers a few dialogues: by system, the answers
Play = Callable[[Sequence[Dialogue]], Iterator[tuple[str, Answers]]]


def run_native(setting: Setting, how: Mapping[str, Any], output: Path) -> None:
    """The setting's target answers every turn on its own; writes the record COQA to `output`.

    Raises:
        KvferryError: as `make_material`.
    """
    setting = with_own_hold_back(setting, how)
    material = make_material(setting, how, [setting.target])
    name = setting.target.card["model"]
    who = Contestant(NATIVE, name, material.identity, {COQA: how["conversations"]}, {COQA: output})
    own = Native(setting.target.model, Memory())
    if missing(who, setting, [COQA]):
        _answer(setting, material, COQA, [who], _every_turn(setting, how, {NATIVE: own}))
    publish(who, setting)


def run_pair(
    setting: Setting,
    source: Loaded,
    pair: str,
    how: Mapping[str, Any],
    outputs: Mapping[str, Mapping[str, Path]],
    mappers: Mapping[str, Path],
    back: Mapping[str, Path],
    heads: Mapping[str, int],
) -> None:
    """Answer by the protocols that each variant is asked for, and write the records; the setting's target is the pair's.

    Args:
        setting: of the target.
        source: the model that prefills, and that answers first in `alternate`.
        pair: its name.
        how: the config's section `coqa`.
        outputs: variant → COQA_HANDOFF, COQA_ALTERNATE or both → path of the record.
        mappers: variant → directory of its mapper from source to target.
        back: variant → directory of its mapper from target to source, for those with COQA_ALTERNATE.
        heads: variant → native head, 0 where there is none.

    Raises:
        KvferryError: a mapper is unreadable or was fitted for other models, or as `make_material`.
    """
    setting = with_own_hold_back(setting, how)
    crew = Crew(setting, source, pair, mappers, back, heads)
    material = make_material(setting, how, [source, setting.target])
    for protocol, play in ((COQA_HANDOFF, crew.handoffs), (COQA_ALTERNATE, crew.alternations)):
        everyone = [
            crew.contestant(variant, protocol, material, own[protocol])
            for variant, own in outputs.items()
            if protocol in own
        ]
        due = [who for who in everyone if missing(who, setting, [protocol])]
        for group in together(due, {who.name: crew.bytes(who.name, protocol) for who in due}):
            _answer(setting, material, protocol, group, play([who.name for who in group], how))
        for who in everyone:
            publish(who, setting)


def with_own_hold_back(setting: Setting, how: Mapping[str, Any]) -> Setting:
    """The setting with the `hold_back` of the section `coqa`, where it has one: it then decides records as any other does.

    An answer is written right after it, so it tells in CoQA far more than where given text is scored.
    """
    if "hold_back" not in how:
        return setting
    evaluation = setting.evaluation | {"hold_back": how["hold_back"]}
    return replace(setting, config=setting.config | {"evaluation": evaluation})


@dataclass(frozen=True)
class Crew:
    """The mappers of a pair in both directions, by variant; see `run_pair`."""

    setting: Setting
    source: Loaded
    pair: str
    mappers: Mapping[str, Path]
    back: Mapping[str, Path]
    heads: Mapping[str, int]

    def _directories(self, variant: str, protocol: str) -> dict[str, Path]:
        """The mappers that a protocol needs, by direction.

        Raises:
            KvferryError: there is none for a direction.
        """
        found = {"mapper": self.mappers.get(variant)}
        if protocol == COQA_ALTERNATE:
            found["back"] = self.back.get(variant)
        lacking = [direction for direction, directory in found.items() if directory is None]
        if lacking:
            raise KvferryError(
                f"coqa: variant {variant} of {self.pair} has no {' and no '.join(lacking)} for {protocol}; "
                "fit it for both directions, or leave it out of coqa.variants"
            )
        return {direction: directory for direction, directory in found.items() if directory is not None}

    def contestant(self, variant: str, protocol: str, material: Material, output: Path) -> Contestant:
        """The variant by a protocol."""
        manifests = {name: read_manifest(path) for name, path in self._directories(variant, protocol).items()}
        own = {name: {key: manifest[key] for key in DECIDING} for name, manifest in manifests.items()}
        identity = material.identity | {"source": self.source.card["weights_id"]} | own
        limits = {protocol: material.how["conversations"]}
        names = (self.source.card["model"], self.pair, self.heads.get(variant, 0))
        return Contestant(variant, self.setting.target.card["model"], identity, limits, {protocol: output}, *names)

    def bytes(self, variant: str, protocol: str) -> int:
        """Of the weights that the protocol needs."""
        return sum(read_manifest(path)["weights_bytes"] for path in self._directories(variant, protocol).values())

    def handoffs(self, variants: Sequence[str], how: Mapping[str, Any]) -> Play:
        """Every turn answered by the target, by each of the variants."""
        return _every_turn(self.setting, how, {variant: self._forth(variant) for variant in variants})

    def alternations(self, variants: Sequence[str], how: Mapping[str, Any]) -> Play:
        """Source and target in turn, by each of the variants; the source's first turn is the same for all."""
        ways = {variant: (self._forth(variant), self._back(variant)) for variant in variants}
        voice = _voice(self.setting, how)

        def play(dialogues: Sequence[Dialogue]) -> Iterator[tuple[str, Answers]]:
            opening = open_up(self.source.model, dialogues, voice)
            for variant, (forth, back) in ways.items():
                yield variant, alternate(forth, back, dialogues, voice, opening)

        return play

    def _forth(self, variant: str) -> Handoff:
        target, head = self.setting.target, self.heads.get(variant, 0)
        return _handoff(self.mappers[variant], self.source, target, head, self.setting.memory)

    def _back(self, variant: str) -> Handoff:
        return _handoff(self.back[variant], self.setting.target, self.source, self.heads.get(variant, 0), Memory())


def _handoff(directory: Path, source: Loaded, target: Loaded, head: int, memory: Memory) -> Handoff:
    """A hand-off with its mapper loaded."""
    mapper, _ = load_mapper(directory, source.card, target.card)
    return Handoff(source.model, target.model, mapper.onto(layer_devices(target.model)), head, memory)


def _voice(setting: Setting, how: Mapping[str, Any]) -> Voice:
    return Voice(setting.target.tokenizer, how["max_new_tokens"])


def _every_turn(setting: Setting, how: Mapping[str, Any], systems: Mapping[str, Native | Handoff]) -> Play:
    """Every turn answered by the target, by each of the systems."""
    voice, hold_back = _voice(setting, how), setting.evaluation["hold_back"]

    def play(dialogues: Sequence[Dialogue]) -> Iterator[tuple[str, Answers]]:
        for name, system in systems.items():
            yield name, answers(system, dialogues, hold_back, voice)

    return play


def _answer(setting: Setting, material: Material, protocol: str, group: Sequence[Contestant], play: Play) -> None:
    """Answer all conversations by all systems of a group, and keep the records; the time is shared out among these."""
    watch = Stopwatch()
    said: dict[str, dict[str, tuple[str, ...]]] = {who.name: {} for who in group}
    lengths = [len(dialogue.tokens) + material.how["max_new_tokens"] for dialogue in material.dialogues]
    with bar(len(lengths) * len(group), protocol, "conversation") as progress:
        # Every step of decoding costs a pass whatever the batch, so padding is cheaper than one more batch.
        most = setting.evaluation["batch_tokens"]
        for batch in batches(lengths, range(len(lengths)), lambda rows, longest: rows * longest <= most, most):
            dialogues = [material.dialogues[number] for number in batch]
            for name, found in play(dialogues):
                said[name] |= {dialogue.id: own for dialogue, own in zip(dialogues, found, strict=True)}
                progress.update(len(batch))
            setting.memory.clear()
    seconds = watch.seconds() / len(group)
    for who in group:
        outcome = _outcome(setting, material, protocol, material.items(said[who.name]), seconds)
        keep(who, setting, record_of(who, setting, outcome))


def _outcome(setting: Setting, material: Material, protocol: str, items: list[Item], seconds: float) -> Outcome:
    facts = {name: material.how[name] for name in ("conversations", "turns", "max_new_tokens")}
    facts |= {"format": FORMAT, "history": "gold", "items_total": len(items)}
    data = setting.questions.facts() | {"tokens_sha256": material.identity["tokens_sha256"]}
    return Outcome(protocol, METRIC, items, seconds, facts, data, material.how["seed"])
