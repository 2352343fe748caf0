"""Answer what is asked of a pair's systems: each reads on from a mapped cache of the source, or from that of a control."""

from pathlib import Path

from kvferry.evaluate.pair import asked_of, run_pair
from kvferry.evaluate.setting import make_setting
from kvferry.job import job
from kvferry.prepare.models import load_pair

given = snakemake.params
with job(f"evaluate {given.pair}", snakemake.log[0], snakemake.threads):
    cards = (Path(card).parent for card in (snakemake.input.source, snakemake.input.target))
    source, target = load_pair(*cards, given.project["compute"])
    directories = {Path(path).parent.name: Path(path).parent for path in snakemake.input.mappers}
    mappers = {system: directories[variant] for system, variant in given.mappers.items() if variant}
    setting = make_setting(given.project, given.rows, Path(snakemake.input.corpus), target)
    run_pair(setting, source, given.pair, asked_of(given.asked, given.heads), mappers)
