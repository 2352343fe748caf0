"""Draw the workflow's rules into docs/workflow.md, from Snakemake's own graph of the smallest shipped run.

Rules that are made in a loop (one a pair, model or shard) are drawn once, in the stage whose file they stand in. An arrow that
other arrows imply is left out. Does not know what a rule does.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from kvferry.errors import KvferryError
from kvferry.files import write_text

PAGE, CONFIG = Path("docs/workflow.md"), "config/ci.yaml"
BEGIN, END = "<!-- made by `make docs` -->\n", "<!-- end of what is made -->"
STAGES = re.compile(r'^include: "workflow/rules/(\w+)\.smk"', re.MULTILINE)
# A rule's name as it is written, or the first part of one that is put together.
NAMES = re.compile(r'^rule (\w+):|rule_name\(\s*"(\w+)"', re.MULTILINE)
NODE, ARROW = re.compile(r"(id\d+)\[(\w+)\]"), re.compile(r"(id\d+) --> (id\d+)")

Needs = dict[str, set[str]]


def rule_graph() -> str:
    """Snakemake's graph of the rules of CONFIG, in mermaid's language.

    Raises:
        KvferryError: Snakemake fails.
    """
    command = [sys.executable, "-m", "snakemake", "--configfile", CONFIG, "--rulegraph", "mermaid-js"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise KvferryError(f"{CONFIG}: no graph of its rules ({done.stderr.strip()}); correct the workflow")
    return done.stdout


def stages() -> dict[str, list[str]]:
    """The kinds of rules by stage, in the order of the Snakefile."""
    names = STAGES.findall(Path("Snakefile").read_text())
    files = {name: Path(f"workflow/rules/{name}.smk").read_text() for name in names}
    kinds = {name: ["".join(found) for found in NAMES.findall(text)] for name, text in files.items()}
    return {name: list(dict.fromkeys(own)) for name, own in kinds.items() if own}


def needs(graph: str, kinds: list[str]) -> Needs:
    """Which kinds of rules each kind reads the outputs of; a rule of no kind is its own."""

    def kind(rule: str) -> str:
        return max((own for own in kinds if rule == own or rule.startswith(f"{own}_")), key=len, default=rule)

    rules = {node: kind(rule) for node, rule in NODE.findall(graph)}
    found: Needs = {own: set() for own in rules.values()}
    for before, after in ARROW.findall(graph):
        if rules[before] != rules[after]:
            found[rules[after]].add(rules[before])
    return found


def reduced(graph: Needs) -> Needs:
    """The same order with as few arrows as it takes."""
    above: Needs = {}
    for own in TopologicalSorter(graph).static_order():
        above[own] = graph[own].union(*(above[before] for before in graph[own]))
    return {own: before - set().union(*(above[one] for one in before)) for own, before in graph.items()}


def mermaid(graph: Needs, by_stage: dict[str, list[str]]) -> Iterator[str]:
    """Lines of the picture: a box a stage, then the arrows."""
    yield "flowchart TB"
    for stage, kinds in by_stage.items():
        if drawn := [own for own in kinds if own in graph]:
            yield f'  subgraph {stage}_stage["{stage}"]'
            yield from (f"    {own}" for own in drawn)
            yield "  end"
    yield from sorted(f"  {before} --> {own}" for own, all_before in graph.items() for before in all_before)


def picture() -> str:
    """The block of the page."""
    by_stage = stages()
    graph = reduced(needs(rule_graph(), [own for kinds in by_stage.values() for own in kinds]))
    return BEGIN + "\n".join(["```mermaid", *mermaid(graph, by_stage), "```", ""])


def drawn_into(page: str, block: str) -> str:
    """The page with its block replaced.

    Raises:
        KvferryError: the page does not say where.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise KvferryError(f"{PAGE}: lacks the lines {BEGIN.strip()} and {END}; put them where the picture belongs")
    return before + block + end + after


if __name__ == "__main__":
    try:
        write_text(PAGE, drawn_into(PAGE.read_text(), picture()))
    except KvferryError as error:
        sys.exit(str(error))
