"""Answer everything with one model: on its own and, for a target, through its own cache injected."""

from pathlib import Path

from kvferry.evaluate.native import run_native
from kvferry.evaluate.setting import make_setting
from kvferry.job import job
from kvferry.prepare.models import load_model
from kvferry.records import NATIVE, NATIVE_INJECTED

given = snakemake.params
with job(f"evaluate {given.model}", snakemake.log[0], snakemake.threads):
    target = load_model(
        Path(snakemake.input.target).parent, given.project["compute"]["device"], given.project["compute"]["dtype"]
    )
    systems = [NATIVE, NATIVE_INJECTED] if given.injected else [NATIVE]
    outputs = {system: {name: Path(path) for name, path in given.records[system].items()} for system in systems}
    run_native(make_setting(given.project, given.rows, Path(snakemake.input.corpus), target), outputs)
