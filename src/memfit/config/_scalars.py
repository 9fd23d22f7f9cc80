"""The value of an unquoted text in YAML 1.2."""

import re

_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,400})|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?((\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)")


def read_plain(text: str) -> bool | int | float | str | None:
    """Return the value of an unquoted scalar in YAML 1.2, where ``on``, ``no`` and dates are text.

    Digits behind a leading zero are text too: ``0050`` is a code.

    >>> [read_plain(text) for text in ("1e-3", "0050", "0x10", "true", "no", "2024-01-31", "12:30", "~")]
    [0.001, '0050', 16, True, 'no', '2024-01-31', '12:30', None]
    """
    word = text.lower() if text in (text.lower(), text.upper(), text.capitalize()) else text
    if word in _WORDS:
        return _WORDS[word]
    if _INT.fullmatch(text):
        return int(text, 0)
    is_float = len(text) < 400 and _FLOAT.fullmatch(text)
    return float(re.sub(r"\.(?=[iInN])", "", text)) if is_float else text
