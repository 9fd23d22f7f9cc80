"""Masks secrets: what looks like one in arguments, variables, causes, events and texts becomes ``***``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

#: What files and lines hold in place of a secret.
MASK = "***"
_SECRET_NAME = re.compile(
    r"(?i)(?!(?:.*[_.-])?(?:pad|eos|bos|unk|sep|cls|mask|image|per|next|last|first)[_-]token$)"  # of a tokenizer
    r".*(?:token|secrets?|passwords?|passwd|passphrase|credentials?|webhooks?(?:[-_]ur[li])?|(?:api|access|auth|private"
    r"|account|secret|encryption)[-_]?keys?)|.+[-_]pwd|.*(?:db|user|sql|smtp)[-_]pass|notify[-_]url"
)
#: Names with their values, ``--name value`` and ``name=value``, anywhere in a text.
_NAMED = re.compile(
    r"""((?:--(?P<flag>[\w.-]+)\s+|(?P<name>[A-Za-z_][\w.-]{0,99})["']?\s*[=:]\s*))("[^"]*"|'[^']*'|[^\s"'&;]+)"""
)
#: What shows by itself that it is a secret: its kind, the text before it that stays, and the secret.
#: `memfit doctor --secrets` looks for those with a kind; the others are known to detect-secrets, or are common in code.
FORMS = (
    ("Discord Webhook", r"discord(?:app)?\.com/api/(?:v\d+/)?webhooks/", r"[\w/-]+"),
    ("W&B Key", r"(?i:wandb|w&b|weights.{1,5}biases).{0,99}?\b", r"[0-9a-f]{40}\b"),
    ("W&B Token", "", r"\bwandb_v1_\w{16,}"),
    ("Signed URL", r"(?i:\bX-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)=)", r"[^\s&\"'<>\\]+"),
    ("Hugging Face Token", "", r"\bhf_[A-Za-z0-9]{20,}"),
    ("Google Key", "", r"\bAIza[\w-]{30,}"),
    ("", r"://[^/\s:@]*:", r"[^/\s]+(?=@)"),
    ("", r"hooks\.slack\.com/\w+/", r"[\w/-]+"),
    ("", r"\bBearer |\bAuthorization[\"']?[:=]\s*[\"']?Basic ", r"[^\s\"'<>\\]+"),
    ("", "", r"\b(?:sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-)[\w-]{16,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
)
_BY_ITSELF = re.compile("|".join(f"({kept})({secret})" for _, kept, secret in FORMS))
#: The secret half of a pair of Amazon's. It is known beside the other half alone.
_AWS_PAIR = r"(?<![\w/+])[\w/+]{40}(?![\w/+=])"
#: What a text in small letters has if it has a secret by name or form. No group, for speed.
_HINT = re.compile(
    r"token\b|secrets?\b|pass\b|passwords?\b|passwd\b|passphrase\b|credentials?\b|pwd\b|keys?\b|webhooks?\b|ur[li]\b|://"
    r"|bearer |basic |\.slack|x-amz-|x-goog-|wandb|w&b|biases|hf_|aiza|sk-|gh[pousr]_|github_|glpat-|xox|akia|asia"
)
#: Facts of a run or job that are no arguments: they stay as they are, whatever secret has the same text.
_NO_ARGUMENTS = frozenset({"id", "kind", "cwd", "group", "host", "user", "experiment", "fingerprint", "python"})
#: A shorter text is a secret in its own place alone: it may stand elsewhere by chance.
_LEAST_TEXT = 6
#: Finders of detect-secrets that guess by randomness or by form; in code and data they are wrong nearly always.
_GUESSES = ("Base64HighEntropyString", "HexHighEntropyString", "IPPublicDetector")


@lru_cache(maxsize=1)
def _own_values(num_variables: int) -> frozenset[str]:
    """Return the values of variables with a secret's name, as JSON has them too; read anew when the number changes."""
    named = {name: value for name, value in os.environ.items() if _SECRET_NAME.fullmatch(name)}
    lines = [line.strip() for value in named.values() for line in value.splitlines()]
    texts = [one for one in lines if len(one) >= _LEAST_TEXT and not os.path.exists(one)]  # noqa: PTH110 - for any length
    return frozenset([*texts, *(json.dumps(text)[1:-1] for text in texts)])


def mask_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object of a run without secrets. Its numbers, and facts that programs read, stay as they are."""
    kept = {name: one for name, one in record.items() if name in _NO_ARGUMENTS or isinstance(one, int)}
    return {**mask(record), **kept}


def mask_line(line: str) -> str:
    """Return the JSON object of a line without secrets, as `mask_record` does; 5 microseconds if it has none."""
    if not _HINT.search(line.lower()) and not any(one in line for one in _own_values(len(os.environ))):
        return line
    return json.dumps(mask_record(json.loads(line)), separators=(",", ":"))


def load_finders() -> list[Any]:
    """Return detect-secrets' classes that find secrets, in 0.15 s; none where it is not installed."""
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class as load
    except ModuleNotFoundError:
        return []
    finders: Any = load().values()
    return [one for one in finders if one.__name__ not in _GUESSES]


def redact(text: str) -> str:
    """Return a text without what `mask` and detect-secrets find."""
    text = mask(text)
    found: list[str] = [one for finder in load_finders() for one in finder().analyze_string(text)]
    for one in (one for one in found if len(one) >= _LEAST_TEXT):
        text = text.replace(one, MASK)
    return text


def mask(value: Any, *, by_name: bool = True) -> Any:
    """Return a JSON value with ``***`` in place of all that looks like a secret.

    That is what follows a name such as ``HF_TOKEN``, ``--api-key`` or ``password``, what is a secret by its form, and
    the same text elsewhere in the value. So is the value of a variable of this process with such a name. A parameter
    ``{t}`` in such a place makes all values of ``t`` secrets. Without ``by_name`` JSON and HTML stay whole.

    >>> mask(["train.py", "--token", "abc", "--api-key=abc", "--max-tokens=512", "https://me:abc@host/"])
    ['train.py', '--token', '***', '--api-key=***', '--max-tokens=512', 'https://me:***@host/']
    >>> mask({"DB_PASSWORD": "abc", "command": ["sh", "-c", "export HF_TOKEN='a b'; run --secret abc --lr 1"]})
    {'DB_PASSWORD': '***', 'command': ['sh', '-c', 'export HF_TOKEN=***; run --secret *** --lr 1']}
    >>> mask(["--param", "t=abc,def", "--", "./train", "--token={t}"])
    ['--param', 't=***', '--', './train', '--token=***']
    >>> mask({"command": ["./train", "--token=pre-abc"], "params": {"t": "abc", "lr": "0.1"}})
    {'command': ['./train', '--token=***'], 'params': {'t': '***', 'lr': '0.1'}}
    """
    masker = _Masker(by_name=by_name)
    shown = masker.mask(value)
    for _ in range(2 if masker.found else 0):  # by the parameters that the first pass found, then by all texts
        shown = masker.mask(value)
    return shown


class _Masker:
    """Masks a value; what it found before is masked wherever it stands."""

    def __init__(self, *, by_name: bool) -> None:
        self.found, self._by_name = set[str](), by_name
        self._names: set[str] = set()
        self._known = re.compile("(?!)")

    def mask(self, value: Any) -> Any:
        self._names = {name for text in self.found for name in re.findall(r"\{(\w+)\}", text)}
        texts = {text for text in self.found if len(text) >= _LEAST_TEXT} | _own_values(len(os.environ))
        forms = [re.escape(text) for text in sorted(texts, key=len, reverse=True)]
        is_pair = any(text.startswith(("AKIA", "ASIA")) for text in self.found)
        self._known = re.compile("|".join(forms + [_AWS_PAIR] * is_pair) or "(?!)")
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
            if self._by_name:
                value = _NAMED.sub(
                    lambda it: it[1] + self._hide(it[4]) if self._is_secret(it["flag"] or it["name"]) else it[0], value
                )
            by_form = _BY_ITSELF.sub(lambda it: it[(it.lastindex or 2) - 1] + self._hide(it[it.lastindex or 2]), value)
            return self._known.sub(MASK, by_form)
        return value
