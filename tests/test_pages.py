"""Links between the pages lead to files and headings that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "systems").rglob("*.md")]


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"\]\([^)]*\)", "", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in _links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in _anchors(target))):
            broken.append(link)
    assert not broken


def test_each_page_is_on_the_site_or_linked_and_the_site_names_no_other() -> None:
    nav = set(re.findall(r"\"([\w./-]+\.md)\"", (ROOT / "zensical.toml").read_text()))
    pages = {page.relative_to(ROOT / "docs").as_posix(): page for page in (ROOT / "docs").rglob("*.md")}
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in _links(page)}
    assert [name for name, page in pages.items() if name not in nav and page not in linked] == []
    made = {"index.md", "api.md", *(page.name for page in ROOT.glob("*.md"))}
    made |= {f"{page.parent.name}.md" for page in (ROOT / "systems").rglob("README.md")}
    assert nav - set(pages) - made == set()


def _links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", page.read_text())
