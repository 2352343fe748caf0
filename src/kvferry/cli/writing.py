"""From two names of models to a config on disk: finds the models, names them, and checks the config before it is there."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from os.path import abspath
from pathlib import Path
from typing import Any

import yaml

from kvferry import memory
from kvferry.asked import evaluation_jobs
from kvferry.cli.candidates import Candidate
from kvferry.cli.checkout import SCHEMAS, project_of
from kvferry.cli.feasibility import Feasibility, pair_of
from kvferry.cli.settings import Wanted, plan_for, settings_for
from kvferry.cli.template import Text
from kvferry.config import Project, load_project
from kvferry.devices import SOURCE, TARGET
from kvferry.errors import KvferryError
from kvferry.files import write_text
from kvferry.work import fit_jobs, variants_of

# As in the Makefile.
MAKE_MEMORY_MB, STEP_MB = 7700, 500


@dataclass(frozen=True)
class Written:
    """What a config that was written leads to: the command that runs it, and where its headline's mapper will lie."""

    command: str
    mapper: Path


def write_config(file: Path, source: str, target: str, wanted: Wanted) -> Written:
    """Write a config for the pair to `file`, whose stem names run and pair.

    Raises:
        KvferryError: this is no checkout, a model is not there, the pair cannot transfer, or the file cannot be written.
    """
    registry, name = project_of(), file.stem
    if name in registry.pairs:
        raise KvferryError(
            f"{name}: is already a pair of {registry.config['registries']['pairs']}; choose another name"
        )
    pair = pair_of(source, target)
    if pair.faults:
        raise KvferryError(f"{source} → {target} cannot transfer: {'; '.join(pair.faults)}")
    text = _text(file, pair, registry, wanted)
    project = load_project(yaml.safe_load(text.written()), str(file), SCHEMAS)
    command = f"make demo CONFIG={file}" + _memory_option(project, name)
    write_text(file, replace(text, run=command).written())
    mapper = Path(project.config["results"]) / "pairs" / name / "mappers" / project.headline(name)
    return Written(command, mapper)


def _text(file: Path, pair: Feasibility, registry: Project, wanted: Wanted) -> Text:
    """The config without the command that runs it."""
    shapes = pair.source.geometry, pair.target.geometry
    settings = settings_for(*shapes, pair.positions, wanted)
    names = _names(pair.source, pair.target, registry, file.stem)
    return Text(
        file=str(file),
        name=file.stem,
        source=names[pair.source.name],
        target=names[pair.target.name],
        models={names[each.name]: _entry(each) for each in (pair.source, pair.target) if not each.registered},
        layers=pair.source.geometry.layers,
        p_over_n=plan_for(*shapes, settings, settings.headline).p_over_n,
        run="",
        settings=settings,
    )


def _memory_option(project: Project, pair: str) -> str:
    """What `make` is to be told of memory, if its largest job needs more than what it takes for granted."""
    needed = STEP_MB * math.ceil(_largest_job_mb(project, pair) / STEP_MB)
    return f" MEMORY_MB={needed}" if needed > MAKE_MEMORY_MB else ""


def _largest_job_mb(project: Project, pair: str) -> int:
    """Main memory of the job that asks for most."""
    entry, headline = project.pair(pair), project.recipe(pair, project.headline(pair))
    models, target = {SOURCE: entry["source"], TARGET: entry["target"]}, entry["target"]
    recipes = [project.recipe(pair, name) for name in variants_of(project, pair)]
    limits = [limits for job in evaluation_jobs(project, pair).values() for limits in job.limits.values()]
    return max(
        *(memory.fit_mb(project, pair, rows) for rows in fit_jobs(project, pair)),
        memory.moments_mb(project, pair),
        memory.probe_mb(project, pair),
        memory.evaluation_mb(project, models, recipes, limits),
        memory.latency_mb(project, models, [headline]),
        memory.identity_mb(project, target) if "controls" in project.config else 0,
    )


def _names(source: Candidate, target: Candidate, registry: Project, run: str) -> dict[str, str]:
    """What the config calls each model, by what the command line called it: ids as they are, others by folder or repository."""
    names: dict[str, str] = {}
    for role, model in (("source", source), ("target", target)):
        if model.registered:
            names[model.name] = model.name
        elif model.name not in names:
            taken = {*registry.models, *names.values()}
            names[model.name] = next(name for name in _proposals(model, f"{run}-{role}") if name not in taken)
    return names


def _proposals(model: Candidate, last: str) -> list[str]:
    """Names for a model, the best first."""
    parts = Path(abspath(model.name)).parts if model.entry["kind"] == "local" else model.name.split("/")
    words = [re.sub(r"[^A-Za-z0-9._-]+", "-", part).lstrip("._-") for part in parts[-2:]]
    return [name for name in (words[-1], "-".join(filter(None, words))) if name] + [last]


def _entry(model: Candidate) -> dict[str, Any]:
    """The model's entry; a directory below the working directory by its relative path."""
    if model.entry["kind"] == "hub":
        billions = float(f"{model.weights.total / 1e9:.3g}")
        return {**model.entry, "geometry": asdict(model.geometry), "parameters": billions}
    path, here = Path(abspath(model.name)), Path.cwd()
    return {"kind": "local", "path": str(path.relative_to(here) if path.is_relative_to(here) else path)}
