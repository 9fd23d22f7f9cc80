"""Rules: which explanation comes first, and how figures decide between a full card, a fragmented one and a shared one."""

import pytest

from memfit.diagnosis._facts import Fact
from memfit.diagnosis._rules import NOTICEABLE_SHARE, rank_findings
from memfit.diagnosis._text import Line

GIB = 1 << 30


def fact(kind, number, **values):
    return Fact(kind, (Line("log", number, "text"),), values, 0, number - 1)


def torch_fact(*, tried, allocated, reserved, total, free):
    sizes = {"tried": tried, "allocated": allocated, "reserved": reserved, "total": total, "free": free}
    return fact("device_oom", 1, api="CUDA", **{f"{name}_bytes": int(size * GIB) for name, size in sizes.items()})


def test_cache_that_would_have_been_enough_is_fragmentation_worth_a_remedy_only_when_it_is_a_share_of_the_card():
    broken = rank_findings([torch_fact(tried=1, allocated=15, reserved=21, total=24, free=0.2)])[0]
    full = rank_findings([torch_fact(tried=0.1, allocated=23, reserved=23.5, total=24, free=0.1)])[0]
    assert (broken.kind, broken.values["noticeable"]) == ("gpu_fragmentation", True)
    assert (full.kind, full.values["noticeable"]) == ("gpu_fragmentation", False)
    assert NOTICEABLE_SHARE > 0.5 / 24


def test_memory_of_others_is_the_card_less_what_is_free_and_what_this_process_holds():
    shared = rank_findings([torch_fact(tried=1, allocated=6.3, reserved=6.4, total=10.8, free=0.1)])[0]
    alone = rank_findings([torch_fact(tried=1, allocated=9.8, reserved=10.3, total=10.8, free=0.1)])[0]
    assert shared.values["held_by_others_bytes"] / GIB == pytest.approx(4.3, abs=0.01)
    assert "held_by_others_bytes" not in alone.values


def test_figures_that_cannot_be_give_no_memory_of_others():
    spilled = rank_findings([torch_fact(tried=1, allocated=17, reserved=19, total=8, free=0)])[0]
    underflow = rank_findings([torch_fact(tried=1, allocated=7, reserved=7.5, total=8, free=17179869183.0)])[0]
    assert "held_by_others_bytes" not in spilled.values
    assert "held_by_others_bytes" not in underflow.values


def test_memory_comes_before_the_timeout_that_others_ran_into_because_of_it():
    found = rank_findings([fact("collective_timeout", 1), fact("device_oom", 900, api="CUDA")])
    assert [one.cause for one in found] == ["out_of_memory", "collective_timeout"]


def test_a_scheduler_that_names_its_reason_comes_before_a_kill_that_names_nobody():
    found = rank_findings([fact("sigkill", 1), fact("walltime", 2)])
    assert found[0].cause == "walltime"


def test_among_equals_the_first_one_is_the_cause():
    found = rank_findings([fact("cpu_alloc", 50), fact("array_alloc", 20)])
    assert found[0].fact.number == 20


def test_words_that_follow_a_bad_index_too_are_not_believed_after_an_assertion():
    assert rank_findings([fact("assertion", 1), fact("library_alloc", 2, library="cuBLAS")])[0].cause == "assertion"
    assert rank_findings([fact("library_alloc", 2, library="cuBLAS")])[0].kind == "gpu"


def test_what_was_survived_comes_last():
    caught, fatal = fact("device_oom", 1, api="CUDA"), fact("own_exception", 9, name="ValueError", text="")
    assert rank_findings([caught, fatal], frozenset({id(caught)}))[0].cause == "own_exception"


@pytest.mark.parametrize("values", [{"code": 137}, {"pool": True}])
def test_a_bare_137_is_no_shortage_of_memory(values):
    found = rank_findings([fact("sigkill", 1, **values)])[0]
    assert (found.kind, found.cause) == ("none", "killed")
    assert found.confidence < 0.5


def test_a_kernel_line_on_its_victim_is_the_whole_machine_s_only_when_no_group_is_named_near_it():
    victim = fact("oom_kill", 300, who="the kernel", pid=7, task="python")
    group = fact("cgroup_kill", 301, who="the kernel")
    assert rank_findings([victim])[0].kind == "host_kernel"
    assert {one.kind for one in rank_findings([victim, group])} == {"host_cgroup"}
