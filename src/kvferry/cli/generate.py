"""`kvferry generate`: one prompt through a hand-off, with the time of each step. Does not know how any of them is done."""

from __future__ import annotations

import argparse
import sys
from io import TextIOWrapper
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TextIO

from kvferry.errors import KvferryError

if TYPE_CHECKING:
    from kvferry.api.handoff import Handed, Handoff
    from kvferry.api.reader import Generation

STDIN = "-"
# tokens behind the native head that are read once by either model before anything is timed
WARM_UP = 3
HELP = """\
let one model read a prompt and another go on from its mapped cache

The source reads the prompt, the mapper turns its cache into the target's, and the target goes on, greedily. The text goes
to stdout as it comes; then the time of each step, measured once, goes to stderr. The models are looked for where the run
that fitted the mapper keeps them.

example:
  kvferry generate --mapper results/pairs/24l-to-30l/mappers/ridge_k8 --prompt-file prompt.txt --compare"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which models, which prompt and how much."""
    add_pair_arguments(parser)
    parser.add_argument(
        "--prompt-file",
        required=True,
        metavar="FILE",
        help=f"the prompt, UTF-8 text (a final line break is dropped); {STDIN} reads stdin",
    )
    parser.add_argument(
        "--compare", action="store_true", help="also let the target read the whole prompt itself, and show both"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat-template", action="store_true", help="give the text as a user's message, by the models' chat template"
    )
    form.add_argument("--raw", action="store_true", help="give the text as it is (the default)")


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command that hands off asks."""
    parser.add_argument(
        "--mapper",
        required=True,
        type=Path,
        metavar="DIR",
        help="a fitted mapper, RESULTS/pairs/PAIR/mappers/VARIANT of a run",
    )
    for role in ("source", "target"):
        parser.add_argument(
            f"--{role}",
            metavar="MODEL",
            help=f"the {role}: a directory, or OWNER/NAME[@REVISION] on the hub (default: where the mapper's run keeps it)",
        )
    parser.add_argument(
        "--hold-back",
        type=int,
        default=1,
        metavar="N",
        help="last tokens at a hand-off that the model that takes over reads itself (default: %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="most tokens of an answer (default: %(default)s)"
    )
    parser.add_argument("--device", default="cpu", help="of both models: cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        default="float32",
        help="float32, bfloat16 or float16; best that of the mapper's run (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads (default: torch's own choice)",
    )


def run(args: argparse.Namespace) -> int:
    """Hand off and go on, then say what it took.

    Raises:
        KvferryError: the prompt cannot be read, is empty or too long, or the mapper or a model cannot be used.
    """
    text = read_prompt(args.prompt_file)
    handoff = load_handoff(args)
    prompt = _tokens(handoff, text, args.chat_template)
    made = handoff.generate(prompt, args.max_new_tokens, hold_back=args.hold_back, stream=say)
    print(flush=True)
    own = handoff.alone(prompt, args.max_new_tokens) if args.compare else None
    print("\n".join(_report(handoff, made, own)), file=sys.stderr)
    return 0


def read_prompt(file: str) -> str:
    """The text of a file, or of stdin, without the line break that ends it.

    Raises:
        KvferryError: it cannot be read, or is empty.
    """
    try:
        text = read_input().read() if file == STDIN else Path(file).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise KvferryError(f"{file}: there is no such file; give one with the prompt") from error
    except OSError as error:
        raise KvferryError(f"{file}: unreadable prompt ({error.strerror}); give a file of UTF-8 text") from error
    except ValueError as error:
        raise KvferryError(f"{file}: unreadable prompt ({error}); give a file of UTF-8 text") from error
    if not text.strip():
        raise KvferryError(f"{file}: the prompt is empty; give a file with text")
    return text.removesuffix("\n")


def read_input() -> TextIO:
    """Stdin as UTF-8 text, in which other bytes are a ValueError."""
    own = sys.stdin
    # Once: what was read from cannot be changed any more.
    if isinstance(own, TextIOWrapper) and (own.encoding.lower(), own.errors) != ("utf-8", "strict"):
        own.reconfigure(encoding="utf-8", errors="strict")
    return sys.stdin


def load_handoff(args: argparse.Namespace) -> Handoff:
    """The models and the mapper that the arguments name, run once.

    Raises:
        KvferryError: the mapper or a model cannot be used, or a number of tokens or threads is less than 1.
    """
    import torch

    from kvferry.api import Handoff
    from kvferry.api.checks import check_count

    for option in ("hold_back", "max_new_tokens"):
        check_count(option, getattr(args, option))
    if args.threads is not None:
        check_count("threads", args.threads)
        torch.set_num_threads(args.threads)
    handoff = Handoff.load(args.mapper, args.source, args.target, args.device, args.dtype)
    warm_up(handoff)
    return handoff


def warm_up(handoff: Handoff) -> None:
    """Run once on so many tokens that the mapper has some to map: the first run of a process is slow."""
    handoff.generate([0] * (handoff.mapper.native_head + WARM_UP), 1)


def say(piece: str) -> None:
    """A piece of an answer as it comes."""
    print(piece, end="", flush=True)


def _tokens(handoff: Handoff, text: str, template: bool) -> list[int]:
    from kvferry.api.turns import TemplateTurns

    tokenizer = handoff.target.tokenizer
    return TemplateTurns(tokenizer).opening(text) if template else tokenizer(text)["input_ids"]


def _report(handoff: Handoff, made: Handed, own: Generation | None) -> list[str]:
    """What was done and what it took, a line a step; with the target's own way beside it, if it was measured."""
    source, target, switch = handoff.source.card["model"], handoff.target.card["model"], made.switch
    steps = [
        (f"{source} reads the prompt", switch.prefill_ms, switch.prefill_tokens),
        ("the mapper ferries its cache", switch.mapping_ms, switch.mapped_tokens),
        (f"{target} reads what is held back", made.read_ms, made.read_tokens),
    ]
    lines = [_step(*step) for step in steps] + _decoding(target, made)
    first = switch.mapping_ms + made.read_ms
    if own is None:
        return lines
    return [
        *lines,
        _step(f"{target} reads the whole prompt", own.read_ms, own.read_tokens),
        *_decoding(f"{target} then", own),
        f"to the first token: {first:.1f} ms with the source's cache there, {first + switch.prefill_ms:.1f} ms with "
        f"the source's reading, {own.read_ms:.1f} ms by {target} alone",
        f"tokens that are the same at the beginning: {_agreeing(made, own):,}; {target} alone writes:",
        own.text,
    ]


def _agreeing(one: Generation, other: Generation) -> int:
    """Tokens before the first that differs."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _step(what: str, milliseconds: float, tokens: int) -> str:
    return f"{what:<40} {milliseconds:9.1f} ms  {tokens:6,} token{'s' * (tokens != 1)}"


def _decoding(who: str, made: Generation) -> list[str]:
    """The median time of a token after the first, if there are any."""
    if not made.token_ms:
        return []
    return [f"{who + ' writes':<40} {median(made.token_ms):9.1f} ms  a token (median), {len(made.tokens):,} tokens"]
