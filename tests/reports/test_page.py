"""The page of a run: whole, offline, and drawn by a real browser."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.memory import Sample, SeriesWriter
from memfit.reports import write_page
from memfit.rundir import RunDir

_VOID = {"meta", "br", "wbr"}


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


def hold(made, name: str, *samples: tuple[str, float, int]) -> None:
    """Write what one attempt of a job held: its phase, the seconds since the start, and MiB."""
    series = SeriesWriter(made.path / "jobs" / f"{name}.jsonl")
    for phase, at, mib in samples:
        series.append(Sample(made.start + at, 1, mib << 20, 0, 1 << 20, 1 << 20, phase))
    series.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four commands, of which one fails with an allocation that no machine has."""
    folder = tmp_path_factory.mktemp("page")
    code = "import time; block = bytearray({mib} << 20); time.sleep(1.2)"
    found = memfit("run", "--param", "mib=20,30,40,99999999", "--json", "--", sys.executable, "-c", code, cwd=folder)
    assert found.returncode == 4, found.stderr
    return Path(folder / json.loads(found.stdout)["run"])


@pytest.mark.slow
@pytest.mark.proves("S2-33")
def test_the_page_is_whole_offline_and_small(run: Path) -> None:
    found = memfit("report", str(run), cwd=run.parent)
    assert found.returncode == 0, found.stderr
    text = (run / "report.html").read_text()
    page = _Page(text)
    assert page.open == page.loads == [] and "script" not in page.tags
    assert "svg" in page.tags, "memory"
    assert len(text.encode()) < 300_000
    said = " ".join(page.text)
    assert "completed 3" in said
    assert "cmd_0001 mib=20" in said
    assert "MemoryError" in said, "the line that shows the cause"
    assert "bytearray({mib} << 20)" in said, "the command"
    assert "jobs/cmd_0004/err.log" in said, "where its log is"
    assert "--name" not in said
    assert "attempt 2" not in said


def test_the_page_draws_what_each_attempt_of_a_job_held_when_it_ran(finished) -> None:
    fold_1 = [("load", 0, 10), ("train", 10, 100), ("train", 20, 100)]
    hold(finished, "fold_1/memory", *fold_1)
    hold(finished, "fold_1/memory_2", ("load", 1590, 10), ("train", 1620, 100), ("train", 1630, 100))
    hold(finished, "prepare/memory", ("train", 1001, 0))  # it was seen once
    hold(finished, "fold_2/memory", ("train", 1000, 70), ("", 1020, 90))
    finished.job("fold_1", at=10, seconds=3512, attempt=2)
    text = write_page(finished.run, finished.path / "report.html").read_text()
    assert "Study" not in text
    (memory,) = re.findall("<svg.*?</svg>", text, re.DOTALL)
    assert re.findall("<title>(.*?)<", memory)[:3] == ["load", "train", "no phase marked"]
    edges = [points.split()[: len(points.split()) // 2] for points in re.findall('points="(.*?)"', memory)]
    tops = [min(float(one.partition(",")[2]) for one in at) for at in zip(*edges, strict=True)]
    held = {at: round(100 * (254 - one) / (254 - min(tops))) for at, one in enumerate(tops) if one < 254}
    at_ends = [held.get(at) for at in (0, 1, 2, 3, 4, 145, 146, 149, 150, 151, 232, 233, 237, 238, 239)]  # 6.8 s apart
    assert at_ends == [10, 10, 100, 100, None, None, 70, 70, 90, None, None, 10, 10, 100, 100]


def test_a_script_that_marks_no_phase_is_drawn_by_job(commands) -> None:
    made = commands(2)
    for number in (1, 2):
        made.job(f"cmd_000{number}", at=0)
    hold(made, "cmd_0001/memory", ("", 0, 10), ("", 10, 10))
    hold(made, "cmd_0001/memory_2", ("", 15, 10), ("", 20, 10))
    hold(made, "cmd_0002/memory", ("", 0, 20), ("", 20, 20))
    (memory,) = re.findall("<svg.*?</svg>", write_page(made.run, made.path / "page.html").read_text(), re.DOTALL)
    assert re.findall("<title>(.*?)<", memory) == ["cmd_0001", "cmd_0002"]


def test_a_job_that_grows_has_its_sentence_and_a_line_to_its_limit(growing) -> None:
    """It holds 200 MiB after 60 s, and is to meet 300 MiB 30 s later: the line ends where both edges of the chart are."""
    text = write_page(growing.run, growing.path / "report.html").read_text()
    assert text.count(f"fold_1: {growing.growth.text}") == 2, "in the facts, and where a pointer shows it"
    ahead = re.search('<polyline class="curve" points="(.*?)"', text)
    assert ahead is not None
    (x, y), (end, top) = (map(float, point.split(",")) for point in ahead[1].split())
    assert (x - 76) / (end - 76) == pytest.approx(60 / 90, abs=0.01) and end == 944
    assert (254 - y) / (254 - top) == pytest.approx(200 / 300, abs=0.01)


@pytest.mark.proves("S1-46")
def test_the_page_draws_what_jobs_report_by_epoch(finished) -> None:
    for epoch, (train, valid) in enumerate([(0.9, 0.8), (0.5, 0.6)], start=1):
        for fold in (1, 3):
            numbers = {"train_loss": train + fold, "valid_loss": valid + fold, "samples_per_second": 12.0}
            finished.event(1000 + epoch, "epoch", f"fold_{fold}", epoch=epoch, num_epochs=2, **numbers)
    finished.event(2000, "epoch", "fold_1", epoch=2, num_epochs=2, train_loss=0.25, valid_loss=float("nan"))
    finished.event(2001, "epoch", "fold_1", epoch=10**400, num_epochs=2, train_loss="low", rank=0)
    finished.event(2002, "epoch", "fold_2", "host-2-2", rank=1, epoch=1, num_epochs=2, train_loss=77.0)
    text = write_page(finished.run, finished.path / "report.html").read_text()
    page = _Page(text)
    assert page.open == page.loads == [] and "script" not in page.tags
    at = page.text.index("Learning curves")
    assert page.text[at + 1 : at + 3] == ["fold_1", "fold_3"], "the legend"
    curves = {f"fold_{fold} {part}" for fold in (1, 3) for part in ("training", "validation")}
    assert set(re.findall("<polyline[^>]*><title>(.*?)<", text)) == curves
    row = page.text.index("fold_1", at + 2)
    said = "of an epoch that came again the last value; no number that is none"
    assert page.text[row + 1 : row + 4] == ["2", "1.6000", "0.2500"], said
    assert "77.0" not in text, "another rank's part"


@pytest.mark.parametrize("state", ["completed", "failed"])
def test_what_commands_reported_last_is_a_result_or_else_stands_below_the_curves(commands, state) -> None:
    made = commands(2)
    made.job("cmd_0001", state)
    made.event(1, "epoch", "cmd_0001", epoch=1, num_epochs=2, loss=0.5)
    text = write_page(made.run, made.path / "report.html").read_text()
    assert ("<h2>Results" in text, "last values" in text) == (state == "completed", state == "failed")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (420, "dark")])
def test_a_browser_draws_the_charts(run: Path, tmp_path: Path, width: int, theme: str) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed here (apt-get install chromium)")
    from PIL import Image

    from memfit.reports import COLOURS

    page, picture = write_page(RunDir.open(run), tmp_path / "page.html"), tmp_path / "page.png"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--window-size={width},1400",
        f"--user-data-dir={tmp_path}",
    ]
    flags.append(f"--blink-settings=preferredColorScheme={int(theme == 'light')}")
    subprocess.run(
        [browser, *flags, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=120
    )
    with Image.open(picture) as image:
        seen = {pixel for _, pixel in image.convert("RGB").getcolors(1 << 24) or ()}
        corner = image.convert("L").getpixel((2, 2))
    first = tuple(int(COLOURS[0][at : at + 2], 16) for at in (1, 3, 5))
    assert first in seen, "the legend of the memory"
    assert len(seen) > 50, "texts and charts, not an empty page"
    assert (corner > 128) == (theme == "light")
