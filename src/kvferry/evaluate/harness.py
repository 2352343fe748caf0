"""An lm-eval model that answers through a system's prefix: log-likelihoods and greedy generation.

Tokenisation, truncation and special cases are HFLM's, which this extends; only the computation is replaced: prompts with a common
header prefill it once, continuations of one context share its cache, and the last `hold_back` tokens of a prompt are
read by the target. Does not know benchmarks, mappers or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvferry.errors import KvferryError
from kvferry.evaluate.planning import batches, group_by_header
from kvferry.kv.handoff import Prefix, System, closed, read, select
from kvferry.kv.prefill import Span, Tokens
from kvferry.progress import bar

LOGIT_TOKENS = 1024
Answer = tuple[float, bool]


class SystemLM(HFLM):
    """lm-eval's view of a system.

    hold_back ≥ 1: last prompt tokens that the target reads itself; batch_tokens: padded tokens of a batch.
    """

    def __init__(
        self,
        system: System,
        tokenizer: PreTrainedTokenizerBase,
        hold_back: int,
        batch_tokens: int,
        max_new_tokens: int = 256,
    ) -> None:
        super().__init__(pretrained=system.target, tokenizer=tokenizer, batch_size=1)
        self.system, self.hold_back, self.batch_tokens, self.max_new_tokens = (
            system,
            hold_back,
            batch_tokens,
            max_new_tokens,
        )

    @property
    def max_gen_toks(self) -> int:
        """Tokens to generate where a task does not say."""
        return self.max_new_tokens

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Answer]:
        """Log-likelihood of each (context, continuation) and whether greedy decoding gives it; our own bar is shown instead."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **_: Any) -> list[Answer]:
        """Score (text, context, continuation) requests, in their order."""
        pairs = [self._fit(context, continuation) for _, context, continuation in requests]
        contexts = sorted({context for context, _ in pairs})
        asked: dict[Tokens, set[Tokens]] = {context: set() for context in contexts}
        for context, continuation in pairs:
            asked[context].add(continuation)
        answers: dict[tuple[Tokens, Tokens], Answer] = {}
        with bar(len(contexts), "contexts") as progress:
            for batch, prefix in self._prefixes(contexts):
                answers |= self._score([contexts[number] for number in batch], prefix, asked)
                progress.update(len(batch))
        return [answers[pair] for pair in pairs]

    def _fit(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[Tokens, Tokens]:
        """Cut a request that is longer than the model's positions from the left, as HFLM does."""
        if len(continuation) > self.max_length:
            raise KvferryError(
                f"a continuation of {len(continuation)} tokens is longer than the model's {self.max_length} positions; "
                "leave the item out"
            )
        if not context:
            raise KvferryError(
                f"a context without tokens cannot be scored (continuation {continuation}); leave the item out"
            )
        both = [*context, *continuation][-(self.max_length + 1) :]
        cut = len(both) - len(continuation)
        return tuple(both[:cut]), tuple(continuation)

    def _prefixes(self, prompts: Sequence[Tokens]) -> Iterator[tuple[list[int], Prefix]]:
        """Batches of prompt numbers, each with the system's prefix of those prompts but for their held-back tokens, closed."""
        heads = [prompt[: -self.hold_back] for prompt in prompts]
        for group in group_by_header(heads):
            header = None
            if group.header:
                header = self.system.extend(self.system.start(1), Span.of([group.header], self.device))
            for batch in batches([len(head) + 1 for head in heads], group.members, self.batch_tokens):
                rows = [heads[number][len(group.header) :] for number in batch]
                yield batch, closed(self._extend(header, rows))

    def _extend(self, header: Prefix | None, rows: list[Tokens]) -> Prefix:
        """A prefix of `rows`, on top of the header's if there is one."""
        if header is None:
            prefix = self.system.start(len(rows))
        else:
            prefix = select(self.system, header, torch.zeros(len(rows), dtype=torch.long, device=self.device))
        return self.system.extend(prefix, Span.of(rows, self.device)) if any(rows) else prefix

    def _score(
        self, contexts: list[Tokens], prefix: Prefix, asked: dict[Tokens, set[Tokens]]
    ) -> dict[tuple[Tokens, Tokens], Answer]:
        """Answers to everything asked of these contexts. Continuations that differ in their last token only share a row."""
        rows = sorted(
            {(number, c[:-1]) for number, context in enumerate(contexts) for c in asked[context]},
            key=lambda row: len(row[1]),
        )
        answers = {}
        for part in self._row_batches(rows):
            tails = [[*contexts[number][-self.hold_back :], *rest] for number, rest in part]
            chosen = torch.tensor([number for number, _ in part], device=self.device)
            logits = read(self.system.target, select(self.system, prefix, chosen), Span.of(tails, self.device))[0]
            for (number, rest), tail, row in zip(part, tails, logits, strict=True):
                scores = row[len(tail) - len(rest) - 1 : len(tail)].float().log_softmax(-1)
                context = contexts[number]
                answers |= {(context, c): _answer(scores, c) for c in asked[context] if c[:-1] == rest}
        return answers

    def _row_batches(self, rows: list[tuple[int, Tokens]]) -> Iterator[list[tuple[int, Tokens]]]:
        """Parts of the rows whose logits fit in memory."""
        lengths = [len(rest) + self.hold_back for _, rest in rows]
        for part in batches(lengths, range(len(rows)), LOGIT_TOKENS):
            yield [rows[number] for number in part]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy texts up to a stop string, in the order of the requests."""
        plans = [self._plan(*request.args) for request in requests]
        texts: list[str] = [""] * len(requests)
        for stops, limit in dict.fromkeys((plan[1], plan[2]) for plan in plans):
            members = [number for number, plan in enumerate(plans) if plan[1:] == (stops, limit)]
            prompts = [plans[number][0] for number in members]
            with bar(len(members), "generate") as progress:
                for batch, prefix in self._prefixes(prompts):
                    found = self._generate([prompts[number] for number in batch], prefix, stops, limit)
                    for number, text in zip(batch, found, strict=True):
                        texts[members[number]] = text
                    progress.update(len(batch))
        return texts

    def _plan(self, context: str, settings: dict[str, Any]) -> tuple[Tokens, tuple[str, ...], int]:
        """Prompt tokens (cut from the left to leave room), stop strings and the limit of new tokens.

        Raises:
            KvferryError: the task asks for sampling or for more tokens than the model has positions, or gives no prompt.
        """
        wanted = normalize_gen_kwargs(dict(settings), self.max_gen_toks)
        if wanted.get("do_sample") or wanted.get("temperature"):
            raise KvferryError(
                "a task asks for sampled answers; only greedy generation is measured, leave the task out"
            )
        stops = handle_stop_sequences(
            list(wanted["until"]), eos=self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        )
        limit, prompt = wanted["max_gen_toks"], self.tok_encode(context)
        if limit >= self.max_length:
            raise KvferryError(
                f"{limit} new tokens leave none of the model's {self.max_length} positions for the prompt; "
                "lower evaluation.max_new_tokens"
            )
        if not prompt:
            raise KvferryError("a prompt without tokens cannot be answered; leave the item out")
        return tuple(prompt[-(self.max_length - limit) :]), tuple(stops), limit

    def _generate(self, prompts: list[Tokens], prefix: Prefix, stops: tuple[str, ...], limit: int) -> list[str]:
        """Greedy continuation of each prompt; a row that has reached a stop string leaves the batch."""
        tails = [prompt[-self.hold_back :] for prompt in prompts]
        logits, prefix = read(self.system.target, prefix, Span.of(tails, self.device))
        last = torch.tensor([len(tail) - 1 for tail in tails], device=self.device)
        tokens = logits[torch.arange(len(tails), device=self.device), last].argmax(-1)
        written: list[list[int]] = [[] for _ in prompts]
        active = list(range(len(prompts)))
        for _ in range(limit):
            for row, token in zip(active, tokens.tolist(), strict=True):
                written[row].append(token)
            going = [place for place, row in enumerate(active) if not self._stopped(written[row], stops)]
            if not going or len(written[active[0]]) == limit:
                break
            if len(going) < len(active):
                kept = torch.tensor(going, device=self.device)
                prefix, tokens, active = (
                    select(self.system, prefix, kept),
                    tokens[kept],
                    [active[place] for place in going],
                )
            logits, prefix = read(self.system.target, prefix, Span(tokens[:, None], torch.ones_like(tokens[:, None])))
            tokens = logits[:, -1].argmax(-1)
        return [postprocess_generated_text(self.tok_decode(row), list(stops), None) for row in written]

    def _stopped(self, tokens: list[int], stops: tuple[str, ...]) -> bool:
        """Whether the end of a generation holds a stop string or is the end token."""
        recent = self.tok_decode(tokens[-16:], skip_special_tokens=False)
        return tokens[-1] == self.eot_token_id or any(stop in recent for stop in stops)


def _answer(scores: Tensor, continuation: Tokens) -> Answer:
    """Summed log-probability of the continuation and whether greedy decoding gives it; scores `[tokens, vocabulary]`."""
    wanted = torch.tensor(continuation, device=scores.device)
    return float(scores.gather(1, wanted[:, None]).sum()), bool((scores.argmax(-1) == wanted).all())
