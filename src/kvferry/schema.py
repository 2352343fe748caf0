"""JSON schemas: filling their defaults into values, and saying the one most telling thing that is wrong.

Knows how an error becomes one sentence (file, key, value, remedy). Does not know what any key means: the schemas do.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

from kvferry.errors import KvferryError
from kvferry.yamlfile import read_yaml

Key = str | int
LONGEST_SHOWN = 60
# Among errors of one mapping, a mistyped key explains a missing one, so it is told first.
ORDER = {"additionalProperties": 0, "required": 1}


def validated(value: object, schema_file: Path, name: str) -> dict[str, Any]:
    """Give a copy of `value`, the contents of the file called `name`, with the defaults of its schema filled in.

    Raises KvferryError about the one most telling error if `value` does not fit the schema.
    """
    schema = read_yaml(schema_file)
    if value is None or value == {}:
        raise KvferryError(f"{name}: the file is empty; start with {', '.join(schema['required'])}")
    filled = _plain(value, name, ())
    errors = list(_Validator(schema).iter_errors(filled))
    if errors:
        raise _sentence(name, min(errors, key=_rank))
    return filled


def problem(file: str, key: Iterable[Key], what: str) -> KvferryError:
    """Make the error `file: dotted.key: what`."""
    return KvferryError(f"{file}: {dotted(key)}: {what}")


def dotted(key: Iterable[Key]) -> str:
    """Write a path into nested values as `variants.ridge.k` or `pairs[1]`; the top is `top level`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return "".join(parts).removeprefix(".") or "top level"


def shown(value: object) -> str:
    """Write a value on one short line, as YAML would."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    text = repr(value) if isinstance(value, str | dict | list) else str(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"


def choices(name: str, known: Iterable[str]) -> str:
    """Say what to use instead of an unknown `name`: the closest of the `known` names first, then the others."""
    names = sorted(known)
    closest = difflib.get_close_matches(name, names, n=1)
    others = ", ".join(other for other in names if other not in closest)
    if not closest:
        return f"use one of {others}"
    return f"use {closest[0]!r}" + (f" or another of {others}" if others else "")


def _plain(value: object, name: str, key: tuple[Key, ...]) -> object:
    """Copy nested values into plain dicts and lists; a key that is no text would break the validator."""
    if isinstance(value, list | tuple):
        return [_plain(item, name, (*key, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    for inner in value:
        if not isinstance(inner, str):
            raise problem(name, key, f"the key {shown(inner)} is not text; put it in quotes")
        if not inner.isprintable():
            raise problem(name, key, f"the key {inner!r} has characters that cannot be printed; rename it")
    return {inner: _plain(item, name, (*key, inner)) for inner, item in value.items()}


def _is_integer(_: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(checker: object, value: object) -> bool:
    return _is_integer(checker, value) or (isinstance(value, float) and math.isfinite(value))


def _properties(
    validator: Draft202012Validator, properties: dict[str, Any], instance: object, schema: dict[str, Any]
) -> Iterator[ValidationError]:
    """The keyword `properties`, which also fills defaults in."""
    if isinstance(instance, dict):
        for key, declared in properties.items():
            if isinstance(declared, dict) and "default" in declared:
                instance.setdefault(key, _plain(declared["default"], key, ()))
    for error in Draft202012Validator.VALIDATORS["properties"](validator, properties, instance, schema):
        if len(error.path) == 1:
            _annotate(error, properties[error.path[0]])
        yield error


def _annotate(error: ValidationError, declared: object) -> None:
    """Give an error found behind a `$ref` what the referrer says of the value."""
    if isinstance(declared, dict):
        own = {key: declared[key] for key in ("title", "description", "default") if key in declared}
        error.schema = {**error.schema, **own}


def _pattern(
    validator: Draft202012Validator, pattern: str, instance: object, schema: dict[str, Any]
) -> Iterator[ValidationError]:
    """The keyword `pattern`; Python's `$` would let a last newline pass, JSON schema's does not."""
    if isinstance(instance, str) and instance.endswith("\n"):
        yield ValidationError(f"{instance!r} ends in a newline")
    else:
        yield from Draft202012Validator.VALIDATORS["pattern"](validator, pattern, instance, schema)


_Validator = extend(
    Draft202012Validator,
    validators={"properties": _properties, "pattern": _pattern},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many({"integer": _is_integer, "number": _is_number}),
)


def _rank(error: ValidationError) -> tuple[int, int]:
    return len(error.absolute_path), ORDER.get(str(error.validator), 2)


def _sentence(name: str, error: ValidationError) -> KvferryError:
    key = list(error.absolute_path)
    if error.validator == "required":
        return _missing_key(name, key, error)
    if error.validator == "additionalProperties":
        return _unknown_key(name, key, error)
    if error.validator in ("minItems", "minProperties") and not error.instance:
        return problem(name, key, f"{shown(error.instance)} is empty; add at least one ({_about(error.schema)})")
    what = f"{shown(error.instance)} is not {expected(error.schema)}"
    return problem(name, key, f"{what}; {_remedy(error.instance, error.schema)}")


def _missing_key(name: str, key: list[Key], error: ValidationError) -> KvferryError:
    missing = next(inner for inner in error.schema["required"] if inner not in error.instance)
    declared = error.schema.get("properties", {}).get(missing, {})
    return problem(name, [*key, missing], f"the key is missing; add it ({_about(declared)})")


def _unknown_key(name: str, key: list[Key], error: ValidationError) -> KvferryError:
    extra = next(inner for inner in error.instance if not _is_declared(inner, error.schema))
    if "patternProperties" in error.schema:
        title = error.schema["propertyNames"]["title"]
        return problem(name, [*key, extra], f"{shown(extra)} is not {title}; rename it")
    return problem(name, [*key, extra], f"unknown key; {choices(extra, error.schema['properties'])}")


def _is_declared(key: str, schema: dict[str, Any]) -> bool:
    patterns = schema.get("patternProperties", {})
    return key in schema.get("properties", {}) or any(re.search(pattern, key) for pattern in patterns)


def _about(schema: dict[str, Any]) -> str:
    return schema.get("description") or expected(schema)


def expected(schema: dict[str, Any]) -> str:
    """Say in words what a schema takes, such as `an integer ≥ 1`."""
    if "title" in schema:
        return schema["title"]
    if "anyOf" in schema:
        return " or ".join(expected(option) for option in schema["anyOf"])
    if "const" in schema:
        return f'"{schema["const"]}"'
    if "enum" in schema:
        *others, last = map(str, schema["enum"])
        return f"{', '.join(others)} or {last}" if others else last
    return _kind(schema) + _range(schema)


def _kind(schema: dict[str, Any]) -> str:
    return {
        "integer": "an integer",
        "number": "a finite number",
        "boolean": "true or false",
        "string": "text",
        "array": "a list",
        "object": "a mapping of keys to values",
    }[schema["type"]]


def _range(schema: dict[str, Any]) -> str:
    bounds = {"≥": "minimum", ">": "exclusiveMinimum", "≤": "maximum"}
    parts = [f"{sign} {schema[key]}" for sign, key in bounds.items() if key in schema]
    return " " + " and ".join(parts) if parts else ""


def _remedy(value: object, schema: dict[str, Any]) -> str:
    """Say what to write instead of `value`."""
    for meant in _meant(value):
        if _Validator(schema).is_valid(meant):
            return "put it in quotes" if isinstance(meant, str) else f"write {_yaml_number(meant)}, which is one"
    about = f" ({schema['description']})" if "description" in schema else ""
    default = schema.get("default")
    removal = "" if default is None or default == {} else f" or remove the key for its default {shown(default)}"
    return f"correct it{about}{removal}"


def _meant(value: object) -> Iterator[str | int | float]:
    """What a value of the wrong type may have been meant as: YAML reads 1e-5 as text and version: 0.9 as a number."""
    if value is None or isinstance(value, dict | list):
        return
    if not isinstance(value, str):
        yield str(value)
    if isinstance(value, str | float):
        yield from _numbers(value)


def _numbers(value: str | float) -> Iterator[int | float]:
    try:
        number = float(value)
    except ValueError:
        return
    yield number
    if number.is_integer():
        yield int(number)


def _yaml_number(number: float) -> str:
    """Write a number so that YAML 1.1 reads it as one: a mantissa with a point, an exponent with a sign."""
    mantissa, exponent_mark, exponent = repr(number).partition("e")
    if not exponent_mark:
        return mantissa
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}"
