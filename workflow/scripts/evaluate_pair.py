"""Answer what is asked of a pair's systems, each of which reads on from a mapped cache of the source, or from a zeroed one."""

from pathlib import Path

from kvferry.evaluate.pair import Asked, run_pair
from kvferry.evaluate.setting import make_setting
from kvferry.job import job
from kvferry.prepare.models import load_model

given = snakemake.params
with job(f"evaluate {given.pair}", snakemake.log[0], snakemake.threads):
    compute = given.project["compute"]
    source, target = (
        load_model(Path(card).parent, compute["device"], compute["dtype"])
        for card in (snakemake.input.source, snakemake.input.target)
    )
    asked = {
        system: Asked(given.asked[system], given.heads.get(system, 0), {name: Path(path) for name, path in own.items()})
        for system, own in given.records.items()
    }
    mappers = {Path(path).parent.name: Path(path).parent for path in snakemake.input.mappers}
    setting = make_setting(given.project, given.rows, Path(snakemake.input.corpus), target)
    run_pair(setting, source, given.pair, asked, mappers)
