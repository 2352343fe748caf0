"""Draw greedy selection of source layers for all its pairs."""

from pathlib import Path

from kvferry.job import job
from kvferry.report.figures import fig5_greedy_r2
from kvferry.report.inputs import read_greedy

with job(snakemake.rule, snakemake.log[0]):
    frames = {Path(path).parent.name: read_greedy(Path(path)) for path in snakemake.input.greedy}
    fig5_greedy_r2(frames, Path(snakemake.output[0]).with_suffix(""))
