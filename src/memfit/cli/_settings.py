"""The flags that several verbs share, and how typer reads them from a record."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_type_hints

from typer import Option

from memfit.cli._terminal import AsJson
from memfit.config import Override
from memfit.errors import ConfigError

Text = str | None
_TEXTS = ("experiment", "units", "planned", "canary_args")  # also where they look like numbers


def flag(
    text: str, metavar: str | None = None, setting: str = "", *names: str, default: Any = None, **more: Any
) -> Any:
    """Return a field of a record of flags: its help, what it takes (a switch: nothing), the setting that it gives."""

    def option(name: str) -> Any:
        return Option(*(names or [spell(name)]), help=text, metavar=metavar, **more)

    default = False if metavar is None else default
    return field(default=default, metadata={"setting": setting, "option": option})


def set_flag() -> Any:
    """Return the flag that changes any setting."""
    return flag("Change a setting: memory.slack=0.2. Repeatable.", "KEY=VALUE")


def tight_flag() -> Any:
    """Return the flag that accepts what is tight."""
    return flag("Also accept less than 5 % left of the memory.", None, "accept_tight=true")


@dataclass(frozen=True)
class Output:
    """How a run is shown."""

    quiet: bool = flag("Print only failures and the summary.", None, "", "--quiet", "-q")
    verbose: bool = flag("Also show waits, forecasts, OOM kills, epochs.")
    as_json: AsJson = False


def spell(name: str) -> str:
    """Return a flag as it is typed, from the name of its field."""
    return f"--{name.strip('_').replace('_', '-')}"


def settings_of(flags: Any) -> dict[str, tuple[str, Any]]:
    """Return the settings that flags give, each with its flag and value."""
    found = {}
    for one in fields(flags):
        value, setting = getattr(flags, one.name), one.metadata.get("setting")
        if setting and value is not None and value is not False:
            key, _, text = setting.partition("=")
            is_text = key in _TEXTS or isinstance(value, list) or str(value)[:1] in "[{\"'"
            found[key] = (spell(one.name), text or (json.dumps(value) if is_text else value))
    return found


def join(given: Mapping[str, tuple[str, Any]], texts: Sequence[str] | None, option: str = "--set") -> list[Override]:
    """Return what flags and a repeatable option give, as overrides; ConfigError if both give one."""
    found: list[Override] = [(flag, f"{name}={value}") for name, (flag, value) in given.items()]
    for text in texts or ():
        name = text.partition("=")[0].strip()
        if name in given:
            raise ConfigError(
                f"{name} is given twice: {given[name][0]} and {option} {text}.",
                rule="a setting has one value on the command line.",
                remedy=f"leave out {option} {text}",
            )
        found.append(text if option == "--set" else (f"{option} {name}", text))
    return found


def with_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb in which each field of its last parameter, a record of flags, is a parameter for typer."""
    *own, last = inspect.signature(verb, eval_str=True).parameters.values()
    record, keyword = last.annotation, inspect.Parameter.KEYWORD_ONLY
    hints, known = get_type_hints(record, include_extras=True), {one.name: one for one in fields(record)}
    flags = []
    for name in (name for kind in record.__mro__ for name in vars(kind).get("__annotations__", {}) if name in known):
        hint, option = hints[name], known[name].metadata.get("option")
        hint = Annotated[hint, option(name)] if option else hint
        flags.append(inspect.Parameter(name, keyword, default=known[name].default, annotation=hint))

    def call(**given: Any) -> None:
        verb(**{one.name: given.pop(one.name) for one in own}, **{last.name: record(**given)})

    call.__name__, call.__doc__ = verb.__name__, verb.__doc__
    call.__annotations__ = {one.name: one.annotation for one in [*own, *flags]}
    vars(call)["__signature__"] = inspect.Signature([*own, *flags])
    return call
