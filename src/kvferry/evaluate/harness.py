"""An lm-eval model that answers through a system's prefix: log-likelihoods and greedy generation.

Tokenisation, truncation and special cases are HFLM's, which this extends; only the computation is replaced: prompts with a common
header prefill it once, continuations of one context share its cache, and the last `hold_back` tokens of a prompt are
read by the target, once for all its continuations. What is in memory at a time does not depend on the number of requests: see
`SystemLM`. Does not know benchmarks, mappers or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvferry.errors import KvferryError
from kvferry.evaluate.decode import decode
from kvferry.evaluate.finite import check_finite, named
from kvferry.evaluate.planning import batches, group_by_header
from kvferry.evaluate.scoring import Answer, Row, note, rows_of
from kvferry.kv.handoff import Prefix, System, closed, read, select
from kvferry.kv.prefill import Span, Tokens
from kvferry.progress import bar

LOGIT_TOKENS = 1024
# What one more forward pass costs, in tokens that the same time would compute: on one CPU core, a 135M model reads its weights
# and runs Python for 60 ms, and computes a token in 3 ms. A GPU computes hundreds of tokens in the time of its launches.
PASS_TOKENS = {"cpu": 24}
PASS_TOKENS_ELSEWHERE = 512


class SystemLM(HFLM):
    """lm-eval's view of a system.

    hold_back ≥ 1: last prompt tokens that the target reads itself. batch_tokens: cache slots of a batch, padding and the tokens
    to be generated included (a batch is one prompt at least); while continuations are scored the cache is held twice, and
    beside it that of one shared header. Logits are held of LOGIT_TOKENS places at most, or batch_tokens if that is less.
    batch_rows: rows of a batch at most, lm-eval's `batch_size`, if that too is to be kept to.
    item_of: what messages call the item of a request.
    """

    def __init__(
        self,
        system: System,
        tokenizer: PreTrainedTokenizerBase,
        hold_back: int,
        batch_tokens: int,
        max_new_tokens: int = 256,
        batch_rows: int | None = None,
        item_of: Callable[[Instance], str] = lambda request: f"{request.task_name}, question {request.doc_id}",
    ) -> None:
        super().__init__(pretrained=system.target, tokenizer=tokenizer, batch_size=1)
        self.system, self.hold_back, self.batch_tokens, self.max_new_tokens = (
            system,
            hold_back,
            batch_tokens,
            max_new_tokens,
        )
        self.item_of = item_of
        self._asked: dict[tuple[Any, ...], Instance] = {}
        self.logit_tokens = min(LOGIT_TOKENS, batch_tokens)
        self.batch_rows = min(batch_rows or self.logit_tokens, self.logit_tokens)

    @property
    def max_gen_toks(self) -> int:
        """Tokens to generate where a task does not say."""
        return self.max_new_tokens

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Answer]:
        """Log-likelihood of each (context, continuation) and whether greedy decoding gives it; our own bar is shown instead.

        Raises:
            KvferryError: the logits of a request are not finite.
        """
        self._asked = {request.args: request for request in requests}
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **_: Any) -> list[Answer]:
        """Score (text, context, continuation) requests, in their order."""
        pairs = [self._fit(context, continuation) for _, context, continuation in requests]
        asked: dict[Tokens, set[Tokens]] = {}
        texts: dict[Tokens, tuple[Any, ...]] = {}
        for (text, *_), (context, continuation) in zip(requests, pairs, strict=True):
            asked.setdefault(context, set()).add(continuation)
            texts.setdefault(context, text)
        contexts = sorted(asked)
        answers: dict[tuple[Tokens, Tokens], Answer] = {}
        with bar(len(contexts), "contexts") as progress:
            for batch, prefix in self._prefixes(contexts):
                rows = rows_of([asked[contexts[number]] for number in batch])
                with named(lambda row, batch=batch: self._called(texts[contexts[batch[row]]])):
                    self._score([contexts[number] for number in batch], prefix, rows)
                for row in rows:
                    context = contexts[batch[row.number]]
                    answers |= {(context, continuation): found for continuation, found in row.answers().items()}
                progress.update(len(batch))
                # else it would be held while the next one is made
                del prefix
        return [answers[pair] for pair in pairs]

    def _called(self, text: tuple[Any, ...]) -> str:
        """What messages call a (context, continuation): its item, if it is one."""
        return self.item_of(self._asked[text]) if text in self._asked else f"the prompt that ends in {text[0][-40:]!r}"

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

    def _prefixes(self, prompts: Sequence[Tokens], limit: int = 0) -> Iterator[tuple[list[int], Prefix]]:
        """Batches of prompt numbers, each with the system's prefix of those prompts but for their held-back tokens, closed.

        limit: tokens that will be generated, for which the batch has room.
        """
        heads = [prompt[: -self.hold_back] for prompt in prompts]
        lengths = [len(prompt) + limit for prompt in prompts]
        padding = self._passes(2 + limit)
        for group in group_by_header(heads):
            header = self.system.start(1)
            if group.header:
                header = self.system.extend(header, Span.of([group.header], self.device))
            for batch in batches(lengths, group.members, self._fits, padding):
                rows = [heads[number][len(group.header) :] for number in batch]
                room = max(len(prompts[number]) for number in batch) - len(group.header) + limit
                yield batch, closed(self._extend(header, rows, room))

    def _extend(self, header: Prefix, rows: list[Tokens], room: int) -> Prefix:
        """A prefix of `rows` on top of the header, with room for so many tokens in all."""
        alike = torch.zeros(len(rows), dtype=torch.long, device=self.device)
        prefix = select(self.system, header, alike, room)
        return self.system.extend(prefix, Span.of(rows, self.device)) if any(rows) else prefix

    def _fits(self, rows: int, slots: int) -> bool:
        """Whether a batch is within its bounds."""
        return rows <= self.batch_rows and rows * slots <= self.batch_tokens

    def _passes(self, count: int) -> int:
        """What so many forward passes cost, in tokens."""
        return count * PASS_TOKENS.get(self.device.type, PASS_TOKENS_ELSEWHERE)

    def _read_tails(self, prompts: list[Tokens], prefix: Prefix) -> tuple[Tensor, Prefix]:
        """The target reads the held-back tokens. Returns logits `[batch, vocabulary]` after the prompts, and those."""
        tails = [prompt[-self.hold_back :] for prompt in prompts]
        ends = torch.tensor([[len(tail) - 1] for tail in tails], device=self.device)
        logits, prefix = read(self.system.target, prefix, Span.of(tails, self.device), ends)
        return logits[:, 0], prefix

    def _score(self, contexts: list[Tokens], prefix: Prefix, rows: list[Row]) -> None:
        """Answer all rows of a batch of contexts."""
        logits, prefix = self._read_tails(contexts, prefix)
        check_finite(logits, prefix, range(len(contexts)))
        note(logits, [(row.number, row, row.wanted[0]) for row in rows])
        del logits
        longer = [row for row in rows if row.rest]
        slots = prefix.mask.shape[1]

        def fit(count: int, longest: int) -> bool:
            return self._fits(count, slots + longest) and count * longest <= self.logit_tokens

        for part in batches([len(row.rest) for row in longer], range(len(longer)), fit, self._passes(1)):
            self._score_rows(prefix, [longer[number] for number in part])

    def _score_rows(self, prefix: Prefix, rows: list[Row]) -> None:
        """Read rows, longest first, so many tokens at a time as logits may be held of: all of them, but for a lone long row."""
        chosen = torch.tensor([row.number for row in rows], device=self.device)
        prefix = select(self.system, prefix, chosen, len(rows[0].rest))
        step = max(1, self.logit_tokens // len(rows))
        for start in range(0, len(rows[0].rest), step):
            pieces = [row.rest[start : start + step] for row in rows]
            span = Span.of(pieces, self.device)
            logits, prefix = read(self.system.target, prefix, span, span.mask.bool())
            places = [row for row, piece in enumerate(pieces) for _ in piece]
            check_finite(logits, prefix, [row.number for row in rows], places)
            asked = [
                (row, tokens)
                for row, piece in zip(rows, pieces, strict=True)
                for tokens in row.wanted[start + 1 : start + 1 + len(piece)]
            ]
            note(logits, [(place, *what) for place, what in enumerate(asked)])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy texts up to a stop string, in the order of the requests.

        Raises:
            KvferryError: the logits of a request are not finite, or as `_plan`.
        """
        plans = [self._plan(*request.args) for request in requests]
        texts: list[str] = [""] * len(requests)
        for stops, limit in dict.fromkeys((plan[1], plan[2]) for plan in plans):
            members = [number for number, plan in enumerate(plans) if plan[1:] == (stops, limit)]
            prompts = [plans[number][0] for number in members]
            with bar(len(members), "generate") as progress:
                for batch, prefix in self._prefixes(prompts, limit):
                    asked = [requests[members[number]] for number in batch]
                    with named(lambda row, asked=asked: self.item_of(asked[row])):
                        found = self._generate([prompts[number] for number in batch], prefix, stops, limit)
                    for number, text in zip(batch, found, strict=True):
                        texts[members[number]] = text
                    progress.update(len(batch))
                    del prefix
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
        logits, prefix = self._read_tails(prompts, prefix)
        written = decode(self.system.target, prefix, logits, lambda tokens: self._stopped(tokens, stops), limit)
        return [postprocess_generated_text(self.tok_decode(row), list(stops), None) for row in written]

    def _stopped(self, tokens: list[int], stops: tuple[str, ...]) -> bool:
        """Whether the end of a generation holds a stop string or is the end token."""
        recent = self.tok_decode(tokens[-16:], skip_special_tokens=False)
        return tokens[-1] == self.eot_token_id or any(stop in recent for stop in stops)
