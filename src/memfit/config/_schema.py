"""What a pydantic model says about a dotted name: sections, known keys, and where an unquoted scalar is text."""

from __future__ import annotations

import enum
import types
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from memfit.config._yaml import Plain, Tree, is_null


def members(annotation: Any) -> list[Any]:
    """The alternatives of an annotation: unions are flattened, ``Annotated`` and aliases are seen through.

    >>> members(Annotated[int, "positive"] | None)
    [<class 'int'>, <class 'NoneType'>]
    """
    while hasattr(annotation, "__value__"):
        annotation = annotation.__value__
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in members(part)]
    return [types.NoneType if annotation is None else annotation]


def _is_model(member: Any) -> bool:
    return isinstance(member, type) and issubclass(member, BaseModel)


def section(annotation: Any) -> type[BaseModel] | None:
    """The one model that a value of this annotation is a section of, or None."""
    models = [member for member in members(annotation) if _is_model(member)]
    return models[0] if len(models) == 1 else None


def _is_mapping(member: Any) -> bool:
    origin = get_origin(member) or member
    return isinstance(origin, type) and issubclass(origin, Mapping)


def takes_keys(annotation: Any) -> bool:
    """Whether a value may have keys below it: a section, a free mapping, or anything."""
    return any(_is_model(m) or _is_mapping(m) or m in (Any, object) for m in members(annotation))


def _is_text(member: Any) -> bool:
    if get_origin(member) is Literal:
        return all(isinstance(choice, str) for choice in get_args(member))
    return isinstance(member, type) and (
        member is str or issubclass(member, PurePath) or (issubclass(member, str) and issubclass(member, enum.Enum))
    )


def _wants_text(annotation: Any) -> bool:
    kinds = [member for member in members(annotation) if member is not types.NoneType]
    return bool(kinds) and all(_is_text(member) for member in kinds)


def shape(value: Any, annotation: Any) -> Any:
    """The value with every unquoted scalar read as its place wants it: as text where the setting holds text.

    A section that is written with nothing below it is an empty one.

    >>> shape([Plain("0050"), Plain("1e-3")], list[str]), shape([Plain("0050"), Plain("1e-3")], list[float])
    (['0050', '1e-3'], [50, 0.001])
    """
    kinds = members(annotation)
    if is_null(value):
        needs_keys = types.NoneType not in kinds and all(_is_model(m) or _is_mapping(m) for m in kinds)
        return {} if needs_keys else None
    if isinstance(value, Plain):
        return value.text if _wants_text(annotation) else value.value
    if isinstance(value, list):
        parts = _item_annotations(kinds, len(value))
        return [shape(item, part) for item, part in zip(value, parts, strict=True)]
    if isinstance(value, dict):
        return {key: shape(item, _key_annotation(annotation, key)) for key, item in value.items()}
    return value


def _item_annotations(kinds: list[Any], length: int) -> list[Any]:
    for kind in kinds:
        arguments = get_args(kind)
        if get_origin(kind) is Literal or _is_mapping(kind) or not arguments:
            continue
        if get_origin(kind) is tuple and arguments[-1] is not Ellipsis:
            return [*arguments, *[Any] * length][:length]
        return [arguments[0]] * length
    return [Any] * length


def _key_annotation(annotation: Any, key: str) -> Any:
    for kind in members(annotation):
        if _is_model(kind) and key in kind.model_fields:
            return kind.model_fields[key].annotation
        if _is_mapping(kind) and len(get_args(kind)) == 2:
            return get_args(kind)[1]
    return Any


def canonical(model: type[BaseModel] | None, tree: Tree, path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of a variable's lower-case parts in the letters of the model, or of the keys already given."""
    if not path:
        return ()
    known = list(model.model_fields) if model else list(tree)
    name = next((key for key in known if key.lower() == path[0]), path[0])
    below = section(model.model_fields[name].annotation) if model and name in model.model_fields else None
    given = tree.get(name)
    return (name, *canonical(below, given if isinstance(given, dict) else {}, path[1:]))


def known_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings of a model, sections before what is in them."""
    for name, field in model.model_fields.items():
        yield prefix + name
        below = section(field.annotation)
        if below is not None and below is not model:
            yield from known_names(below, f"{prefix}{name}.")


def strangers(model: type[BaseModel], tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The paths in a tree that the model does not know, each with whether it lies below a single value."""
    for key, value in tree.items():
        field = model.model_fields.get(key)
        if field is None:
            if model.model_config.get("extra") != "allow":
                yield (*path, key), False
        elif isinstance(value, dict):
            below = section(field.annotation)
            if below is not None:
                yield from strangers(below, value, (*path, key))
            elif value and not takes_keys(field.annotation):
                yield (*path, key, next(iter(value))), True


def keys_at(model: type[BaseModel], path: tuple[str | int, ...]) -> list[str]:
    """The keys that are known below a path, of all models that may stand there."""
    places: list[Any] = [model]
    for part in path:
        kinds = [kind for place in places for kind in members(place)]
        if isinstance(part, int):
            places = [_item_annotations([kind], part + 1)[part] for kind in kinds]
        else:
            places = [_key_annotation(kind, part) for kind in kinds]
    models = [kind for place in places for kind in members(place) if _is_model(kind)]
    return sorted({name for kind in models for name in kind.model_fields})
