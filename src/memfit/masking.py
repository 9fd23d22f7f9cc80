"""Make the texts of others safe to show: what looks like a secret becomes ``***``, and a terminal has no orders."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

#: What a terminal obeys: sequences that begin with ESC, also without their end; other signs that are no text, and those
#: that turn the direction of writing. Lines and tabs stay.
_CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
MASK = "***"  # what files and lines hold in place of a secret
_SECRET_NAME = re.compile(
    r"(?i)(?!(?:.*[_.-])?(?:pad|eos|bos|unk|sep|cls|mask|image|per|next|last|first)[_-]token$)"  # of a tokenizer
    r".*(?:token|secrets?|passwords?|passwd|passphrase|credentials?|cookies?|jwt|connection[-_]?string|authorization"
    r"|webhooks?(?:[-_]ur[li])?|(?:api|access|auth|private|account|secret|encryption|storage|signing|master|license"
    r"|deploy|client|ssh|sas)[-_]?keys?)|.+[-_]pwd|.*(?:db|user|sql|smtp|admin|root)[-_]pass|notify[-_]url"
)
#: What is a secret's name as a flag alone: ``--key X``, and not ``key=5``.
_SECRET_FLAG = re.compile(
    r"(?i)key|pass|pwd|pw|auth"
    r"|(?!.*(?:text|image|audio|video|label|input|output|prompt|response|answer|question|chosen|rejected|target|sort|index"
    r"|cache|primary|partition|group|dict|data|dataset|field|column|metric|monitor|score|batch|query|feature|id|state"
    r"|sample|model|config|public|message|messages|name|time|date)[_-]key$).+[_-]key"
)
_NAME = r"[A-Za-z_][\w.-]{0,99}"
#: A name before its value, anywhere in a text: ``--name value``, ``name=value``, ``name: value``.
_NAMED = re.compile(
    rf"""(?<![\w-])--(?P<flag>{_NAME})\s+(?!--)"""
    rf"""|(?P<dash>-{{0,2}})(?P<name>{_NAME})\\*["']?\s*(?:=|(?P<colon>:(?!//)))\s*"""
)
#: The value: one word as a shell reads it, also with a quote that nothing closes; behind a colon as JSON has it.
_REST = r"""(?:\\.|"(?=\w)[^"]*"|'(?=\w)[^']*'|["'](?=\w)|[^\s"'&;\\])+"""
_VALUE = re.compile(rf"""(?:"[^"]*"|'[^']*')(?:(?=[\w"'\\]){_REST})?|["']?{_REST}""")
_OF_COLON = re.compile(r""""(?:\\.|[^"\\])*"|'[^']*'|\\*["']?[^\s"'&;]+""")
#: The same at the beginning of one word of a command, whose value is the rest of the word.
_OF_WORD = re.compile(rf"(-{{0,2}})({_NAME})\s*(?:=|:(?!//))\s*")
_CODE_FLAG = re.compile("-[a-z]{0,3}c")  # what a text of several words stands behind, as in ``sh -c``
#: What shows by itself that it is a secret: the text before it that stays, and the secret.
_FORMS = (
    (r"discord(?:app)?\.com/api/(?:v\d+/)?webhooks/", r"[\w/-]+"),
    (r"(?i:wandb|w&b|weights.{1,5}biases).{0,99}?\b", r"[0-9a-f]{40}\b"),
    ("", r"\bwandb_v1_\w{16,}"),
    (r"(?i:\bX-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)=)", r"[^\s&\"'<>\\]+"),
    ("", r"\bhf_[A-Za-z0-9]{20,}"),
    ("", r"\bAIza[\w-]{30,}"),
    (r"[?&]sig(?:nature)?=|\bsig=(?=[\w%+/=-]{20})", r"[^\s&\"'<>\\]+"),  # of Azure
    (r"://[^/\s:@]*:", r"[^/\s]+(?=@)"),
    (r"hooks\.slack\.com/\w+/", r"[\w/-]+"),
    (r"(?i:\bAuthorization[\\\"']*\s*[:=][\s\\\"']*(?:(?:Bearer|Basic|Token|Bot|ApiKey) )?)", r"[^\s\"'<>\\]+"),
    (r"\bBearer ", r"[^\s\"'<>\\]+"),
    (r"\b(?:Set-)?Cookie: ?|-----BEGIN [A-Z ]*PRIVATE KEY-----", r"[^\"'<>-][^\"'<>]*?(?=[\"'<>]|-----|$)"),
    ("", r"\beyJ[\w-]{16,}(?:\.[\w-]*)*"),  # JSON in Base64: a JWT, a token of Neptune
    ("", r"(?:\bbot|\b)\d{6,12}:A(?=[A-Za-z_-]*\d)[\w-]{30,}"),  # Telegram
    ("", r"\b(?:sk-|[rs]k_(?:live|test)_|whsec_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-)[\w-]{16,}"),
    ("", r"\b(?:pypi-Ag|npm_|SG\.)[\w-]{16,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
)
_BY_ITSELF = re.compile("|".join(f"({kept})({secret})" for kept, secret in _FORMS))
#: The secret half of a pair of Amazon's. It is known beside the other half alone.
_AWS_PAIR = r"(?<![\w/+])[\w/+]{40}(?![\w/+=])"
#: What a text in small letters has if it has a secret by name or form. Each begins with a letter or sign, for speed.
_HINT = re.compile(
    r"token\b|secrets?\b|pass\b|passwords?\b|passwd\b|passphrase\b|credentials?\b|pwd\b|keys?\b|webhooks?\b|ur[li]\b|://"
    r"|bearer |authoriz|cookies?\b|jwt\b|string\b|sig(?:nature)?=|\.slack|x-amz-|x-goog-|wandb|w&b|biases|hf_|aiza"
    r"|sk-|sk_|rk_|whsec_|gh[pousr]_|github_|glpat-|xox|akia|asia|pypi-|npm_|sg\.|eyj|:a[\w-]{30}|auth\b|pw\b|-----begin"
)
#: Facts of a run or job that are no arguments: they stay as they are, whatever secret has the same text.
_NO_ARGUMENTS = frozenset({"id", "kind", "cwd", "group", "host", "user", "experiment", "fingerprint", "python"})
_LEAST_TEXT = 6  # a shorter text is a secret in its own place alone: it may stand elsewhere by chance


@lru_cache(maxsize=1024)
def _is_secret_name(name: str, is_flag: bool) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return bool(_SECRET_NAME.fullmatch(words) or (is_flag and _SECRET_FLAG.fullmatch(words)))


@lru_cache(maxsize=1)
def _own_texts(num_variables: int, arguments: tuple[str, ...]) -> frozenset[str]:
    """Return the secrets among this process's arguments and variables, as JSON has them too, for their number."""
    masker = _Masker(own=frozenset())
    for _ in range(2):  # values of parameters are found by their placeholders
        masker.mask(arguments)
    named = [value for name, value in os.environ.items() if _SECRET_NAME.fullmatch(name)]
    named += [text for text in masker.found if not text.isalpha()]  # a word alone stands in paths and messages too
    lines = [line.strip() for value in named for line in value.splitlines()]
    texts = [one for one in lines if len(one) >= _LEAST_TEXT and not os.path.exists(one)]  # noqa: PTH110 - for any length
    return frozenset([*texts, *(json.dumps(text)[1:-1] for text in texts)])


def mask_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object of a run without secrets. Its numbers, and facts that programs read, stay as they are."""
    kept = {name: one for name, one in record.items() if name in _NO_ARGUMENTS or isinstance(one, int)}
    return {**mask(record), **kept}


def mask_line(line: str) -> str:
    """Return the JSON object of a line without secrets, as `mask_record` does; 5 microseconds if it has none."""
    if not _HINT.search(line.lower()) and not any(one in line for one in _own_texts(len(os.environ), tuple(sys.argv))):
        return line
    return json.dumps(mask_record(json.loads(line)), separators=(",", ":"))


def strip_controls(text: str) -> str:
    """Return a text without what a terminal obeys.

    >>> strip_controls("\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07\\x1b[2Jno\\r\\n\\x1b]8;;no end")
    'red no\\n8;;no end'
    """
    return _CONTROLS.sub("", text)


def mask(value: Any, *, by_name: bool = True) -> Any:
    """Return a JSON value with ``***`` in place of all that looks like a secret.

    That is what follows a name such as ``HF_TOKEN``, ``--api-key`` or ``password``, what is a secret by its form, and
    the same text elsewhere in the value. So are this process's variables with such a name, and secrets among its own
    arguments. In a list each text is one word of a command: what follows a name in it ends with the word. A parameter
    ``{t}`` in such a place makes all values of ``t`` secrets. Without ``by_name`` JSON and HTML stay whole.

    >>> mask(["train.py", "--token", "abc", "--api-key=abc", "--max-tokens=512", "https://me:abc@host/"])
    ['train.py', '--token', '***', '--api-key=***', '--max-tokens=512', 'https://me:***@host/']
    >>> mask(["--param", "t=abc,def", "--", "./train", "--token={t}"])
    ['--param', 't=***', '--', './train', '--token=***']
    """
    masker = _Masker(by_name=by_name, own=_own_texts(len(os.environ), tuple(sys.argv)))
    shown = masker.mask(value)
    for _ in range(2 if masker.found else 0):  # by the parameters that the first pass found, then by all texts
        shown = masker.mask(value)
    return shown


class _Masker:
    """Masks a value; what it found before is masked wherever it stands."""

    def __init__(self, *, own: frozenset[str], by_name: bool = True) -> None:
        self.found, self._by_name, self._own = set[str](), by_name, own
        self._names: set[str] = set()
        self._known = re.compile("(?!)")

    def mask(self, value: Any) -> Any:
        self._names = {name for text in self.found for name in re.findall(r"\{(\w+)\}", text)}
        texts = {text for text in self.found if len(text) >= _LEAST_TEXT} | self._own
        ordered = sorted(texts, key=len, reverse=True)
        forms = [rf"\b{text}\b" if text.isalpha() else re.escape(text) for text in ordered]
        is_pair = any(text.startswith(("AKIA", "ASIA")) for text in self.found)
        self._known = re.compile("|".join(forms + [_AWS_PAIR] * is_pair) or "(?!)")
        return self._mask(value)

    def _is_secret(self, name: str, *, is_flag: object = False) -> bool:
        return name in self._names or _is_secret_name(name, bool(is_flag))

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
            return type(value)(map(self._mask_item, ("", *value), value))
        if isinstance(value, str):
            return self._mask_word(value) if value[:1] == "-" else self._mask_text(value)
        return value

    def _mask_item(self, before: Any, one: Any) -> Any:
        """Mask an item of a list, which may be a word of a command."""
        before = before if isinstance(before, str) else ""
        if before[:1] == "-" and self._is_secret(before.strip("-"), is_flag=True) and not str(one).startswith("--"):
            return self._hide(one)
        return self._mask_word(one) if isinstance(one, str) and not _CODE_FLAG.fullmatch(before) else self._mask(one)

    def _mask_word(self, word: str) -> str:
        at = 0
        while self._by_name and (found := _OF_WORD.match(word, at)) and (at := found.end()) < len(word):
            if self._is_secret(found[2], is_flag=found[1]):
                return word[:at] + self._hide(word[at:])
        return self._mask_text(word)

    def _mask_named(self, text: str) -> str:
        shown, done, at = "", 0, 0
        while found := _NAMED.search(text, at):
            at, name = found.end(), found["flag"] or found["name"]
            is_formed = name.lower().endswith(("authorization", "cookie"))  # whose forms know where their values end
            if not is_formed and self._is_secret(name, is_flag=found["flag"] or found["dash"]):
                end = _end_of_value(text, found)
                if end > at:
                    shown, done, at = shown + text[done:at] + self._hide(text[at:end]), end, end
        return shown + text[done:]

    def _mask_text(self, text: str) -> str:
        text = self._known.sub(MASK, text)  # first: a name's value may end later than is seen here
        if not self._names and not _HINT.search(text.lower()):
            return text
        text = self._mask_named(text) if self._by_name else text
        return _BY_ITSELF.sub(lambda it: it[(it.lastindex or 2) - 1] + self._hide(it[it.lastindex or 2]), text)


def _end_of_value(text: str, name: re.Match[str]) -> int:
    """Return where the value behind a name ends: with the quotes that both stand in, or else with its own word."""
    at, quote = name.end(), text[max(0, name.start() - 1) : name.start()]
    if quote in ("'", '"') and quote not in name[0] and (end := text.find(quote, at)) >= 0:
        rest = _VALUE.match(text, end + 1) if text[end + 1 : end + 2] in ("'", '"', "\\") else None
        return rest.end() if rest else end
    value = (_OF_COLON if name["colon"] else _VALUE).match(text, at)
    return value.end() if value else at
