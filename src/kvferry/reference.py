"""The configuration reference: the schemas of the config and its registries as one page of tables.

Knows JSON schemas of the form that this project writes them in. Does not know what any key means: the schemas say so, and a
key without a description is refused.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kvferry.errors import KvferryError
from kvferry.files import write_text
from kvferry.schema import expected
from kvferry.yamlfile import read_yaml

SCHEMAS, PAGE = Path("workflow/schemas"), Path("docs/configuration.md")
# In the order of the page.
FILES = ("config", "pairs", "models", "corpora", "wheels")
VALUES = "values"
HEAD = """\
# Configuration reference

Made by `make docs` from the schemas in `workflow/schemas`, which every config and registry is checked against before any work:
edit those. A key that is not here is refused with a sentence that names it. What schemas cannot say (names that must exist,
numbers that must agree) is checked by `src/kvferry/crosscheck.py`.

*Value* is what a key takes, *default* what it is where it is absent; `required` keys must be there, and a key with neither may be
left out. NAME stands for a name of your own.
"""
TABLE = "| key | value | default | meaning |\n|---|---|---|---|\n"
REF = "$ref"

Schema = dict[str, Any]


@dataclass(frozen=True)
class _Row:
    """A line of a table; several keys share one where their schemas are the same."""

    prefix: str
    keys: list[str]
    value: str
    default: str
    meaning: str

    def line(self) -> str:
        keys = self.keys[0] if len(self.keys) == 1 else "{" + ", ".join(self.keys) + "}"
        cells = (f"`{self.prefix}{keys}`", self.value, self.default, self.meaning)
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n"


@dataclass(frozen=True)
class _File:
    """One schema: its name (`config`, …) and all of it."""

    name: str
    whole: Schema

    def sections(self) -> Iterator[str]:
        """The tables of this schema: the top, mappings right below it, definitions, kinds of values."""
        yield f"## {self.whole['title']}\n\n{_sentence(self.whole['description'])}\n\n" + self._table(self.whole, "")
        for key, declared in self.whole["properties"].items():
            if self._has_section(declared):
                yield self._section(key, declared, f"{key}.")
        for name, declared in self._definitions().items():
            if "properties" in declared:
                yield self._section(name, declared, "")
        values = [
            f"- {name}: {self._value(own)}\n" for name, own in self._definitions().items() if not _is_mapping(own)
        ]
        if values:
            yield f"### {self._title(VALUES)}\n\n" + "".join(values)

    def _definitions(self) -> dict[str, Schema]:
        return self.whole.get("$defs", {})

    def _section(self, name: str, declared: Schema, prefix: str) -> str:
        text = f"### {self._title(name)}\n\n{_sentence(self._description(declared, name))}\n\n"
        kinds = [rule for rule in declared.get("allOf", []) if "if" in rule]
        return text + self._table(declared, prefix) + ("\n" if kinds else "") + "".join(map(self._kind, kinds))

    def _kind(self, rule: Schema) -> str:
        """Which keys one kind of an entry takes."""
        ((key, value),) = rule["if"]["properties"].items()
        return f"- with `{key}: {value['const']}` also {self._value(rule['then'])}\n"

    def _table(self, mapping: Schema, prefix: str) -> str:
        return TABLE + "".join(row.line() for row in self._rows(mapping, prefix))

    def _rows(self, mapping: Schema, prefix: str) -> Iterator[_Row]:
        """Rows of the keys of a mapping, and of those inside of keys that have no section of their own."""
        required, named = mapping.get("required", []), mapping.get("patternProperties", {}).values()
        keys = [*mapping.get("properties", {}).items(), *(("NAME", declared) for declared in named)]
        for (declared, needed), group in groupby(keys, key=lambda pair: (pair[1], pair[0] in required)):
            if declared is True:  # said where the key decides what else there is
                continue
            own = [key for key, _ in group]
            default = "required" if needed else _default(declared)
            yield _Row(prefix, own, self._value(declared), default, self._description(declared, prefix + own[0]))
            if _is_mapping(declared) and not self._has_section(declared) and self._same(declared) is None:
                yield from self._rows(declared, f"{prefix}{own[0]}.")

    def _value(self, declared: Schema) -> str:
        """What a key takes, with links to what is said elsewhere."""
        if REF in declared:
            name = declared[REF].rsplit("/", 1)[-1]
            return self._link(name, name if _is_mapping(self._definitions()[name]) else VALUES)
        if declared.get("not") == {}:
            return "not allowed"
        if "if" in declared:
            return f"{self._value(declared['else'])} or {self._value(declared['then'])}"
        if "anyOf" in declared and "title" not in declared:
            return " or ".join(map(self._value, declared["anyOf"]))
        if declared.get("type") == "array" and "title" not in declared:
            return f"a list{_count(declared)}, each {self._value(declared['items'])}"
        return self._mapping(declared) if _is_mapping(declared) else expected(declared)

    def _mapping(self, declared: Schema) -> str:
        if self._has_section(declared):
            key = next(key for key, own in self.whole["properties"].items() if own is declared)
            return self._link("keys", key)
        same = self._same(declared)
        return f"keys of a {self._link(same, same)}" if same else "keys"

    def _same(self, declared: Schema) -> str | None:
        """The definition with the very keys of a mapping."""
        own = declared.get("properties")
        return next(
            (name for name, other in self._definitions().items() if own and other.get("properties") == own), None
        )

    def _has_section(self, declared: Schema) -> bool:
        return "properties" in declared and any(own is declared for own in self.whole["properties"].values())

    def _description(self, declared: Schema, key: str) -> str:
        """What a schema says of a key, or of what it refers to."""
        referred = self._definitions().get(declared.get(REF, "").rsplit("/", 1)[-1], {})
        for own in (declared, referred):
            if "description" in own:
                return own["description"]
        raise KvferryError(f"workflow/schemas/{self.name}.schema.yaml: {key} has no description; add one")

    def _title(self, name: str) -> str:
        return f"{self.name}: {name}"

    def _link(self, words: str, name: str) -> str:
        return f"[{words}](#{anchor(self._title(name))})"


def reference(schemas: Path) -> str:
    """The page, in markdown.

    Raises:
        KvferryError: a schema is unreadable, or a key has no description.
    """
    files = [_File(name, read_yaml(schemas / f"{name}.schema.yaml")) for name in FILES]
    return "\n".join([HEAD, *(section for file in files for section in file.sections())])


def anchor(heading: str) -> str:
    """What a heading is linked to by."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _is_mapping(declared: Schema) -> bool:
    return declared.get("type") == "object" and ("properties" in declared or "patternProperties" in declared)


def _count(declared: Schema) -> str:
    least, most = declared.get("minItems"), declared.get("maxItems")
    if least and least == most:
        return f" of {least}"
    return f" of at least {least}" if least else ""


def _default(declared: Schema) -> str:
    value = declared.get("default", {})
    if value == {}:
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".") + "."


def main() -> None:
    """Write the page; what is wrong is said in one sentence, with exit status 1."""
    try:
        write_text(PAGE, reference(SCHEMAS))
    except KvferryError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
