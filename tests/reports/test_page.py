"""The page of a run: whole, offline, and drawn by a real browser."""

from __future__ import annotations

import html.parser
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.memory import Sample, SeriesWriter
from memfit.reports import write_page
from memfit.rundir import RunDir

pytestmark = pytest.mark.slow

_VOID = {"meta", "br", "line", "rect"}


class _Page(html.parser.HTMLParser):
    """Keeps what a page says and what it loads, and whether its tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def memfit(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "memfit", *words], cwd=cwd, text=True, capture_output=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four commands, of which one fails with an allocation that no machine has."""
    folder = tmp_path_factory.mktemp("page")
    code = "import time; block = bytearray({mib} << 20); time.sleep(1.2)"
    found = memfit("run", "--param", "mib=20,30,40,99999999", "--json", "--", sys.executable, "-c", code, cwd=folder)
    assert found.returncode == 4, found.stderr
    return Path(folder / json.loads(found.stdout)["run"])


def test_the_page_is_whole_offline_and_small(run: Path) -> None:
    found = memfit("report", str(run), cwd=run.parent)
    assert found.returncode == 0, found.stderr
    text = (run / "report.html").read_text()
    page = _Page(text)
    assert page.open == []
    assert page.loads == []
    assert "script" not in page.tags
    assert page.tags.count("svg") == 2
    assert len(text.encode()) < 300_000
    said = " ".join(page.text)
    assert "3 completed" in said
    assert "cmd_0001 mib=20" in said
    assert "MemoryError" in said, "the line that shows the cause"
    assert "bytearray({mib} << 20)" in said, "the command"
    assert "jobs/cmd_0004/err.log" in said, "where its log is"
    assert "attempt 2" not in said
    assert "meter" in page.tags, "a peak beside its reservation"


def test_the_page_tells_which_attempt_of_a_job_it_shows(finished) -> None:
    series = SeriesWriter(finished.path / "jobs" / "fold_1" / "memory.jsonl")
    for at in (20.0, 1600.0):
        series.append(Sample(finished.start + at, 1, 1 << 20, 0, 1 << 20, 1 << 20, "train"))
    series.close()
    finished.job("fold_1", at=10, seconds=3512, attempt=2)
    said = " ".join(_Page(write_page(finished.run, finished.path / "report.html").read_text()).text)
    assert said.count("attempt 2") == 1 and "Study" not in said


def test_a_run_without_jobs_has_a_page_too(tmp_path: Path) -> None:
    empty = RunDir.create(tmp_path, "demo", "0" * 64)
    assert "No job has left a sample" in write_page(empty, tmp_path / "report.html").read_text()


def test_a_browser_draws_the_charts(run: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed here (apt-get install chromium)")
    from PIL import Image

    from memfit.reports import COLOURS

    page, picture = write_page(RunDir.open(run), tmp_path / "page.html"), tmp_path / "page.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1040,1400", f"--user-data-dir={tmp_path}"]
    subprocess.run(
        [browser, *flags, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=120
    )
    with Image.open(picture) as image:
        seen = {pixel for _, pixel in image.convert("RGB").getcolors(1 << 24) or ()}
    bars = tuple(int(COLOURS[-1][at : at + 2], 16) for at in (1, 3, 5))
    assert bars in seen, "the bars of the jobs"
    assert len(seen) > 50, "texts and charts, not an empty page"


def test_the_page_of_a_study_lists_its_trials_with_a_bar_for_the_objective(study) -> None:
    run = study.begin()
    refused = [{"params": {"params.layers": 8, "params.batch": 128}, "why": "fold takes at least 9.00 GiB"}]
    study.trial(0, value=0.01)
    study.trial(1, value=0.0341, refused=refused)
    study.trial(2, "pruned", -7.0, cause="worse than the median")
    study.trial(3, "out_of_memory", cause="killed <by> the kernel")
    study.trial(4, "running")
    text = write_page(run, study.path / "report.html").read_text()
    page = _Page(text)
    assert page.open == page.loads == []
    assert page.text.index("Study") < page.text.index("Memory over time")
    assert "4 of 40 trials 0.0341 best rank_ic" in " ".join(page.text)
    shares = [float(part.partition('"')[0]) for part in text.split('<meter value="')[1:]]
    assert shares == [0.0, 1.0, 0.0], "a trial without a value has no bar"
    assert "killed <by> the kernel" in page.text
    region = page.text.index("layers", page.text.index("accepted"))
    assert page.text[region : region + 3] == ["layers", "8", "2"], "what was refused, and what was accepted"


def test_a_trial_that_is_far_off_does_not_flatten_the_bars(study) -> None:
    run = study.begin(direction="minimize")
    for number, value in enumerate([0.5, 0.4, 0.45, 1e6]):
        study.trial(number, value=value)
    text = write_page(run, study.path / "report.html").read_text()
    shares = [float(part.partition('"')[0]) for part in text.split('<meter value="')[1:]]
    assert shares == [pytest.approx(0.333, abs=0.001), 1.0, pytest.approx(0.667, abs=0.001), 0.0]
