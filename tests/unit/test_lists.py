"""Lists in different files that name the same things agree: who adds a benchmark, a reader or a sweep cannot forget one."""

from pathlib import Path

import pytest

from kvferry.evaluate.rows import READERS
from kvferry.evaluate.tasks import BENCHMARKS
from kvferry.prepare import corpora
from kvferry.records import PERPLEXITY
from kvferry.report import names
from kvferry.report.wanted import BARS, FIVE, HELD_OUT, SECTIONS, TABLES
from kvferry.yamlfile import read_yaml

SCHEMAS = Path(__file__).parents[2] / "workflow/schemas"
CONFIG, CORPORA = (read_yaml(SCHEMAS / f"{name}.schema.yaml") for name in ("config", "corpora"))
ASKED = set(CONFIG["properties"]["evaluation"]["properties"]["benchmarks"]["properties"])
LISTS = {
    "evaluate/tasks.py: BENCHMARKS": set(BENCHMARKS),
    "evaluate/rows.py: READERS": set(READERS),
    "config.schema.yaml: $defs.sample": set(CONFIG["$defs"]["sample"]["properties"]),
    "report/names.py: BENCHMARKS": set(names.BENCHMARKS) - {PERPLEXITY},
    "report/wanted.py: FIVE and HELD_OUT": {*FIVE, *HELD_OUT},
}


@pytest.mark.parametrize("place", LISTS)
def test_every_list_has_the_benchmarks_that_a_config_may_ask_for(place):
    assert LISTS[place] == ASKED


def test_a_benchmark_is_either_one_that_choices_are_made_on_or_held_out():
    assert set(FIVE).isdisjoint(HELD_OUT)
    assert set(BARS) < set(FIVE)


def test_every_reader_of_a_corpus_can_be_asked_for_and_the_other_way_round():
    assert set(CORPORA["$defs"]["wheel"]["properties"]["reader"]["enum"]) == set(corpora.READERS)


def test_every_sweep_and_section_that_a_table_is_made_from_can_be_asked_for():
    made_from = {name for needed in TABLES.values() for name in needed} - {*FIVE, *HELD_OUT}
    assert made_from - set(SECTIONS) <= set(CONFIG["properties"]["sweeps"]["properties"])
    assert set(SECTIONS) <= set(CONFIG["properties"])
