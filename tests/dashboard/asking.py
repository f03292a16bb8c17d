"""What tests of the page's server share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hubs import PATIENCE_S
from motley.clock import Deadline, RealClock

BASE = "http://127.0.0.1:7117"


def eventually(happened: Callable[[], bool]) -> None:
    deadline = Deadline(RealClock(), PATIENCE_S)
    while not happened():
        assert not deadline.passed, "it never happened"
        RealClock().sleep_s(0.01)


def fits(value: Any, schema: Mapping[str, Any], parts: Mapping[str, Any]) -> bool:
    """Whether a value is what a JSON Schema says, as far as msgspec's schemas go."""
    if "$ref" in schema:
        return fits(value, parts[schema["$ref"].rsplit("/", 1)[-1]], parts)
    if "anyOf" in schema:
        return any(fits(value, one, parts) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    match schema.get("type"):
        case "object":
            if not isinstance(value, dict) or not set(schema.get("required", ())) <= value.keys():
                return False
            known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
            rest = others if isinstance(others, dict) else {}
            named = "properties" in schema
            return all(
                (key in known or not named) and fits(item, known.get(key, rest), parts)
                for key, item in value.items()
            )
        case "array":
            if not isinstance(value, list):
                return False
            first = schema.get("prefixItems", [])
            rest = schema.get("items") or {}
            pairs = zip(value, [*first, *[rest] * (len(value) - len(first))], strict=False)
            return len(value) >= len(first) and all(fits(v, s, parts) for v, s in pairs)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
    return True
