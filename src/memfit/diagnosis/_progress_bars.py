"""One line of progress as programs print it: whose form, which epoch and step, how fast, what loss.

Forms: tqdm and what is built on it (Lightning, Transformers, accelerate), Rich and Keras bars, fairseq, Megatron,
DeepSpeed, the ``[epoch][step/total]`` of the ImageNet example and its heirs, dictionaries of Transformers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from memfit.diagnosis._text import Line


@dataclass(frozen=True)
class Bar:
    """One state of a bar, or one line of progress.

    Attributes:
        form: Whose form it is, as ``tqdm``.
        phase: ``load``, ``build``, ``train``, ``validate``, ``checkpoint``; empty when nothing tells.
        epoch, num_epochs: As written, from 0 or from 1.
        step, total: Of the bar. ``is_global`` tells whether they count over all epochs.
        rate: Steps a second, as written.
        seconds: Since the bar began.
        loss: As written.
        name: What stands before the bar.
        line: Where it stands.
    """

    form: str
    phase: str = ""
    epoch: int | None = None
    num_epochs: int | None = None
    step: int | None = None
    total: int | None = None
    is_global: bool = False
    rate: float | None = None
    seconds: int | None = None
    loss: float | None = None
    name: str = ""
    line: Line | None = None

    @property
    def is_full(self) -> bool:
        """Whether it came to its end."""
        return self.total is not None and self.step == self.total and self.total > 0


#: So much of a line is looked at.
MOST_CHARS, _NAME_CHARS = 700, 100
#: What any line of progress, and any on a checkpoint or an end, has.
CHEAP = re.compile(r"\d[kMG ]?/ ?\d|poch|[Ll]oss|[Ss]tep|[Ii]ter|heckpoint|\.ckpt|omplete|inished|alidat|[Ss]av")
_CLOCK = r"(?:\d+ days?, )?[\d:]+"
_TQDM = re.compile(
    r"(?P<percent>\d{1,3})%(?:\|[^|]{0,300}\||\s)\s*(?P<step>[\d.]+[kMG]?)/(?P<total>[\d.]+[kMG]?)"
    rf"\s*\[(?P<seconds>{_CLOCK})<(?:{_CLOCK}|\?)(?:,\s*(?P<rate>[\d.]+|\?)\s*(?P<unit>[^/\s,\]]*/s|s/[^,\s\]]+))?"
    r"(?P<rest>[^\]]*)"
)
_RICH = re.compile(
    r"\s[━╸╺╴][━╸╺╴ ]{2,200}(?P<step>\d+)/(?P<total>\d+)\s+(?P<seconds>[\d:]+)\s+•\s+[\d:-]+\s+"
    r"(?P<rate>[\d.]+)(?P<unit>it/s)(?P<rest>.*)"
)
_FAIRSEQ = re.compile(
    r"epoch (?P<epoch>\d+)(?:[:|]| \| (?:(?P<valid>valid)\b[^|]{0,40}?|training[^:]{0,30}:))?\s+"
    r"(?P<step>\d+) / (?P<total>\d+)(?P<rest>.*)"
)
_MEGATRON = re.compile(r"iteration\s+(?P<step>\d+)/\s*(?P<total>\d+) \|(?P<rest>.*)")
_DEEPSPEED = re.compile(r"(?:\bsteps: (?P<step>\d+) loss: |\bstep=(?P<step2>\d+), skipped=)(?P<rest>.*)")
_BRACKETS = re.compile(
    r"(?P<name>\b(?:Epoch|Train|Test|Val\w*|Eval\w*)\b)\s*:?\s*(?:\[?(?P<epoch>\d+)(?:/(?P<epochs>\d+))?\]?)?:?\s*"
    r"\[\s*(?P<step>\d+)/\s*(?P<total>\d+)\s*(?:\(\s*\d+%\))?\](?P<rest>.*)"
)
_KERAS = re.compile(r"^\s*(?P<step>\d+)/(?P<total>\d+) (?:\[[=>.]+\]|[━╸ ]{4,}) ?(?P<rest>.*(?:step|ETA|loss).*)")
_KERAS_EPOCH = re.compile(r"^\s*Epoch (?P<epoch>\d+)/(?P<epochs>\d+)\s*$")
_DICTIONARY = re.compile(
    r"\{'(?P<key>(?:eval_|train_)?(?:loss|runtime))': (?P<rest>.*'epoch': '?(?P<epoch>[\d.]+)'?.*)\}"
)
_GENERIC = re.compile(
    r"\bepoch\b(?!=\d+-step)\W{0,3}(?P<epoch>\d+)(?:\s*(?:/|of)\s*(?P<epochs>\d+))?\W.{0,30}?\b(?:step|iter|iteration|batch)\b\W{0,3}"
    r"(?P<step>\d+)(?:\s*(?:/|of)\s*(?P<total>\d+))?(?P<rest>.*)",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"\b(?:global_?)?step\b\W{1,3}(?P<step>\d+)(?:\s*/\s*(?P<total>\d+))?\b(?P<rest>.*\bloss\b.*)", re.IGNORECASE
)
_WORDS = re.compile(r"\bepoch\b|step\b", re.IGNORECASE)
_LOSS = re.compile(
    r"(?<![A-Za-z])(?:train[/_ ])?(?:lm )?(?i:loss)(?:_step)?['\"]?\s*[:=]?\s*'?"
    r"(?P<loss>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
)
_EPOCH_NAME = re.compile(r"\bepoch\W{0,3}(?P<epoch>\d+)(?:\s*/\s*(?P<epochs>\d+))?", re.IGNORECASE)
_PHASES = tuple(
    (phase, re.compile(pattern, re.IGNORECASE))
    for phase, pattern in (
        ("build", r"loading (?:checkpoint shards|pipeline components|weights)|materializ"),
        ("load", r"^\W*(?:prepar|load|download|tokeniz|generat)"),
        ("checkpoint", r"\bsav(?:e|ing)\b|writing model"),
        ("validate", r"\b(?:sanity|val|valid\w*|eval\w*|test\w*|predict\w*|inference)\b"),
        ("train", r"\b(?:train\w*|epoch|iteration|steps?)\b"),
        ("load", r"\b(?:load\w*|download\w*|map|tokeniz\w*|filter|read\w*|prepar\w*|generating|cach\w*)\b"),
    )
)


def read_bar(line: Line) -> Bar | None:
    """The state of a bar that a line shows.

    >>> text = "Epoch 0: 100%|####| 242/242 [22:54<00:00,  0.21it/s, loss=5.19, v_num=0]"
    >>> bar = read_bar(Line("-", 1, text))
    >>> bar.epoch, bar.step, bar.total, bar.rate, bar.seconds, bar.loss, bar.phase
    (0, 242, 242, 0.21, 1374, 5.19, 'train')
    >>> bar = read_bar(Line("-", 1, "| epoch 001:    450 / 1891 loss=11.521, ups=0.5, num_updates=445"))
    >>> bar.form, bar.step, bar.rate
    ('fairseq', 450, 0.5)
    """
    text = line.text[:MOST_CHARS]
    if not CHEAP.search(text):
        return None
    for word, read in _READERS:
        bar = read(text) if word in text else None
        if bar is not None:
            return replace(bar, line=line)
    return None


def _tqdm(text: str) -> Bar | None:
    found = (_TQDM.search(text) if "%" in text else None) or (_RICH.search(text) if "•" in text else None)
    if not found:
        return None
    name, rest = text[: found.start()][-_NAME_CHARS:].strip(" :|-"), found["rest"]
    epoch, phase = _EPOCH_NAME.search(name), _phase(name)
    rate = None
    if found["rate"] and found["rate"] != "?":
        rate = _decimal(found["rate"]) if found["unit"].endswith("/s") else _inverse(found["rate"])
    loss = _loss(rest)
    return Bar(
        "tqdm",
        phase or ("train" if loss is not None else ""),
        int(epoch["epoch"]) if epoch else None,
        int(epoch["epochs"]) if epoch and epoch["epochs"] else None,
        _count(found["step"]),
        _count(found["total"]),
        is_global=not epoch and phase in ("", "train"),
        rate=rate,
        seconds=_clock(found["seconds"]),
        loss=loss,
        name=name,
    )


def _fairseq(text: str) -> Bar | None:
    found = _FAIRSEQ.search(text)
    if not found:
        return None
    rate = re.search(r"\bups=([\d.]+)", found["rest"])
    return Bar(
        "fairseq",
        "validate" if found["valid"] else "train",
        int(found["epoch"]),
        step=int(found["step"]),
        total=int(found["total"]),
        rate=_decimal(rate[1]) if rate else None,
        loss=_loss(found["rest"]),
    )


def _megatron(text: str) -> Bar | None:
    found = _MEGATRON.search(text)
    if not found:
        return None
    took = re.search(r"elapsed time per iteration \(ms\): ([\d.]+)", found["rest"])
    rate = _inverse(took[1], 1000) if took else None
    step, total = int(found["step"]), int(found["total"])
    return Bar("Megatron", "train", step=step, total=total, is_global=True, rate=rate, loss=_loss(found["rest"]))


def _deepspeed(text: str) -> Bar | None:
    found = _DEEPSPEED.search(text)
    if not found:
        return None
    took = re.search(r"iter time \(s\): ([\d.]+)", found["rest"])
    loss = re.match(r"[\d.]+", found["rest"]) if found["step"] else None
    return Bar(
        "DeepSpeed",
        "train",
        step=int(found["step"] or found["step2"]),
        is_global=True,
        rate=_inverse(took[1]) if took else None,
        loss=_decimal(loss[0]) if loss else None,
    )


def _brackets(text: str) -> Bar | None:
    found = _BRACKETS.search(text)
    if not found or (not found["epoch"] and found["name"] in ("Epoch", "Train")):
        return None
    rest = found["rest"]
    took = re.search(r"\btime:? +([\d.]+)", rest, re.IGNORECASE)
    phase = "train" if found["name"] in ("Epoch", "Train") else "validate"
    return Bar(
        "brackets",
        phase,
        int(found["epoch"]) if found["epoch"] else None,
        int(found["epochs"]) if found["epochs"] else None,
        int(found["step"]),
        int(found["total"]),
        rate=_inverse(took[1]) if took else None,
        loss=_loss(rest),
    )


def _dictionary(text: str) -> Bar | None:
    """What Transformers prints: {'loss': 1.23, 'learning_rate': 5e-05, 'epoch': 0.5}."""
    found = _DICTIONARY.search(text)
    if not found:
        return None
    key = found["key"]
    loss = re.match(r"'?(-?[\d.]+(?:e[-+]?\d+)?)", found["rest"]) if key == "loss" else None
    phase = "validate" if key.startswith("eval") else "train"
    return Bar("Transformers", phase, int(_decimal(found["epoch"]) or 0), loss=_decimal(loss[1]) if loss else None)


def _keras(text: str) -> Bar | None:
    if found := _KERAS_EPOCH.search(text):
        return Bar("Keras", "train", int(found["epoch"]), int(found["epochs"]))
    found = _KERAS.search(text)
    if not found:
        return None
    return Bar("Keras", "train", step=int(found["step"]), total=int(found["total"]), loss=_loss(found["rest"]))


def _generic(text: str) -> Bar | None:
    if not _WORDS.search(text):
        return None
    if found := _GENERIC.search(text):
        epochs = int(found["epochs"]) if found["epochs"] else None
        total = int(found["total"]) if found["total"] else None
        phase = "validate" if _phase(text[: found.start()]) == "validate" else "train"
        return Bar("line", phase, int(found["epoch"]), epochs, int(found["step"]), total, loss=_loss(found["rest"]))
    if found := _STEP.search(text):
        total = int(found["total"]) if found["total"] else None
        return Bar("line", "train", step=int(found["step"]), total=total, is_global=True, loss=_loss(found["rest"]))
    return None


#: Readers of lines in which a word stands, the most particular first.
_READERS = (
    ("[", _tqdm),
    ("•", _tqdm),
    ("epoch", _fairseq),
    ("iteration", _megatron),
    ("step", _deepspeed),
    ("[", _brackets),
    ("{'", _dictionary),
    ("/", _keras),
    ("", _generic),
)


def _phase(name: str) -> str:
    return next((phase for phase, pattern in _PHASES if pattern.search(name)), "")


def _loss(text: str) -> float | None:
    found = _LOSS.search(text)
    return float(found["loss"]) if found else None


def _decimal(text: str) -> float | None:
    """A number of a line that may be torn."""
    try:
        return float(text.rstrip("."))
    except ValueError:
        return None


def _inverse(text: str, of: float = 1.0) -> float | None:
    """Steps a second, of the time that one takes."""
    return of / number if (number := _decimal(text)) else None


def _count(text: str) -> int:
    factor = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1:], 1)
    number = text.rstrip("kMG")
    return round(float(number) * factor) if number.count(".") < 2 and number.strip(".") else 0


def _clock(text: str) -> int:
    days, _, rest = text.rpartition(" day")
    seconds = 0
    for part in rest.removeprefix("s").removeprefix(", ").split(":") if days else text.split(":"):
        seconds = seconds * 60 + int(part or 0)
    return seconds + 86400 * int(days or 0)
