"""Which continuations share a row, and their log-likelihoods from logits, as lm-eval counts them.

Continuations of one context that differ in their last token only are one row: the target reads what they have in common. The
context's own last logits score a first token, and those after token j the token j + 1. Knows no system, batch or cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvferry.kv.prefill import Tokens

BLOCK = 32
Answer = tuple[float, bool]


@dataclass(frozen=True)
class Row:
    """Continuations `rest + (last,)` of the context with this number in its batch, for each of `lasts`.

    found: for each place, from the first token on, the answers to `wanted` there.
    """

    number: int
    rest: Tokens
    lasts: tuple[int, ...]
    found: list[list[Answer]] = field(default_factory=list)

    @property
    def wanted(self) -> list[tuple[int, ...]]:
        """Tokens that are scored at each place: one each, and all of the last ones at the end."""
        return [*((token,) for token in self.rest), self.lasts]

    def answers(self) -> dict[Tokens, Answer]:
        """Log-likelihood of each continuation and whether greedy decoding gives it, once all places are found."""
        *before, ends = self.found
        total = sum(score for ((score, _),) in before)
        greedy = all(best for ((_, best),) in before)
        return {
            (*self.rest, last): (total + score, greedy and best)
            for last, (score, best) in zip(self.lasts, ends, strict=True)
        }


def rows_of(asked: Sequence[Iterable[Tokens]]) -> list[Row]:
    """The rows of a batch, longest first; asked: continuations of each context."""
    lasts: dict[tuple[int, Tokens], list[int]] = {}
    for number, continuations in enumerate(asked):
        for continuation in sorted(set(continuations)):
            lasts.setdefault((number, continuation[:-1]), []).append(continuation[-1])
    rows = [Row(number, rest, tuple(ends)) for (number, rest), ends in lasts.items()]
    return sorted(rows, key=lambda row: -len(row.rest))


def note(logits: Tensor, asked: Sequence[tuple[int, Row, tuple[int, ...]]]) -> None:
    """Add what `logits [places, vocabulary]` say: asked are (place, row, tokens), in any order of places."""
    places = [place for place, _, tokens in asked for _ in tokens]
    answers = iter(token_scores(logits, places, [token for _, _, tokens in asked for token in tokens]))
    for _, row, tokens in asked:
        row.found.append([next(answers) for _ in tokens])


def token_scores(logits: Tensor, places: Sequence[int], tokens: Sequence[int]) -> list[Answer]:
    """Log-probability of each token at its place and whether it is the most likely; logits `[places, vocabulary]`.

    ln p = (x − max) − ln Σ exp(x − max), whose last term is found for a few places at a time: a tensor of all probabilities
    would leave the processor's cache and take three times as long.
    """
    at, ids = torch.tensor([places, tokens], device=logits.device)
    best = logits.amax(-1)
    # the log-probability of the most likely token
    normal = torch.cat([block.float().log_softmax(-1).amax(-1) for block in logits.split(BLOCK)])
    chosen = logits[at, ids]
    scores = (chosen.float() - best[at].float()) + normal[at]
    likely = chosen == best[at]
    # Where several tokens are the most likely, the first of them counts, as in lm-eval.
    likely[likely.clone()] = logits[at[likely]].argmax(-1) == ids[likely]
    return list(zip(scores.tolist(), likely.tolist(), strict=True))
