"""Random JSON schemas of the kinds that tools and structured outputs have."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

names = st.sampled_from(["city", "days", "the fox", "naïve", "a_b", "path", "x"])
texts = st.text(st.sampled_from('abc é"\\/\n😀'), max_size=6)


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    def ranged(kind: str) -> st.SearchStrategy[dict[str, Any]]:
        return st.tuples(st.integers(-50, 50), st.integers(0, 100)).map(
            lambda r: {"type": kind, "minimum": r[0], "maximum": r[0] + r[1]}
        )

    return st.one_of(
        st.just({"type": "string"}),
        st.integers(0, 6).flatmap(
            lambda n: st.integers(n, n + 8).map(lambda m: {"type": "string", "minLength": n, "maxLength": m})
        ),
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.just({"type": "integer"}),
        st.just({"type": "number"}),
        ranged("integer"),
        st.lists(texts | st.integers(-9, 9) | st.booleans() | st.none(), min_size=1, max_size=4, unique_by=repr).map(
            lambda v: {"enum": v}
        ),
        (texts | st.integers()).map(lambda v: {"const": v}),
        st.sampled_from(["date", "uuid", "ipv4"]).map(lambda f: {"type": "string", "format": f}),
        st.sampled_from(["[a-c]{1,3}", "^x[0-9]+$", "(ab|cd)*"]).map(lambda p: {"type": "string", "pattern": p}),
    )


def schemas(closed: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    """closed: only objects without more than their named properties, and no unions."""

    def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        lists = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
        )
        objects = st.dictionaries(names, inner, max_size=4).flatmap(
            lambda properties: st.sets(st.sampled_from(sorted(properties)) if properties else st.nothing()).map(
                lambda required: {
                    "type": "object",
                    "properties": properties,
                    "required": sorted(required),
                    "additionalProperties": False,
                }
            )
        )
        if closed:
            return lists | objects
        open_ = objects.map(lambda o: {k: v for k, v in o.items() if k != "additionalProperties"})
        unions = st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
        return lists | objects | open_ | unions

    return st.recursive(leaves(), nested, max_leaves=6)


def documents(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Documents of a schema that `schemas(closed=True)` gave, keys in its order."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    kind = schema["type"]
    if kind == "object":
        properties = schema["properties"]
        optional = [key for key in properties if key not in schema["required"]]
        return st.sets(st.sampled_from(optional) if optional else st.nothing()).flatmap(
            lambda left_out: st.fixed_dictionaries(
                {key: documents(value) for key, value in properties.items() if key not in left_out}
            ).map(lambda drawn: {key: drawn[key] for key in properties if key in drawn})
        )
    if kind == "array":
        return st.lists(documents(schema["items"]), min_size=schema["minItems"], max_size=schema["maxItems"])
    if kind == "integer":
        low = schema.get("minimum", -(10**9))
        return st.integers(low, schema.get("maximum", 10**9))
    if kind == "number":
        return st.integers(-(10**6), 10**6) | st.integers(-(10**6), 10**6).map(lambda n: n / 64)
    if kind == "string":
        if "pattern" in schema:
            return st.from_regex(schema["pattern"], fullmatch=True, alphabet=st.characters(codec="ascii"))
        if "format" in schema:
            return {"date": st.dates().map(str), "uuid": st.uuids().map(str)}.get(
                schema["format"], st.just("127.0.0.1")
            )
        return st.text(
            st.characters(codec="utf-8", exclude_characters="\x7f"),
            min_size=schema.get("minLength", 0),
            max_size=schema.get("maxLength", 9),
        )
    return {"boolean": st.booleans(), "null": st.none()}[kind]
