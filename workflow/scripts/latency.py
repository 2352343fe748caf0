"""Time the mappers of pairs of the same two models, and the prefills of these."""

from pathlib import Path

from kvferry.evaluate.latency import run_latency
from kvferry.evaluate.mapped import Mapped
from kvferry.job import job
from kvferry.prepare.models import load_pair
from kvferry.records import LATENCY

given, paths = snakemake.params, snakemake.input
with job(f"latency {' '.join(given.pairs)}", snakemake.log[0], snakemake.threads):
    # All pairs are of the same two models, so those of the first are those of all.
    cards = [Path(card).parent for card in (paths.sources[0], paths.targets[0])]
    models = dict(zip(cards, load_pair(*cards, given.project["compute"]), strict=True))
    mappers = [
        Mapped(
            pair,
            given.headlines[pair],
            models[Path(source).parent],
            models[Path(target).parent],
            Path(manifest).parent,
            {LATENCY: Path(output)},
            given.heads[pair],
        )
        for pair, source, target, manifest, output in zip(
            given.pairs, paths.sources, paths.targets, paths.mappers, snakemake.output, strict=True
        )
    ]
    run_latency(given.project, mappers)
