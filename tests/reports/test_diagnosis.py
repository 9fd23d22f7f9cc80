"""A diagnosis on a terminal."""

import io

from rich.console import Console

from memfit.diagnosis import Diagnosis, Evidence, Remedy
from memfit.reports import to_text, view_diagnosis

SEEN = Diagnosis(
    True, False, "shm", "out_of_memory", "load", "proved",
    evidence=tuple(Evidence("a.err", number, "[bold]Bus error[/bold]") for number in range(1, 12)),
    where={"host": "n1", "rank": 3, "device": None},
    arithmetic=("4 workers x 2 batches",),
    checks=("df -h /dev/shm",),
)  # fmt: skip
REMEDIES = [
    Remedy("a larger /dev/shm", "--shm-size=2g", "it was full", "none", "", 1 << 30, True),
    Remedy("a smaller model", reason="it is another memory", helps=False),
]


def printed(diagnosis, remedies=(), *, verbose=False):
    out = Console(file=io.StringIO(), width=120)
    to_text(view_diagnosis(diagnosis, remedies, verbose=verbose), out)
    return out.file.getvalue()


def test_the_first_line_says_what_happened_and_the_next_where_and_how_sure():
    lines = printed(SEEN).splitlines()
    assert lines[0] == "out of /dev/shm (proved)"
    assert lines[1] == "  kind shm, cause out_of_memory, phase load, host n1, rank 3"


def test_it_prints_one_line_of_proof_and_at_most_three_actions_of_one_line_each():
    text = printed(SEEN, [Remedy(f"action {number}", "--flag", reason="why") for number in range(5)])
    assert text.count("[bold]Bus error[/bold]") == 1  # a log's own brackets are text
    assert [line for line in text.splitlines() if ". action" in line] == [
        f"  {number + 1}. action {number}: --flag" for number in range(3)
    ]


def test_remedies_show_their_bytes_and_cost_and_what_is_useless_comes_without_and_more_evidence_is_counted():
    text = printed(SEEN, REMEDIES, verbose=True)
    assert "and 3 more lines" in text
    assert "1. a larger /dev/shm (costs none, saves 1.00 GiB, enough by itself)" in text
    assert text.index("would change nothing here") < text.index("- a smaller model\n")


def test_what_recovered_is_said_to_have_recovered():
    assert "; the work went on" in printed(Diagnosis(True, True, "gpu", "out_of_memory", "train", "likely"))
