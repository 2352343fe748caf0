"""`kvferry new`: a config for a pair of your own, which runs as it is. Decides nothing but names; the rules are in `settings`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kvferry.cli.check import MODEL
from kvferry.devices import SIZE_OF
from kvferry.errors import KvferryError

HELP = """\
write a config for a pair of your own, which runs as it is

Writes config/NAME.yaml: the pair and its models, calibration, mapper recipes by k, benchmarks, timings, with a comment on
each choice. k, calibration and memory follow from the shapes of the two caches. Text and benchmarks come from PyPI, as in the
default run. What `kvferry check` refuses is refused. To be run at the root of a checkout.

examples:
  kvferry new mine --source models/small --target models/large
  kvferry new qwen --source Qwen/Qwen3-0.6B --target Qwen/Qwen3-1.7B --device cuda --items 500"""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")
KS = (
    "numbers of source layers to compare, like 1,4,8 (default: powers of two up to 16); the largest of at most 8 and at most "
    "half the source's layers is the headline, which answers all benchmarks"
)
ITEMS = "items of a benchmark (default: 100); how much else is measured stands in the config, to be edited there"
WRITTEN_BY = "Written by `kvferry new`"
REGISTRIES = ("wheels", "models", "corpora", "pairs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which pair, and what the rules are not to choose."""
    parser.add_argument(
        "name", metavar="NAME", type=_name, help="of the config, its pair and the folder of its results"
    )
    for role, what in (("source", "the model that computes the cache"), ("target", "the model that goes on from it")):
        parser.add_argument(f"--{role}", metavar="MODEL", required=True, help=f"{what}: {MODEL}")
    parser.add_argument("--device", type=_device, default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument(
        "--dtype", choices=list(SIZE_OF), help="of the models (default: float32 on cpu, bfloat16 on cuda)"
    )
    parser.add_argument("--k", type=_counts, metavar="K,K,…", help=KS)
    by_rule = (
        "calibration sequences (default: so many that there are 8 rows a feature at the headline's k, from 24 to 500)"
    )
    parser.add_argument("--sequences", type=_count, metavar="N", help=by_rule)
    parser.add_argument("--items", type=_count, default=100, metavar="N", help=ITEMS)
    parser.add_argument("--force", action="store_true", help="overwrite a config of that name")


def run(args: argparse.Namespace) -> int:
    """Write the config and say how to run it.

    Raises:
        KvferryError: there is one of that name, a model cannot be read, the pair cannot transfer, or the file cannot be written.
    """
    file = Path("config") / f"{args.name}.yaml"
    _check_free(file, args.force)
    from kvferry.cli.settings import Wanted
    from kvferry.cli.writing import write_config

    wanted = Wanted(args.k, args.sequences, args.items, args.device, args.dtype)
    written = write_config(file, args.source, args.target, wanted)
    print(f"{file} is written: every choice has a comment there.")
    print(f"what it will need   make plan CONFIG={file}")
    print(f"run                 {written.command}")
    print(f"the answer          kvferry verdict {args.name} --config {file}")
    print(f"the mapper          {written.mapper}")
    return 0


def _check_free(file: Path, force: bool) -> None:
    """Refuse to overwrite what is not to be, before anything takes time."""
    if file.exists() and WRITTEN_BY not in file.read_text(encoding="utf-8", errors="replace"):
        raise KvferryError(f"{file}: is no config that `kvferry new` wrote; choose another name")
    if file.exists() and not force:
        raise KvferryError(f"{file}: is there already; choose another name, or overwrite it with --force")


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name (letters, digits, '.', '_' and '-', a letter or digit first, at most 100)"
        )
    if text in REGISTRIES:
        raise argparse.ArgumentTypeError(f"config/{text}.yaml is a registry; choose another name")
    return text


def _device(text: str) -> str:
    if not DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu, cuda or cuda:N")
    return text


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number ≥ 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part.strip()) for part in text.split(","))
