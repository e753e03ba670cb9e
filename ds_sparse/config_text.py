"""Words for the configuration: its error messages and its reference table, both made from the models."""

from __future__ import annotations

import json
import reprlib
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .errors import did_you_mean

Model = type[BaseModel]
MAX_SHOWN = 200  # characters of a value


def explain(error: ErrorDetails, section: Any, model: Model, name: str, docs: str) -> str:
    """One sentence for a validation error: the key as the user wrote it, its value, what is allowed.

    Args:
        error: of pydantic.
        section: what was validated, against `model`.
        name: of the section.
        docs: where the reference stands.
    """
    location = _as_written(error, model)
    path = shorten(".".join([name, *map(str, location)]))
    if error["type"] == "extra_forbidden":
        known = _known_keys(model, location[:-1])
        suggestion = did_you_mean(str(location[-1]), known)
        return f"'{path}' is not a known key.{suggestion} Known keys here: {', '.join(sorted(known))}. See {docs}."
    value = section
    for part in location:
        value = value[part]
    field = _field_at(model, location)
    return (
        f"'{path}' is {_as_json(value)}; allowed is {_allowed(error, field, location)}.{_nearest(error, field, value)} "
        f"What to do: correct it, or leave the key out to have its default. See {docs}."
    )


def _as_written(error: ErrorDetails, model: Any) -> list[int | str]:
    """The location without what pydantic adds: the branch of a union that failed, such as "constrained-int"."""
    *parents, last = error["loc"]
    location: list[int | str] = []
    for part in parents:
        if isinstance(part, int):
            location.append(part)
        elif _is_model(model) and part in model.model_fields:
            location.append(part)
            model = model.model_fields[part].annotation
    written = isinstance(last, int) or error["type"] == "extra_forbidden"
    if written or (_is_model(model) and last in model.model_fields):
        location.append(last)
    return location


def _as_json(value: Any) -> str:
    try:
        written = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # nothing that JSON can hold, or nested too deeply
        return reprlib.repr(value)
    return shorten(written)


def shorten(text: str) -> str:
    """`text`, cut where it is longer than a person would read."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _known_keys(model: Any, location: list[int | str]) -> set[str]:
    for part in location:
        model = model.model_fields[str(part)].annotation
    return set(model.model_fields)


def _field_at(model: Any, location: list[int | str]) -> FieldInfo | None:
    field = None
    for part in location:
        if not _is_model(model) or part not in model.model_fields:
            break
        field = model.model_fields[str(part)]
        model = field.annotation
    return field


def _allowed(error: ErrorDetails, field: FieldInfo | None, location: list[int | str]) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if field is None:
        return error["msg"]
    in_list = bool(location) and isinstance(location[-1], int)
    annotation = get_args(field.annotation)[0] if in_list else field.annotation
    return describe_type(annotation, [] if in_list else field.metadata)


def _nearest(error: ErrorDetails, field: FieldInfo | None, value: Any) -> str:
    if error["type"] != "literal_error" or not isinstance(value, str) or field is None:
        return ""
    return did_you_mean(value, map(str, get_args(field.annotation)))


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def describe_type(annotation: Any, metadata: Any = ()) -> str:
    """One phrase for what a field takes, such as `a number in (0, 1]` or `one of 'dense', 'off'`."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return describe_type(inner, [*extra, *metadata])
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(f"'{value}'" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "a list, each " + describe_type(get_args(annotation)[0])
    arms = [arm for arm in get_args(annotation) if arm is not type(None)]
    if len(arms) == 1:
        return describe_type(arms[0], metadata) + ", or leave it out"
    if _is_model(annotation):
        return "an object"
    names = {bool: "true or false", int: "a whole number", str: "a regular expression"}
    return names.get(annotation, "a number") + _bounds(metadata)


def _bounds(metadata: Any) -> str:
    found: dict[str, float] = {}
    for item in metadata:
        for source in (item, *getattr(item, "metadata", ())):
            for key in ("gt", "ge", "lt", "le"):
                bound = getattr(source, key, None)
                if bound is not None:
                    found[key] = int(bound) if bound == int(bound) else bound
    if not found:
        return ""
    low = f"({found['gt']}" if "gt" in found else f"[{found['ge']}" if "ge" in found else "(-inf"
    high = f"{found['lt']})" if "lt" in found else f"{found['le']}]" if "le" in found else "inf)"
    return f" in {low}, {high}"


def as_markdown(model: Model, name: str) -> str:
    """The reference of a section: one row a key."""
    lines = [
        "# Configuration reference",
        "",
        "<!-- generated by `make docs`; do not edit -->",
        "",
        f"All keys stand in the section `{name}` of `ds_config.json`. Every key may be left out.",
        "",
        "| key | allowed | default | meaning |",
        "|---|---|---|---|",
        *_rows(model, ""),
    ]
    return "\n".join(lines) + "\n"


def _rows(model: Any, prefix: str) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        if _is_model(field.annotation):
            rows += _rows(field.annotation, f"{prefix}{name}.")
            continue
        allowed = describe_type(field.annotation, field.metadata).replace("'", "`")
        rows.append(f"| `{prefix}{name}` | {allowed} | {_default(field.default)} | {field.description} |")
    return rows


def _default(value: Any) -> str:
    if value is None:
        return "left out"
    return f"`{str(value).lower()}`" if value != () else "`[]`"
