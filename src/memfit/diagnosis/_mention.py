"""Tell lines in which a program says what happened to it from texts that only speak of such a thing.

A document, a code listing, a chat, a rule of an alert or a help text has the words of a death, and nothing dies there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from memfit.diagnosis._phase import is_source
from memfit.diagnosis._signatures import ENDED, MARK, MEMORY
from memfit.diagnosis._signs import Sign
from memfit.diagnosis._text import Stream

#: Text before a sign that makes its line speak of it: advice, options, source, an address, bold words of a document.
_ADVICE = re.compile(r"\b(?:if|may|might)\b|^\s*(?:\* |--\w|raise\b|(?:#{1,6}|[-*\u2022]) $)|\*$", re.IGNORECASE)
#: A word before a sign after which it is a thing that is spoken of.
_TOPIC = re.compile(
    r"\b(?:(?:fix|updat|report|debug|solv|resolv|stop|includ|handl|catch|avoid|prevent|encounter|investigat"
    r"|see|gett|mean|lik)\w*|get|got|(?:often|can|will) (?:results? in|leads? to|causes?)|after|on"
    r"|of|about|the|(?<!throwing )an?|your|my|any|this|these|such|said|how|why|what|when|again)[\s:\"'`(]*$",
    re.IGNORECASE,
)
#: Source code, queries, rules and addresses before a sign in its line.
_CODE = re.compile(
    r"\braise \w+\(|^\w+\([\"'][^)\"']*$|\blike [\"'/(]|^\S+\.(?:md|rst|txt):\d+:"
    r"|\b(?:message|says?|shows?|the|an?|or|and|as),? [\"\u201c'][^\"\u201d']*$|^[\w.-]+,[A-Z][a-z]+,$"
    r"|^\s*(?:except|if|return) |\s# [A-Za-z].*$|(?:GET|POST) /\S*$|^\+\s|^##+ [^:]*\w $"
    r"|\{[^{}]*\w ?=~? ?\"[^\"]*$|^[^\"]*\"[^\":]*\"[^\":]*\"$"
)
#: Lines of source: comments, statements, calls, literals of a list.
_STATEMENT = re.compile(
    r"^\s*(?://|/\*|\*/?(?: |$))"
    r"|^(?!\s*(?:\|\"[^\"]*\":)).*\S.*[;{\\]\s*$|[\"'] (?:not )?in \w"
    r"|^\s*(?:def|func|class|if|elif|for|while|with|try|except|else|case|catch)\b.*[:{(,]\s*(?:#.*)?$"
    r"|^\s*(?:return|raise|assert|import|let)\b"
    r"|^\s*[\w.\[\]*]+(?:[,:] \w+)* :?\+?= .*(?:[(\"'{\[]|[A-Za-z]\w*\.[A-Za-z])|^\s*[\w.>-]+\(.*(?:\)[;,.]?|[\",(])\s*(?:#.*)?$"
    r"|^\s+(?:\w+: .*,|\{?(?!\"[^\"]*\":)[\"'(].*[\"')]\}?,?)\s*(?:[#/].*)?$"
)
#: A clause of Chinese, Japanese or Korean that leads up to a message, without a colon.
_WIDE = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]{2}[^:\uff1a]*(?:(?:Error|Exception): )?$")
_MAYBE = re.compile(r"\b(?:if|may|might)\b.*\bmemory", re.IGNORECASE)
_EXPLAINS = re.compile(
    r"(?<![Tt]his)(?<!which)(?<!\b[Ii]t) (?:means|happens|occurs) (?:that|when|if|because"
    r"|the|you|there)\b| is (?:\S+'s|the|one of|an?) [\w -]{0,30}\b(?:error|message)\b"
    r"|Tried to allocate (?!\d|more)\S|^(?:\w+ )?[Oo]ut.of.[Mm]emory (?:\(OOM\) )?(?:messages?|issues?|problems?"
    r"|errors|kill\w+|handling|error (?:from|in)|(?:and|or) (?!\w+ed\b|dimension))|^[\w: ]+\" [^\":=]*\"[\w:]+\""
)
#: Lines that a document, a listing or a chat has and a log has not.
_DOCUMENT = re.compile(
    r"^\s*(?:#{1,6} [A-Z]\w*[a-z ](?!.*[.:]\s*$)|(?:\|[-: ]+|-{3})[-: ]*\|[-:| ]+$|[-*] (?:\*\*|#)|diff --git "
    r"|</?[a-zA-Z]\w*[^>]*>(?!:)|(?:Author|Subject|[QA]|usage): |TODO\b|Release notes|\u2022 \S"
    r"|[-*] (?!This IS)[A-Z][a-z]+:?(?: [\w\u2019'/-]+){3}|(?:What|Why|How|When)\b[^.!]{0,60}$"
    r"|\"(?:signature|category|domain)\": |(?:Asked|Viewed) \d"
    r"|(?:NAME|Synopsis|Introduction|Symptoms?|Overview|Troubleshooting)\b[^=]{0,40}$"
    r"|- (?:alert|name): |(?:annotations|summary|severity|for): ?"
    r"|def \w+\(|class \w+[(:;]|try:\s*$|except\b.*:\s*$|import \w+\s*$|from \w[\w.]* import )"
    r"|::\s*$|^\{\"id\": ?\d+, ?\"text\"|^(?:\[?\d\d?:\d\d(?::\d\d)?\]? )?"
    r"<?(?!\w*(?:Error|Exception|Warning))\w{2,12}>?: .*\b(?:thanks|you|my|what|try|again|i)\b"
)
#: A sentence to a reader.
_SENTENCE = re.compile(r"^\W{0,4}[A-Z][^|=<>{}\\]*\b(?:your?|we|should|means?|because)\b[^|=<>{}\\]*[.?!:]\s*$")
#: Lines that a running program, a scheduler or a kernel prints, and a document seldom has.
_LOG = re.compile(
    r"Traceback \(most recent|^\s+File \"|\b(?:INFO|WARN(?:ING)?|ERROR|DEBUG)\b|\d%\||it/s"
    r"|(?i:\b(?:epoch|step|iter|loss)\b)\W{0,3}\d"
    r"|^srun: |^slurmstepd|kernel: |: line \d+: +\d+ |^\S*\d\d:\d\d:\d\d"
)
_ERROR = re.compile(r"^\s*(?:\w+\.)*\w*(?:Error|Exception): ")
#: What leads up to a thing that is spoken of, with the words for it.
_ADJECTIVE = re.compile(r"\b(?:the|an?|your|this) (?:[a-z]+ ){1,2}$")
_ADVISES = re.compile(r"(?:Reduc|Us|Increas|Ensur)e [a-z]|(?:Try|Run|Consider|Check|Lower|Set|Add) [a-z]+ [a-z]")
#: What a document of ours is about; who writes of himself reports a death.
_ABOUT = re.compile(r"^(?!.*\b(?:I|[Mm]y)\b)(?i:.*\b(?:error|message|memory|oom|kill|crash|exception|pod|limit))")
_TO_READER = re.compile(r"\b(?:[Yy]ou(?:'ve|r)?|e\.g)\b")
#: A title, if it stands between empty lines; and a clause that no log begins with.
_TITLE = re.compile(r"[A-Z]\w*(?:[ :-]+[A-Za-z()']+){1,7}[?:]?$")
_CLAUSE = re.compile(r"[A-Z][^:\d\[\]/=_|<>]{40,}$")
_RULE = re.compile(r"([=~^-])\1{3,}\s*$")  # below a title
_POINT = re.compile(r"\s*(?:[-*\u2022]|\d[.)]) [A-Z]")
_NEAR, _FEW = 14, 6
#: Small words of English. Where one word in three is one of them, a line is a sentence and no log.
_SMALL = (
    " a an the of to in is are was were it its this that these those you your we i my and or for with when if because "
    "how what why where which who as at by most every any our be can may do not but from on has have following "
    "during then all each will should must about into after before more than there their they que o os um uma com "
    "para em de la le les des un une est et ou el los es y con der die das ist und wenn ein eine den mit nicht "
)
_WORD = re.compile(r"[A-Za-z][A-Za-z']*")
#: What stands before an event: nothing, or who says it.
_SPEAKER = re.compile(
    r"^\W*$|(?:Error|Exception|Warning|Failure|ERROR|WARN(?:ING)?|FATAL|CRITICAL|error|warning|kernel|slurmstepd\S*|srun"
    r"|systemd\S*|NCCL)\b[^a-z]{0,12}$|^[\w.]+: $|\.\w{1,3}:\d+[^a-z]{0,12}$"
)


def events(streams: Sequence[Stream], signs: Sequence[Sign]) -> list[Sign]:
    """Return the signs that are events, not mentions."""
    ends = {sign.stream: sign.place for sign in signs if sign.name == "success"}
    found, spoken = [], set()
    for sign in signs:
        is_mark = sign.meaning.tier == MARK and sign.kind == "none"
        if not is_mark and _is_mention(streams[sign.stream], sign):
            spoken |= {(sign.stream, sign.place)} if not sign.meaning.last_resort else set()
        elif is_mark or not (_is_weak(sign) and ends.get(sign.stream, -1) > sign.place):
            found.append(sign)
    return [one for one in found if not (one.meaning.last_resort and (one.stream, one.place) in spoken)]


def _is_mention(stream: Stream, sign: Sign) -> bool:
    """Whether a line only speaks of it, as a source line, advice or a document does."""
    if "linked" in sign.values or sign.name == "own_exception":
        return False
    if len(sign.lines) == 1 and is_source(stream, sign.place):
        return True
    text = sign.lines[0].text[len(sign.before) :] if sign.lines else ""
    before = sign.before.removeprefix("`") if text.rstrip().endswith("`") else sign.before
    has_figures = any(name.endswith("_bytes") for name in sign.values)
    is_spoken = _is_within_a_sentence(sign) or _CODE.search(before) or _EXPLAINS.search(text)
    if is_spoken or _is_source(stream, sign) or _is_document(stream, sign.place, has_figures):
        return True
    if has_figures:
        return False
    numbers = [line.number for line in sign.lines]
    is_apart = numbers[1:] and (numbers[-1] - numbers[0] >= len(numbers) or any(_is_prose(x.text) for x in sign.lines))
    is_wide = sign.meaning.tier == MEMORY and _WIDE.search(before)
    if is_wide or (sign.emitter == "other" and (_MAYBE.search(text) or is_apart)):
        return True
    if sign.name == "memory_words" and not (_SPEAKER.search(before[-200:]) or before.rstrip().endswith(":")):
        return True
    if sign.meaning.tier == MEMORY and sign.name != "memory_words" and _TOPIC.search(before):
        return True
    return bool(re.sub("`[^`']*'", "", before).count("`") % 2 or _ADVICE.search(before, max(0, len(before) - 100)))


def _is_source(stream: Stream, sign: Sign) -> bool:
    """Whether its line is one of a program's source, as most lines around it are."""
    near = range(max(0, sign.place - _FEW), min(sign.place + _FEW + 1, len(stream.lines)))
    texts = [stream.lines[at].text for at in near if at != sign.place and not is_source(stream, at)]
    texts = [text for text in texts if text.strip("{}[]() ,`")]
    others, own = sum(bool(_STATEMENT.search(text)) for text in texts), stream.lines[sign.place].text
    is_said = _ERROR.match(own) or _LOG.search(own) or len(texts) < 5
    return 2 * others >= len(texts) if _STATEMENT.search(own) else not is_said and 4 * others >= 3 * len(texts)


def is_quoted(streams: Sequence[Stream], sign: Sign) -> bool:
    """Whether a person's words stand around it, and no line of a log."""
    lines = streams[sign.stream].lines[max(0, sign.place - _NEAR) : sign.place + _NEAR]
    near = [line.text for line in lines if line not in sign.lines]
    is_told = any(_is_prose(text) or _TO_READER.search(text) for text in [sign.before, *near])
    return is_told and not any(map(_LOG.search, near))


def _is_within_a_sentence(sign: Sign) -> bool:
    """Whether a person's words lead up to it in its line."""
    if sign.meaning.tier != MEMORY:
        return False
    is_told = sign.meaning.told and not sign.before.rstrip().endswith((":", "'", "("))
    if (is_told and _ADJECTIVE.search(sign.before)) or _CLAUSE.match(sign.before):
        return True
    return _is_prose(sign.before) and (is_told or bool(_TO_READER.search(sign.before)))


def _is_document(stream: Stream, place: int, has_figures: bool) -> bool:
    """Whether more lines around one are those of a document, a listing or a chat than of a log."""
    places = range(max(0, place - _NEAR), min(place + _NEAR, len(stream.lines)))
    near = [at for at in places if not is_source(stream, at)]
    above = [stream.lines[at].text for at in near if at < place]
    own, *below = (stream.lines[at].text for at in near if at >= place)
    is_logged = any(map(_LOG.search, above)) or own.startswith(("slurmstepd", "srun: "))
    said = sum(_is_prose(text) and bool(_ABOUT.search(text)) for text in above)
    if not is_logged:
        said += sum(bool(_ADVISES.match(text)) for text in (*above, own, *below))
    if has_figures or is_logged:  # points below it may be the program's own advice
        below = [text for text in below if not _POINT.match(text)]
    lines = [*above, own, *below]
    said += any(text.lstrip().startswith("```") for text in lines)  # a report has them too
    alone = zip(["", *lines], lines, [*lines[1:], ""], strict=False)
    said += sum(bool(_TITLE.match(text)) and not (one + other).strip() for one, text, other in alone)
    said += sum(bool(_DOCUMENT.search(text) or (_SENTENCE.search(text) and _ABOUT.search(text))) for text in lines)
    said += sum(bool(_RULE.match(below)) and abs(len(text) - len(below)) <= 3 for text, below in pairwise(lines))
    return said >= 2 and 2 * said > sum(bool(_LOG.search(text) or _ERROR.match(text)) for text in lines)


def _is_prose(text: str) -> bool:
    """Whether a text is a part of a sentence that a person wrote, and no mark of a document beside."""
    words = _WORD.findall(text.replace("\u2019", "'"))
    if len(words) < 6 or any(one.search(text) for one in (_LOG, _ERROR, _SENTENCE, _DOCUMENT)):
        return False
    return 3 * sum(f" {word.lower()} " in _SMALL for word in words) >= len(words)


def _is_weak(sign: Sign) -> bool:
    """Whether no program, scheduler or kernel says it: then a good end makes it a mention."""
    if "linked" in sign.values or "attempt" in sign.values or any(name.endswith("_bytes") for name in sign.values):
        return False
    return sign.meaning.tier == ENDED or not _SPEAKER.search(sign.before[-200:])
