"""Every command of README.md and docs/ is one of a known kind and does what its kind can do here without a network or work.

A block in the language of a shell, or in none, holds commands: anything else names its language (text, yaml, mermaid).
"""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec

import pytest
from pages import PAGES, ROOT, blocks, script

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {name for line in re.findall(r"^\.PHONY:(.*)", MAKEFILE, re.MULTILINE) for name in line.split()}
VARIABLES = set(re.findall(r"^(\w+) \?=", MAKEFILE, re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Modules that only look and print; of others it is enough that they are there.
LOOKING = {"kvferry.config", "kvferry.planner"}


def documented():
    """(page, command line) of all shell blocks; a line that ends in a backslash goes on."""
    for page, text in blocks("", "sh", "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            if shlex.split(line, comments=True):
                yield page, line.strip()


# Configs that a documented `kvferry new NAME` writes.
WRITTEN = {f"config/{found[1]}.yaml" for _, line in documented() if (found := re.search(r"kvferry new (\w+)", line))}


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def make(words):
    for word in words:
        name, is_variable, value = word.partition("=")
        assert name in (VARIABLES if is_variable else TARGETS), f"the Makefile has no {name}"
        assert name != "CONFIG" or (ROOT / value).is_file() or value in WRITTEN, f"there is no {value}"


def snakemake(words):
    run("snakemake", *words, *(["-n"] if "-n" not in words else []))


def python(words):
    if words[0] == "-c":
        imports = [node for node in ast.walk(ast.parse(words[1])) if isinstance(node, ast.ImportFrom)]
        assert all(hasattr(import_module(node.module), name.name) for node in imports for name in node.names)
    elif words[0] != "-m":
        assert (ROOT / words[0]).is_file()
    elif words[1] in LOOKING:
        run(*words[1:])
    else:
        assert find_spec(words[1]), f"there is no module {words[1]}"


def kvferry(words):
    """The subcommand is there and knows the options."""
    said = run("kvferry", words[0], "--help")
    assert all(word in said for word in words if word.startswith("--"))


def pip(words):
    asked = re.search(r"\.\[([\w,]+)\]", " ".join(words))
    assert words[0] == "install"
    assert set(asked[1].split(",") if asked else ()) <= set(EXTRAS)
    assert all((ROOT / words[place + 1]).is_file() for place, word in enumerate(words) if word == "-c")


def pytest_(words):
    assert all((ROOT / word).exists() for word in words if not word.startswith("-"))


KINDS = {"make": make, "snakemake": snakemake, "python": python, "kvferry": kvferry, "pip": pip, "pytest": pytest_}


@pytest.mark.parametrize(("page", "line"), documented())
def test_a_documented_command_works(page, line):
    program, *words = shlex.split(line, comments=True)
    kind = KINDS.get(program.removeprefix(".venv/bin/"))
    assert kind, f"{page}: {program} is no known kind of command; name the block's language, or add the kind here"
    kind(words)


def test_commands_are_found_in_readme_and_pages():
    found = {page for page, _ in documented()}
    assert {"README.md", "workflow.md", "extending.md"} <= found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_named_in_the_text_exist(page):
    assert set(re.findall(r"`make (\w+)", page.read_text())) <= TARGETS


def test_the_picture_of_the_rules_is_that_of_the_workflow(monkeypatch):
    monkeypatch.chdir(ROOT)
    dag = script("dag")
    page = dag.PAGE.read_text()
    assert dag.drawn_into(page, dag.picture()) == page, "run `make docs`"
