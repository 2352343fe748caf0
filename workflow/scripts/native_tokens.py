"""Measure what it brings and costs to have the target read some tokens itself."""

from pathlib import Path

from kvferry.evaluate.mapped import Mapped
from kvferry.evaluate.native_tokens import run_native_tokens
from kvferry.evaluate.setting import make_setting
from kvferry.job import job
from kvferry.prepare.models import load_pair

given, paths = snakemake.params, snakemake.input
with job(f"native tokens {given.pair}", snakemake.log[0], snakemake.threads):
    cards = (Path(card).parent for card in (paths.source, paths.target))
    source, target = load_pair(*cards, given.project["compute"])
    outputs = {Path(path).stem: Path(path) for path in snakemake.output}
    mapped = Mapped(given.pair, given.variant, source, target, Path(paths.mapper).parent, outputs, given.head)
    setting = make_setting(given.project, None, Path(paths.corpus), target)
    run_native_tokens(setting, [mapped])
