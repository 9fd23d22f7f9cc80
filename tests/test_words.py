"""One word for one thing: what people read uses the words of the glossary, and none of those that it replaced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memfit.pipeline import RunConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
#: What the log, the decisions and the list of requirements quote stays as it was said.
QUOTING = ("log.md", "requirements.md", "decisions")

#: A pattern, and what to write.
REPLACED = {
    r"\bits like\b": "a job of the same stage",
    r"\b(?:never|be|is|was) lent\b": "reserved, or kept free",
    r"\bstep(?:s|ped)? aside\b": "gives way, gave way",
    r"\bat (?:its|the) wall\b": "at its limit",
    r"\bheap\b": "allocator, or memory",
    r"\bL2 regulari[sz]ation\b": "decoupled weight decay, where AdamW is meant",
    r"\btwin\b": "an earlier run of the same job",
}


@pytest.mark.proves("C-60")
@pytest.mark.parametrize(
    "path", [page for page in PAGES if not {page.name, page.parent.name} & set(QUOTING)], ids=lambda path: path.name
)
def test_a_page_uses_the_words_of_the_glossary(path: Path) -> None:
    found = [f"{match[0]!r}: write {better}" for words, better in REPLACED.items() for match in matches(words, path)]
    assert not found


def test_the_library_does_not_bring_the_old_words_back() -> None:
    words = [word for word in REPLACED if word not in (r"\bheap\b", r"\bat (?:its|the) wall\b")]  # names in the code
    files = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "systems/memfit_workloads").rglob("*.py")])
    found = {path.name: match[0] for path in files for word in words for match in matches(word, path)}
    assert found == {}


def test_each_word_of_the_glossary_is_used() -> None:
    text = "\n".join(page.read_text() for page in PAGES if page.name != "glossary.md")
    table = re.findall(r"^\| ([a-z ]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    words = [word for word in table if word != "word"]
    assert len(words) == 20
    assert [word for word in words if not re.search(rf"\b{word}", text)] == []


def test_the_page_of_commands_lists_every_setting() -> None:
    page = (ROOT / "docs" / "commands.md").read_text().partition("## All settings")[2]
    names = set(RunConfig.model_fields)
    for section in ("memory", "resources"):
        names.remove(section)
        names |= {f"{section}.{name}" for name in type(getattr(RunConfig(experiment="x"), section)).model_fields}
    assert {name for name in names if f"`{name}`" not in page} == set()


def matches(words: str, path: Path) -> list[re.Match[str]]:
    return list(re.finditer(words, path.read_text(), re.IGNORECASE))
