"""`kvferry chat`: a conversation that moves between two models, and what each move costs. Does not know how it is moved."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.cli.generate import add_pair_arguments, load_handoff, read_input, say, warm_up
from kvferry.errors import KvferryError

if TYPE_CHECKING:
    from kvferry.api import Generation, Session, Switch
    from kvferry.api.turns import Turns

PROMPT = "> "
HELP = """\
talk to one model, and hand the conversation to another with /switch

A line is a message. At a switch only what the other model has not had yet is mapped, and that once. /help lists the
commands. Lines are read from stdin, so a file of them can be piped in; replies go to stdout, all else to stderr.

example:
  kvferry chat --mapper results/pairs/24l-to-30l/mappers/ridge_k8 --back results/pairs/30l-to-24l/mappers/ridge_k8"""
COMMANDS = """\
/switch  hand the conversation to the other model, and show what that took
/stats   what was read, mapped and written so far
/help    this list
/quit    end (or end the input)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which models, and how turns are written."""
    add_pair_arguments(parser)
    parser.add_argument(
        "--back", type=Path, metavar="DIR", help="a mapper of the other direction; without it /switch works once"
    )
    parser.add_argument(
        "--no-compare", action="store_true", help="do not measure at a switch what reading anew would take"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat-template",
        action="store_true",
        help="write turns by the models' chat template (the default where they have one)",
    )
    form.add_argument("--raw", action="store_true", help="write turns as plain questions and answers")


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends.

    Raises:
        KvferryError: the mappers or models cannot be used, or an option is wrong.
    """
    from kvferry.api import Handoff, Session
    from kvferry.api.turns import turns_of

    forth = load_handoff(args)
    back = Handoff(forth.target, forth.source, args.back) if args.back else None
    if back:
        warm_up(back)
    session = Session(forth.mapper, back.mapper if back else None, args.hold_back)
    template = True if args.chat_template else False if args.raw else None
    turns = turns_of(forth.target.tokenizer, template)
    Chat(session, turns, args.max_new_tokens, not args.no_compare).talk(_lines)
    return 0


def _lines() -> str | None:
    """The next line, or None at the end of the input."""
    if sys.stdin.isatty():
        print(PROMPT, end="", file=sys.stderr, flush=True)
    try:
        line = read_input().readline()
    except ValueError as error:
        raise KvferryError(f"stdin: unreadable line ({error}); write UTF-8 text") from error
    return line.strip() if line else None


@dataclass
class Chat:
    """A session with a person. measure: at a switch, also what reading anew would take."""

    session: Session
    turns: Turns
    limit: int
    measure: bool
    said: Generation | None = None
    replies: list[tuple[str, Generation]] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)

    def talk(self, lines: Callable[[], str | None]) -> None:
        """Answer lines until there are no more; what is wrong with one is said, and the next one comes."""
        commands = {"/switch": self.switch, "/stats": self.stats, "/help": lambda: note(COMMANDS)}
        note(f"you talk to {self.session.model}; /help lists the commands")
        while (line := lines()) is not None and line != "/quit":
            try:
                if line.startswith("/"):
                    commands.get(line, lambda line=line: note(f"{line}: no command; /help lists them"))()
                elif line:
                    self.reply(line)
            except KvferryError as error:
                note(str(error))

    def reply(self, text: str) -> None:
        """The model answers a message."""
        new = self.turns.following(text, self.said) if self.said else self.turns.opening(text)
        if len(new) + self.limit > self.session.room:
            raise KvferryError(
                f"this takes {len(new) + self.limit:,} tokens with its reply, and {self.session.model} has positions for "
                f"{self.session.room:,} more; write less, or begin anew"
            )
        self.session.add(new)
        note(f"{self.session.model}:")
        self.said = self.session.generate(self.limit, stop=self.turns.stop, stream=say)
        self.replies.append((self.session.model, self.said))
        print(flush=True)
        if not self.said.text.strip():
            note("it ended without a word")

    def switch(self) -> None:
        """The other model goes on."""
        cost = self.session.switch(self.measure)
        self.switches.append(cost)
        note(f"{cost.to} goes on: {cost.mapped_tokens:,} tokens mapped in {cost.mapping_ms:.1f} ms")
        if cost.reprefill_ms is not None:
            note(f"reading them itself would have taken {cost.reprefill_ms:.1f} ms")

    def stats(self) -> None:
        """What was done so far."""
        note(f"{len(self.session.tokens):,} tokens in the conversation; {self.session.model} goes on")
        for model in dict.fromkeys(name for name, _ in self.replies):
            own = [made for name, made in self.replies if name == model]
            read, written = (sum(numbers) for numbers in ([m.read_tokens for m in own], [len(m.tokens) for m in own]))
            note(f"{model}: replies {len(own)}, tokens read {read:,}, written {written:,}")
        mapped, taken = sum(s.mapped_tokens for s in self.switches), sum(s.mapping_ms for s in self.switches)
        note(f"switches: {len(self.switches)}, {mapped:,} tokens mapped in {taken:.1f} ms")


def note(text: str) -> None:
    """A remark, apart from the replies."""
    print("\n".join(f"[{line}]" for line in text.splitlines()), file=sys.stderr, flush=True)
