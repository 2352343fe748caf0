"""The configuration reference says what the schemas say, and nothing is left out of it."""

import re
from pathlib import Path

import pytest
import yaml

from kvferry import reference
from kvferry.errors import KvferryError
from kvferry.yamlfile import read_yaml

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "workflow/schemas"
EMPTY = {"title": "x", "description": "a file.", "type": "object", "properties": {}}
COUNT = {"type": "integer", "minimum": 1, "default": 2, "description": "things"}
TALK = """
title: config/config.yaml
description: what is run
type: object
required: [main]
properties:
  main: {type: string, description: a name}
  one: &one {type: number, exclusiveMinimum: 0, description: seconds | of one}
  two: *one
  section:
    description: a section
    type: object
    properties:
      seed: {$ref: "#/$defs/seed", default: 0, description: seed of it}
      inner: {type: object, description: more, properties: {deep: {enum: [a, b], default: a, description: a letter}}}
      base:
        type: object
        description: as an entry
        properties: &keys {size: {type: integer, minimum: 2, maximum: 3, description: its size}}
      never: {description: written elsewhere, not: {}}
      places: {type: array, minItems: 2, maxItems: 2, description: where, items: {$ref: "#/$defs/entry"}}
  either:
    description: one for all, or some
    if: {type: object}
    then: {$ref: "#/$defs/entry"}
    else: {type: string, description: a name}
$defs:
  seed: {type: integer, minimum: 0, maximum: 9}
  entry: {description: an entry, type: object, properties: *keys}
"""


@pytest.fixture
def schemas(tmp_path):
    """A directory of small schemas: `write(text)` sets that of the config and gives the directory."""
    for name in reference.FILES:
        (tmp_path / f"{name}.schema.yaml").write_text(yaml.safe_dump(EMPTY))

    def write(text):
        (tmp_path / "config.schema.yaml").write_text(text)
        return tmp_path

    return write


def test_the_page_is_made_of_the_schemas_as_they_are():
    assert (ROOT / "docs/configuration.md").read_text() == reference.reference(SCHEMAS), "run `make docs`"


@pytest.mark.parametrize(
    "line",
    [
        "| `main` | text | required | a name |",
        "| `{one, two}` | a finite number > 0 |  | seconds \\| of one |",
        "| `section` | [keys](#config-section) |  | a section |",
        "| `section.seed` | [seed](#config-values) | `0` | seed of it |",
        "| `section.inner` | keys |  | more |",
        "| `section.inner.deep` | a or b | `a` | a letter |",
        "| `section.base` | keys of a [entry](#config-entry) |  | as an entry |",
        "| `section.never` | not allowed |  | written elsewhere |",
        "| `section.places` | a list of 2, each [entry](#config-entry) |  | where |",
        "| `either` | text or [entry](#config-entry) |  | one for all, or some |",
        "| `size` | an integer ≥ 2 and ≤ 3 |  | its size |",
        "- seed: an integer ≥ 0 and ≤ 9",
    ],
)
def test_a_key_is_one_line(schemas, line):
    assert line in reference.reference(schemas(TALK)).splitlines()


def test_keys_that_share_a_definition_are_not_repeated(schemas):
    page = reference.reference(schemas(TALK))
    assert page.count("| `size` |") == 1
    assert "section.base.size" not in page


def every_key(schema):
    """Names of all keys that a schema describes, however deep."""
    if isinstance(schema, list):
        return {key for part in schema for key in every_key(part)}
    if not isinstance(schema, dict):
        return set()
    own = {key for key, declared in schema.get("properties", {}).items() if isinstance(declared, dict)}
    return own | {key for keyword, part in schema.items() if keyword != "if" for key in every_key(part)}


@pytest.mark.parametrize("name", reference.FILES)
def test_every_key_of_a_schema_is_on_the_page(name):
    page = (ROOT / "docs/configuration.md").read_text()
    own = page[page.index(f"## config/{name}.yaml") :].split("\n## ")[0]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"^\| `(.*?)`", own, re.MULTILINE))))
    assert every_key(read_yaml(SCHEMAS / f"{name}.schema.yaml")) <= named


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"properties": {"a": {"type": "integer"}}}, "a"),
        (
            {"properties": {"a": {"type": "object", "description": "x", "properties": {"b": {"type": "integer"}}}}},
            "a.b",
        ),
        ({"properties": {"a": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"type": "integer"}}}, "a"),
    ],
)
def test_a_key_without_a_description_is_refused(schemas, change, key):
    with pytest.raises(KvferryError, match=rf"config.schema.yaml: {key} has no description; add one"):
        reference.reference(schemas(yaml.safe_dump({**EMPTY, **change})))


def test_a_default_of_text_is_shown_as_it_is_written(schemas):
    text = yaml.safe_dump({**EMPTY, "properties": {"n": COUNT, "t": {**COUNT, "type": "string", "default": "all"}}})
    page = reference.reference(schemas(text))
    assert "| `n` | an integer ≥ 1 | `2` | things |" in page
    assert "| `all` | things |" in page
