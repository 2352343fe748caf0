"""R² of every layer pair, and the ranking of source layers."""

from pathlib import Path

from kvferry.files import write_json, write_text
from kvferry.fit.pair import load_moments
from kvferry.fit.probe import probe
from kvferry.fit.selection import rank_layers
from kvferry.job import job

with job(f"probe {snakemake.wildcards.pair}", snakemake.log[0], snakemake.threads):
    table = probe(load_moments(Path(snakemake.input.moments[0])))
    write_text(Path(snakemake.output.probe), table.to_csv(index=False))
    write_json(Path(snakemake.output.selection), {"ranked": rank_layers(table)})
