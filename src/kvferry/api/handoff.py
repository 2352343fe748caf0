"""One hand-off: the source reads the prompt, the mapper ferries its cache, the target goes on. Does not know conversations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvferry.api.checks import Prompt, check_count, check_positions, tokens_of
from kvferry.api.ferry import Ferry, load_mapper, mapper_at
from kvferry.api.models import load_model
from kvferry.api.reader import Generation, Reader
from kvferry.api.session import Session, Switch
from kvferry.errors import KvferryError
from kvferry.kv.cache import NO_LOGITS, forward, generation_inputs, plain_cache
from kvferry.kv.mapper import read_manifest
from kvferry.prepare.models import CARD, Loaded


@dataclass(frozen=True)
class Handed(Generation):
    """What the target wrote after a hand-off; switch: what the hand-off took. The rest is as in `Generation`."""

    switch: Switch


class Handoff:
    """Two models and the mapper from one to the other.

    Args:
        source, target: what `kvferry.load_model` or transformers' `from_pretrained` returned.
        mapper: the directory of a mapper, or what `kvferry.load_mapper` returned for these two models.

    Raises:
        KvferryError: the mapper cannot be loaded, or is for other models.

    Example:
        >>> handoff = Handoff.load("results/pairs/24l-to-30l/mappers/ridge_k8")
        >>> made = handoff.generate("The ferry leaves at", max_new_tokens=8, hold_back=2)
        >>> len(made.tokens) <= 8, made.read_tokens
        (True, 2)
    """

    def __init__(
        self, source: Loaded | PreTrainedModel, target: Loaded | PreTrainedModel, mapper: Ferry | str | Path
    ) -> None:
        self.mapper = mapper if isinstance(mapper, Ferry) else load_mapper(mapper, source, target)
        for role, given, own in (("source", source, self.mapper.source), ("target", target, self.mapper.target)):
            if (given.model if isinstance(given, Loaded) else given) is not own.model:
                raise KvferryError(
                    f"the mapper was loaded for another {role} in memory ({own.card['model']}); load it for these two models"
                )
        self.source, self.target = self.mapper.source, self.mapper.target

    @classmethod
    def load(
        cls,
        directory: str | Path,
        source: str | Path | None = None,
        target: str | Path | None = None,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> Handoff:
        """Load a mapper and its two models.

        Args:
            directory: of the mapper, `RESULTS/pairs/PAIR/mappers/VARIANT` of a run.
            source, target: as for `kvferry.load_model`; by default where the run that fitted the mapper keeps its models.
            device, dtype: of both models, as for `kvferry.load_model`.

        Returns:
            The hand-off, ready to generate.

        Raises:
            KvferryError: there is no mapper or no model, or the mapper was fitted for other models.
        """
        path = mapper_at(directory)
        manifest = read_manifest(path)
        places = {
            role: given or _beside(path, role, manifest[role]["model"])
            for role, given in (("source", source), ("target", target))
        }
        return cls(*(load_model(place, device, dtype) for place in places.values()), path)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        *,
        hold_back: int = 1,
        stop: str | None = None,
        stream: Callable[[str], object] | None = None,
    ) -> Handed:
        """The source reads a prompt, its cache is mapped, and the target goes on greedily.

        Args:
            prompt: a text, or one row of token ids (a list, or a tensor `[tokens]` or `[1, tokens]`).
            max_new_tokens: ≥ 1.
            hold_back: last tokens of the prompt that the target reads itself, ≥ 1. A prompt of no more tokens is read by
                the target alone.
            stop: end also when the text holds this.
            stream: is given the text piece by piece.

        Returns:
            What the target wrote, with the time of each step.

        Raises:
            KvferryError: the prompt is empty, a batch, or too long for the models' positions, or a count is less than 1.
        """
        session = Session(self.mapper, hold_back=hold_back)
        session.add(prompt)
        check_count("max_new_tokens", max_new_tokens)
        check_positions(self.target, len(session.tokens) + max_new_tokens)
        cost = session.switch()
        return Handed(**vars(session.generate(max_new_tokens, stop=stop, stream=stream)), switch=cost)

    def alone(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        *,
        stop: str | None = None,
        stream: Callable[[str], object] | None = None,
    ) -> Generation:
        """What the target writes if it reads the whole prompt itself, to compare with. Arguments and errors as of `generate`."""
        check_count("max_new_tokens", max_new_tokens)
        tokens = tokens_of(prompt, self.target, special=True)
        check_positions(self.target, len(tokens) + max_new_tokens)
        return Reader(self.target).generate(tokens, max_new_tokens, stop, stream)

    @torch.no_grad()
    def inputs(
        self, input_ids: Tensor | str, attention_mask: Tensor | None = None, *, hold_back: int = 1
    ) -> dict[str, Any]:
        """What transformers' own `generate` of the target takes to go on from a mapped cache: sampling, beams, batches.

        For several beams or samples of a row transformers wants that many rows in the cache:
        `inputs["cache"].batch_repeat_interleave(num_beams)`.

        Args:
            input_ids: `[batch, tokens]`, or one text.
            attention_mask: `[batch, tokens]`, 0 for padding, which must be on the left, as `generate` wants it; None if there
                is none.
            hold_back: last tokens that the target reads itself, ≥ 1.

        Returns:
            Ids, mask and the target's cache of all but the last `hold_back` tokens, by the names of `generate`; no cache if that
            leaves nothing to map.

        Raises:
            KvferryError: padding on the right, a mask of another shape, unknown tokens, or too many for the models' positions.

        Example:
            >>> inputs = handoff.inputs("The ferry leaves at")
            >>> out = handoff.target.model.generate(**inputs, max_new_tokens=8, do_sample=True)
            >>> out.shape[1] > inputs["input_ids"].shape[1]
            True
        """
        check_count("hold_back", hold_back)
        ids = self._ids(input_ids)
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.long().to(ids.device)
        if mask.shape != ids.shape:
            raise KvferryError(f"attention_mask is {list(mask.shape)} and input_ids {list(ids.shape)}; give them alike")
        if not mask[:, -1].all():
            raise KvferryError("a row ends in padding; pad the batch on the left, as transformers' generate wants it")
        for model in (self.source, self.target):
            check_positions(model, ids.shape[1])
        end = ids.shape[1] - hold_back
        if end < 1:
            return generation_inputs(ids, mask)
        cache, seen = plain_cache(self.source.model), mask[:, :end]
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        forward(self.source.model, ids[:, :end], cache, seen, positions, NO_LOGITS)
        mapped = self.mapper.translate(cache, attention_mask=seen, input_ids=ids[:, :end])
        return generation_inputs(ids, mask, mapped)

    def _ids(self, given: Tensor | str) -> Tensor:
        """Ids `[batch, tokens]`."""
        if isinstance(given, str):
            given = torch.tensor([tokens_of(given, self.source, special=True)])
        if not isinstance(given, Tensor) or given.ndim != 2 or not given.numel():
            raise KvferryError("input_ids must be a tensor of [batch, tokens], at least one each, or a text")
        for row in given:
            tokens_of(row, self.source, special=True)
        return given.to(self.target.model.device)


def _beside(mapper: Path, role: str, name: str) -> Path:
    """Where a run whose mapper lies at `RESULTS/pairs/PAIR/mappers/VARIANT` has a model of this name."""
    remedy = f"give {role}: the directory of the model or its name on the hub"
    variant = mapper.resolve()
    if variant.parts[-4::2] != ("pairs", "mappers"):
        raise KvferryError(
            f"{mapper}: lies outside the results of a run, so its {role} {name} has to be named; {remedy}"
        )
    place = variant.parents[3] / "models" / name
    if not (place / CARD).is_file():
        raise KvferryError(f"{mapper}: its {role} {name} is not at {place}; {remedy}")
    return place
