"""Masks secrets: what looks like one among arguments, parameters and variables becomes ``***``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

#: What files and lines hold in place of a secret.
MASK = "***"
_SECRET_NAME = re.compile(
    r"(?i).*(?:token|secrets?|passwords?|passwd|passphrase|credentials?|(?:api|access|auth|private|account)[-_]?keys?)"
    r"|.+[-_]pwd"
)
#: Names with their values, ``--name value`` and ``name=value``, anywhere in a text.
_NAMED = re.compile(
    r"""((?:--(?P<flag>[\w.-]+)\s+|(?P<name>[A-Za-z_][\w.-]*)["']?\s*[=:]\s*))("[^"]*"|'[^']*'|[^\s"'&;]+)"""
)
#: What shows by itself that it is a secret: the password of a URL, a bearer, the tokens of well-known services.
_BY_ITSELF = re.compile(
    r"(://[^/\s:@]*:)([^/\s]+)(?=@)|(?:(?<=Bearer )|(?<=Basic ))[^\s\"']+"
    r"|\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abps]-|AKIA)[\w-]{16,}"
)
#: Facts of a run or job that are no arguments: they stay as they are, whatever secret has the same text.
NO_ARGUMENTS = frozenset({"id", "kind", "cwd", "group", "host", "user", "experiment", "fingerprint", "python"})
#: A shorter text is a secret in its own place alone: it may stand elsewhere by chance.
_LEAST_TEXT = 6


def mask(value: Any) -> Any:
    """Return a JSON value with ``***`` in place of all that looks like a secret.

    That is what follows a name such as ``HF_TOKEN``, ``--api-key`` or ``password``, what is a secret by its form, and
    the same text elsewhere in the value. A parameter ``{t}`` in such a place makes all values of ``t`` secrets.

    >>> mask(["train.py", "--token", "abc", "--api-key=abc", "--max-tokens=512", "https://me:abc@host/"])
    ['train.py', '--token', '***', '--api-key=***', '--max-tokens=512', 'https://me:***@host/']
    >>> mask({"DB_PASSWORD": "abc", "command": ["sh", "-c", "export HF_TOKEN='a b'; run --secret abc --lr 1"]})
    {'DB_PASSWORD': '***', 'command': ['sh', '-c', 'export HF_TOKEN=***; run --secret *** --lr 1']}
    >>> mask(["--param", "t=abc,def", "--", "./train", "--token={t}"])
    ['--param', 't=***', '--', './train', '--token=***']
    >>> mask({"command": ["./train", "--token=pre-abc"], "params": {"t": "abc", "lr": "0.1"}})
    {'command': ['./train', '--token=***'], 'params': {'t': '***', 'lr': '0.1'}}
    """
    masker = _Masker()
    shown = masker.mask(value)
    for _ in range(2 if masker.found else 0):  # by the parameters that the first pass found, then by all texts
        shown = masker.mask(value)
    return shown


class _Masker:
    """Masks a value; what it found before is masked wherever it stands."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._names: set[str] = set()
        self._known = re.compile("(?!)")

    def mask(self, value: Any) -> Any:
        self._names = {name for text in self.found for name in re.findall(r"\{(\w+)\}", text)}
        texts = sorted((text for text in self.found if len(text) >= _LEAST_TEXT), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        return self._mask(value)

    def _is_secret(self, name: str) -> bool:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
        return name in self._names or _SECRET_NAME.fullmatch(words) is not None

    def _hide(self, text: object) -> str:
        self.found.add(str(text).strip("'\""))
        return MASK

    def _mask_field(self, name: str, value: Any) -> Any:
        if self._is_secret(name) and isinstance(value, str | int):
            return self._hide(value)
        if self._is_secret(name) and isinstance(value, list | tuple) and all(isinstance(v, str | int) for v in value):
            return [self._hide(one) for one in value]
        if name in ("params", "unit") and isinstance(value, Mapping):  # a parameter that is a part of a secret argument
            parts = {key for key, one in value.items() if isinstance(one, str) and any(one in it for it in self.found)}
            value = {key: MASK if key in parts else one for key, one in value.items()}
        return self._mask(value)

    def _mask(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self._mask_field(name, one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            shown = [self._mask(one) for one in value]
            for at, (flag, one) in enumerate(pairwise(value), start=1):
                if isinstance(flag, str) and flag.startswith("-") and self._is_secret(flag.strip("-")):
                    shown[at] = self._hide(one)
            return type(value)(shown)
        if isinstance(value, str):
            named = _NAMED.sub(
                lambda it: it[1] + self._hide(it[4]) if self._is_secret(it["flag"] or it["name"]) else it[0], value
            )
            return self._known.sub(MASK, _BY_ITSELF.sub(lambda it: (it[1] or "") + self._hide(it[2] or it[0]), named))
        return value
