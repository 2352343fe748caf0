"""Draw the R² heat maps of one pair."""

from pathlib import Path

from kvferry.job import job
from kvferry.report.figures import fig2_r2_heatmap
from kvferry.report.inputs import read_probe

pair = snakemake.wildcards.pair
with job(f"fig2 {pair}", snakemake.log[0]):
    fig2_r2_heatmap(read_probe(Path(snakemake.input.probe)), pair, Path(snakemake.output[0]).with_suffix(""))
