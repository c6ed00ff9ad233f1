"""JSON Schemas of honoured keywords, and of keywords refused with a path."""

from __future__ import annotations

from typing import Any

INT, TEXT = {"type": "integer"}, {"type": "string", "maxLength": 6}


def obj(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = [*properties] if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


WEATHER = obj(city={"enum": ["Rio", "Bern"]}, days={"type": "integer", "minimum": 1, "maximum": 14})
LINKED = {
    "$ref": "#/$defs/node",
    "$defs": {"node": obj(v=INT, next={"anyOf": [{"type": "null"}, {"type": "boolean"}]})},
}
HONOURED: list[dict[str, Any]] = [
    {"type": "null"},
    {"type": "boolean"},
    {"type": "integer", "minimum": 0, "maximum": 99},
    {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 20},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -1, "maximum": 2.5},
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    {"type": "string", "pattern": "^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$"},
    {"type": "string", "pattern": "^a+b?$", "maxLength": 6},
    {"type": "string", "pattern": "^\\w{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"enum": ["red", "green", 3, None, True]},
    {"enum": ["a\"b", "c\\d", "é", "line\nend"]},
    {"const": {"a": [1, 2, {"b": None}]}},
    {"const": "only"},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"type": ["boolean", "null"]},
    {"anyOf": [{"type": "boolean"}, {"const": "x"}]},
    {"anyOf": [obj(a=INT), obj(b={"type": "boolean"})]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 0, "maximum": 7}]},
    {"oneOf": [obj(kind={"const": "a"}), obj(kind={"const": "b"}, n={"type": "boolean"})]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 30}]},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
    obj(),
    obj(a={"type": "integer", "minimum": 0, "maximum": 9}),
    obj([], a={"type": "boolean"}, b={"type": "null"}),
    obj(["b"], a={"type": "boolean"}, b={"type": "boolean"}),
    obj(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}, ok={"type": "boolean"}),
    obj(inner=obj(deep=obj(deeper={"enum": [1, 2]}))),
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2, "required": ["a"]},
    {"type": "object", "patternProperties": {"^x_[a-c]$": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": {"type": "null"}},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "maxItems": 3},
    {"type": "array", "items": obj(a={"type": "boolean"}), "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": [{"type": "null"}, {"type": "boolean"}], "additionalItems": False, "minItems": 2,
     "$schema": "http://json-schema.org/draft-07/schema#"},
    {"type": "array", "maxItems": 0},
    {"$ref": "#/definitions/p", "definitions": {"p": obj(x={"type": "boolean"}, y={"type": "null"})}},
    obj(a={"$ref": "#/$defs/e"}, b={"$ref": "#/$defs/e"}) | {"$defs": {"e": {"enum": ["l", "r"]}}},
    LINKED,
    {"type": "object", "properties": {"if": {"type": "boolean"}, "not": {"const": 1}}, "required": ["if", "not"],
     "additionalProperties": False},
    obj(uniqueItems={"type": "boolean"}),
    {"title": "T", "description": "d", "$comment": "c", "type": "boolean", "default": True, "examples": [False]},
    obj(**{f"p{number}": {"type": "boolean"} for number in range(12)}),
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a", "z"], "additionalProperties": TEXT,
     "maxProperties": 2},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
    {"type": "integer", "minimum": 1000, "maximum": 1000000},
    {"type": "string", "enum": ["only", "these"]},
    {"anyOf": [{"type": "array", "items": {"type": "null"}, "maxItems": 2}, {"type": "null"}]},
]  # fmt: skip

# Each with the end of the path that the error names.
REFUSED: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
    (obj(a={"type": "array", "items": INT, "uniqueItems": True}), ".properties.a.uniqueItems"),
    ({"anyOf": [{"type": "null"}, {"if": {"const": 1}, "then": {"const": 1}}]}, ".anyOf[1].if"),
    (obj(a={"not": {"type": "string"}}), ".properties.a.not"),
    ({"type": "array", "contains": INT}, ".contains"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, ".propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
    ({"type": "integer", "divisibleBy": 2}, ".divisibleBy"),
    ({"x-guidance": {"lenient": True}, "not": {}}, ".x-guidance"),
    ({"$ref": "https://example.org/schema"}, ""),
    ({"$ref": "#/$defs/nowhere"}, ""),
    ({"$ref": "#"}, ""),
    (False, ""),
    ({"type": "strin"}, ""),
    ({"properties": 5}, ""),
    ({"type": "string", "pattern": "(?=a)b"}, ""),
    ({"type": "integer", "minimum": 5, "maximum": 3}, ""),
    ({"enum": [f"value {number}" for number in range(20_000)]}, ""),
    ("{", ""),
    ("[]", ""),
    ('{"items": ' * 2000 + "{}" + "}" * 2000, ""),
]
