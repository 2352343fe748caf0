"""`kvferry check`: can this pair transfer, and what will a mapper take and save? From configs and tokenizers, without weights."""

from __future__ import annotations

import argparse
import json

HELP = """\
can a pair of models transfer, and what will that take and save

Reads configs and tokenizers, no weights; of a repository only these small files are fetched. Prints both models beside each
other, what rules a transfer out, and if nothing does the size of the mapper by k (source layers that a target layer reads),
what its calibration takes, and the speed-up to expect from FLOPs and bytes.

exit status: 0 the pair can transfer, 1 it cannot, 2 the question cannot be answered (no such model, wrong command line)

examples:
  kvferry check Qwen/Qwen3-0.6B Qwen/Qwen3-1.7B
  kvferry check smollm2-24l smollm2-135m            ids of config/models.yaml
  kvferry check models/small models/large --json    directories in the hub's layout"""
MODEL = "a directory in the hub's layout, an id of config/models.yaml, or a repository (owner/name[@revision])"
ERROR_STATUS = 2
TRANSFERABLE, REFUSED = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say which models, and how the answer is to be written."""
    parser.add_argument("source", metavar="SOURCE", help=f"the model that computes the cache: {MODEL}")
    parser.add_argument("target", metavar="TARGET", help="the model that goes on from it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Answer.

    Raises:
        KvferryError: one of the models is not there or cannot be read.
    """
    from kvferry.cli.answer import as_json, as_text
    from kvferry.cli.feasibility import pair_of

    pair = pair_of(args.source, args.target)
    print(json.dumps(as_json(pair), indent=1, ensure_ascii=False) if args.json else as_text(pair))
    return REFUSED if pair.faults else TRANSFERABLE
