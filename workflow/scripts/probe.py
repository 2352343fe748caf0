"""R² of every layer pair, and the ranking of source layers."""

from pathlib import Path

from kvferry.files import write_text
from kvferry.fit.pair import load_moments
from kvferry.fit.probe import probe
from kvferry.fit.selection import rank_layers, write_selection
from kvferry.job import job

with job(f"probe {snakemake.wildcards.pair}", snakemake.log[0], snakemake.threads):
    moments = load_moments(Path(snakemake.input.moments[0]))
    table = probe(moments)
    write_text(Path(snakemake.output.probe), table.to_csv(index=False))
    write_selection(Path(snakemake.output.selection), rank_layers(table), moments.origin)
