"""Each claim of the page of claims has a measurement that is in the repository, or says that there is none."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RANGE = re.compile(r"\d+\.\d to \d+\.\d")
PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.proves("S4-56")
def test_a_claim_is_measured_by_a_file_that_is_there_or_is_said_not_to_be() -> None:
    assert len(rows()) >= 8
    for claim, found, by in rows():
        files = re.findall(r"`([^`]+)`", by)
        assert all((ROOT / name).is_file() for name in files), claim
        assert files or found == "not measured: needs a GPU", claim


def test_the_rates_that_contradict_each_other_are_compared_rightly() -> None:
    found = re.search(
        r"(\d) to (\d) batches of (\d) a second are (\d+) to (\d+) samples.*?(\d+) to (\d+) is (\d+)\s+to (\d+) times",
        PAGE,
        re.DOTALL,
    )
    assert found is not None
    low, high, batch, slow, fast, loads_low, loads_high, least, most = map(int, found.groups())
    assert (slow, fast) == (low * batch, high * batch)
    assert (least, most) == (round(loads_low / fast), round(loads_high / slow))


@pytest.mark.proves("S4-48")
def test_the_loader_s_figures_are_ranges_and_the_same_as_on_the_page_of_benchmarks() -> None:
    claimed = {text for _, found, by in rows() if "loaders.py" in by for text in RANGE.findall(found)}
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    measured = {text for line in page if "PyTorch's loader" in line for text in RANGE.findall(line)}
    assert len(claimed) == 4 and claimed == measured
