"""`kvferry verdict`: a pair's verdict page as a run wrote it. Makes nothing itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvferry.errors import KvferryError

DEFAULT = Path("config/config.yaml")
HELP = """\
print a pair's verdict page: use the transfer or not, what it keeps, when it pays

A run of the workflow writes the page of each of its pairs, from what it measured.

example:
  kvferry verdict 24l-to-30l"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which pair of which run."""
    parser.add_argument("pair", metavar="PAIR", help="a pair of the config")
    parser.add_argument(
        "--config", type=Path, default=DEFAULT, metavar="FILE", help="the config of the run (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the page.

    Raises:
        KvferryError: the config is wrong, has no such pair, or its run has not written the page yet.
    """
    page = _page(args.pair, args.config)
    try:
        print(page.read_text(encoding="utf-8"), end="")
    except FileNotFoundError as error:
        raise KvferryError(
            f"{page}: no verdict yet; run `make demo CONFIG={args.config}` first, as the head of that file has it"
        ) from error
    except (OSError, ValueError) as error:
        raise KvferryError(
            f"{page}: unreadable ({error}); delete it and run `make demo CONFIG={args.config}`"
        ) from error
    return 0


def _page(pair: str, config: Path) -> Path:
    """Where the run of this config writes the page."""
    from kvferry.cli.checkout import project_of
    from kvferry.schema import choices

    project = project_of(config)
    pairs = project.config["pairs"]
    if pair not in pairs:
        raise KvferryError(f"{config}: pairs: has no {pair!r}; {choices(pair, pairs)}")
    return Path(project.config["results"]) / "verdict" / f"{pair}.md"
