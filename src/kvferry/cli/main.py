"""The table of commands, and what all have in common: how errors and interruptions become one line and an exit status.

A command is a module of this package of the command's name: `HELP` (a first line for the list of commands, then what
`--help` says, with an example), `add_arguments(parser)` and `run(args) -> int`, the exit status; `ERROR_STATUS`, if it has
one, is the status after a KvferryError. Its imports are light: what takes time to import is imported where it is used, so
that `--help` answers at once. Does not know what commands do.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvferry import __version__
from kvferry.errors import KvferryError
from kvferry.trouble import in_words

# In the order of the help; one line adds a command.
COMMANDS = (
    "check",
    "new",
    "show",
    "verdict",
    "generate",
    "chat",
)
DESCRIPTION = """\
Move the KV cache of one language model to another of its family.

What goes wrong is said in one sentence, with exit status 1 (`check`: 2, since its 1 means that a pair cannot transfer); a
wrong command line has status 2, an interruption 130."""
EPILOG = "`kvferry COMMAND --help` says more of a command and gives an example."
FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with the status of a wrong command line."""
        self.exit(WRONG_USE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments (default: those of the process) name. Returns the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    command = importlib.import_module(f"kvferry.cli.{given.command}")
    try:
        status = command.run(given)
        sys.stdout.flush()
        return status
    except KvferryError as error:
        print(f"kvferry {given.command}: {error}", file=sys.stderr)
        return getattr(command, "ERROR_STATUS", FAILED)
    except KeyboardInterrupt:
        print(f"kvferry {given.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        _say_machine(given.command, error)
        return FAILED


def _say_machine(command: str, error: OSError) -> None:
    """What the machine refused, in one line; a reader of our output that has enough of it is no trouble."""
    if not isinstance(error, BrokenPipeError):
        where = f"{error.filename}: " if error.filename else ""
        print(f"kvferry {command}: {in_words(error) or where + (error.strerror or str(error))}", file=sys.stderr)
    if error.filename is None:
        # It was our output: what Python still flushes at its exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> Parser:
    parser = Parser(
        "kvferry", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"kvferry {__version__}")
    table = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name in COMMANDS:
        command = importlib.import_module(f"kvferry.cli.{name}")
        own = table.add_parser(
            name,
            help=command.HELP.splitlines()[0],
            description=command.HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(own)
    return parser
