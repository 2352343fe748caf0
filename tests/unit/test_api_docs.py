"""What docs/api.md shows runs as it stands; and importing the package costs little."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_family import LARGE, SMALL, build_family, loaded, mapper_of

import kvferry
from kvferry.api import Handoff, ferry, handoff, load_mapper, models, session

PAGE = Path(__file__).parents[2] / "docs/api.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny_model, tokenizer, save_prepared, identity_mapper):
    """A directory with results of the names that the examples use."""
    root = tmp_path_factory.mktemp("root")
    build_family(root / "results", tiny_model, tokenizer, save_prepared, identity_mapper)
    return root


@pytest.fixture
def family(root, monkeypatch):
    """Both models and both mappers; the current directory is where the results are."""
    monkeypatch.chdir(root)
    results = Path("results")
    source, target = loaded(results, SMALL), loaded(results, LARGE)
    ways = (source, target), (target, source)
    return source, target, *(load_mapper(mapper_of(results, *(own.card["model"] for own in way)), *way) for way in ways)


def test_the_examples_of_the_page_run_one_after_another(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    names = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"{PAGE.name}, example {number}", "exec"), names)
    assert len(BLOCKS) >= 6
    assert len(names["made"].tokens) <= 8
    assert names["sampled"].shape[0] == names["searched"].shape[0] == 1
    assert "ms mapper" in capsys.readouterr().out


@pytest.mark.parametrize("module", [ferry, handoff, models, session], ids=lambda module: module.__name__)
def test_the_examples_of_the_docstrings_run(module, family):
    source, target, mapper, back = family
    names = {"source": source, "target": target, "mapper": mapper, "back": back, "ids": torch.tensor([[5, 6, 7, 8]])}
    names["handoff"] = Handoff(source, target, mapper)
    outcome = doctest.testmod(module, extraglobs=names)
    assert outcome.attempted >= 2
    assert outcome.failed == 0


def test_importing_the_package_imports_no_torch_and_a_name_does():
    code = "import sys, kvferry; assert 'torch' not in sys.modules; kvferry.Handoff; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there_and_no_other():
    for name in kvferry.__all__:
        assert getattr(kvferry, name) is not None
        assert name in dir(kvferry)
    with pytest.raises(AttributeError, match="no attribute 'Hand0ff'"):
        kvferry.Hand0ff  # noqa: B018
