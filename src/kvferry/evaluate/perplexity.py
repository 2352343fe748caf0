"""How well a system predicts text after a prefix: nats a token, and how near it is to the target reading on its own.

Each chunk's second part is scored given a prefix cache of its first, own or mapped (prefix perplexity: the paper, Table 13).
All but the last prefix tokens come through the system, as in the hand-off; the target reads those and the scored tokens. The
same logits give KL(target's own ‖ system) = Σ p·(ln p − ln q) and the share of tokens with the same arg max.
Does not know corpora or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvferry.evaluate.finite import check_finite, named
from kvferry.files import fingerprint
from kvferry.kv.handoff import System, read
from kvferry.kv.prefill import Memory, Span
from kvferry.prepare.decoder import check_positions
from kvferry.progress import bar
from kvferry.records import NEXT_TOKEN_KL, PERPLEXITY, TOP1_AGREEMENT, Item

BATCH = 4
METRICS = {PERPLEXITY: "perplexity", NEXT_TOKEN_KL: "kl", TOP1_AGREEMENT: "agreement"}

Found = dict[str, dict[str, list[Item]]]


@dataclass(frozen=True)
class Cut:
    """Tokens of a chunk: the first `prefix` are given, the last `hold_back` of those are read by the target."""

    prefix: int
    hold_back: int

    @property
    def ferried(self) -> int:
        """Tokens that come through the system."""
        return max(self.prefix - self.hold_back, 0)


@torch.inference_mode()
def measure_chunks(own: System, systems: Mapping[str, System], chunks: Tensor, cut: Cut, memory: Memory) -> Found:
    """Items of each system by measure (the keys of METRICS), one a chunk of `chunks [count, prefix + scored]`.

    A score is a mean over the chunk's scored tokens, the weight their number; an id holds the chunk's number and a hash of its
    tokens, so that other texts are never taken for the same item. `own` is the target on its own, which may be one of
    `systems`; all have the same target. Of logits, the target's own of a batch and one system's are held at a time. The memory
    that systems share is cleared after each batch, whose prefills no later one asks for.

    Raises:
        KvferryError: chunks are longer than the target's positions, or what a system makes of one is not finite.
    """
    check_positions(own.target.config, chunks.shape[1], "perplexity.prefix and perplexity.scored together")
    found: Found = {name: {measure: [] for measure in METRICS} for name in systems}
    with bar(len(chunks), "perplexity", "chunk") as progress:
        for first, batch in zip(range(0, len(chunks), BATCH), chunks.split(BATCH), strict=True):
            ids = batch.to(own.target.device)
            with named(_called("the target on its own", first)):
                truth = list(_log_probabilities(own, ids, cut))
            for name, system in systems.items():
                readings = truth if system is own else _log_probabilities(system, ids, cut)
                with named(_called(name, first)):
                    for row, (true, reading) in enumerate(zip(truth, readings, strict=True)):
                        _note(found[name], ids[row], cut, _scores(true, reading, ids[row, cut.prefix :]))
            memory.clear()
            progress.update(len(batch))
    return found


def _called(who: str, first: int) -> Callable[[int], str]:
    """What a message calls a row of the batch that begins with chunk `first`."""
    return lambda row: f"{who}, chunk {first + row} of the text for perplexity"


def _log_probabilities(system: System, ids: Tensor, cut: Cut) -> Iterator[Tensor]:
    """Log-probabilities `[scored, vocabulary]` of the next token at every scored one, float32, a chunk at a time.

    Raises:
        NotFinite: logits are not finite.
    """
    everything, start = torch.ones_like(ids), cut.ferried
    given = system.start(len(ids))
    if start:
        given = system.extend(given, Span(ids[:, :start], everything[:, :start]))
    rest = Span(ids[:, start:-1], everything[:, start:-1])
    logits, given = read(system.target, given, rest, logits_to_keep=ids.shape[1] - cut.prefix)
    check_finite(logits, given, range(len(ids)))
    for row in logits:
        yield row.float().log_softmax(-1)


def _scores(true: Tensor, reading: Tensor, wanted: Tensor) -> dict[str, float]:
    """Means over scored tokens, from log-probabilities `[scored, vocabulary]` and the tokens `[scored]`."""
    nats = -reading.gather(-1, wanted[:, None]).mean()
    divergence = torch.nn.functional.kl_div(reading, true, reduction="none", log_target=True).sum(-1).mean()
    same = (true.argmax(-1) == reading.argmax(-1)).float().mean()
    # a divergence of nothing may come out at −1e-8
    return {PERPLEXITY: float(nats), NEXT_TOKEN_KL: max(float(divergence), 0.0), TOP1_AGREEMENT: float(same)}


def _note(lists: dict[str, list[Item]], ids: Tensor, cut: Cut, scores: dict[str, float]) -> None:
    """Append an item of the chunk to the list of each measure."""
    name = f"chunk-{len(lists[PERPLEXITY])}-{fingerprint(ids.tolist())[:8]}"
    for measure, score in scores.items():
        lists[measure].append(Item(name, score, float(len(ids) - cut.prefix)))
