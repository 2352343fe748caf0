"""Look at the errors of a pair's mapped caches as the target's attention sees them."""

from pathlib import Path

from kvferry.evaluate.diagnose import make_text_sets, run_diagnostics
from kvferry.evaluate.pair import Asked
from kvferry.job import job
from kvferry.prepare.models import load_pair

given = snakemake.params
with job(f"diagnose {given.pair}", snakemake.log[0], snakemake.threads):
    cards = (Path(card).parent for card in (snakemake.input.source, snakemake.input.target))
    source, target = load_pair(*cards, given.project["compute"])
    mappers = {Path(path).parent.name: Path(path).parent for path in snakemake.input.mappers}
    asked = {
        variant: Asked({}, given.heads[variant], {name: Path(path) for name, path in own.items()})
        for variant, own in given.records.items()
    }
    sets = make_text_sets(given.project, given.rows, Path(snakemake.input.corpus), target)
    run_diagnostics(sets, source, given.pair, asked, mappers)
