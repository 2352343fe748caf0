"""Draw all figures that are made from records."""

from pathlib import Path

from kvferry.job import job
from kvferry.report.figures import FIGURES
from kvferry.report.inputs import Results

with job(snakemake.rule, snakemake.log[0]):
    config = snakemake.params.project
    results = Results.load(Path(config["results"]), config, snakemake.params.pairs)
    for name, stem in snakemake.params.figures.items():
        FIGURES[name](results, Path(stem))
