"""Answer conversations turn by turn after hand-offs of a pair, in one direction and, if it is there both ways, in turn."""

from pathlib import Path

from kvferry.evaluate.coqa import run_pair
from kvferry.evaluate.setting import make_setting
from kvferry.job import job
from kvferry.prepare.models import load_pair

given = snakemake.params
with job(f"coqa {given.pair}", snakemake.log[0], snakemake.threads):
    cards = (Path(card).parent for card in (snakemake.input.source, snakemake.input.target))
    source, target = load_pair(*cards, given.project["compute"])
    forth = {Path(path).parent.name: Path(path).parent for path in snakemake.input.mappers}
    back = {name: Path(path).parent for name, path in zip(given.back, snakemake.input.get("back", []), strict=True)}
    records = {variant: {name: Path(path) for name, path in own.items()} for variant, own in given.records.items()}
    setting = make_setting(given.project, given.rows, Path(snakemake.input.corpus), target)
    run_pair(setting, source, given.pair, given.project["coqa"], records, forth, back, given.heads)
