"""Check that the two models of a pair have one tokenizer."""

from pathlib import Path

from kvferry.job import job
from kvferry.prepare.pairs import prepare_pair

name = snakemake.wildcards.pair
with job(f"pair {name}", snakemake.log[0]):
    source, target = (Path(card).parent for card in (snakemake.input.source, snakemake.input.target))
    prepare_pair(name, source, target, Path(snakemake.output[0]))
