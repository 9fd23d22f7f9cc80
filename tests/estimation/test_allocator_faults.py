"""The settings of torch's allocator, judged as torch judges them, and what contradicts itself."""

import json
import subprocess
import sys

import pytest

from memfit.errors import ConfigError
from memfit.estimation import allocator_faults, check_allocator

PARSED = [
    *("max_split_size_mb:128", "max_split_size_mb:20", "max_split_size_mb:19", " max_split_size_mb : 64"),
    *("garbage_collection_threshold:0.8", "garbage_collection_threshold:1.0", "garbage_collection_threshold:0"),
    *("garbage_collection_threshold:1.5", "expandable_segments:True", "expandable_segments:true"),
    *("expandable_segments:1", "expandable_segments", "max_split_size_mb=128", "roundup_power2_divisions:3"),
    *("roundup_power2_divisions:4", "roundup_power2_divisions:[256:1,512:2,>:4]", "max_non_split_rounding_mb:10"),
    *("roundup_power2_divisions:[256:0,>:4]", "roundup_power2_divisions:[3:2]", "roundup_power2_divisions:0"),
    *("large_segment_size_mb:10", "large_segment_size_mb:30", "pinned_use_background_threads:yes", ""),
    *("large_segment_size_mb:12,max_split_size_mb:15", "max_split_size_mb:15,large_segment_size_mb:12"),
    *("large_segment_size_mb:64,max_split_size_mb:32", "max_split_size_mb:32,large_segment_size_mb:64"),
    *("large_segment_size_mb:12,max_non_split_rounding_mb:16", "large_segment_size_mb:64,max_non_split_rounding_mb:32"),
    *("pinned_use_background_threads:True,max_split_size_mb:128",),
]


@pytest.mark.proves("S4-37")
@pytest.mark.slow
def test_what_torch_refuses_is_a_problem_and_what_it_takes_is_none():
    code = """
import json, sys, torch
for text in json.loads(sys.argv[1]):
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        print("takes")
    except (ValueError, RuntimeError):
        print("refuses")
"""
    words = [sys.executable, "-c", code, json.dumps(PARSED)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    torch_says = dict(zip(PARSED, done.stdout.split(), strict=True))
    problems = {text: [one for one in allocator_faults(text) if one.verdict == "problem"] for text in PARSED}
    assert {text: "refuses" if found else "takes" for text, found in problems.items()} == torch_says
    assert {"takes", "refuses"} == set(torch_says.values())


@pytest.mark.proves("C-05")
@pytest.mark.parametrize(
    ("text", "verdict", "said"),
    [
        ("expandable_segments:True,max_split_size_mb:128", "problem", "max_split_size_mb:128"),
        ("expandable_segments:True,garbage_collection_threshold:0.8", "problem", "garbage_collection_threshold"),
        ("expandable_segments:True,roundup_power2_divisions:4", "warning", "roundup_power2_divisions"),
        ("garbage_colection_threshold:0.8", "problem", "garbage_colection_threshold"),
        ("per_process_memory_fraction:1.5", "problem", "from 0 to 1"),
        ("backend:magic", "problem", "cudaMallocAsync"),
    ],
)
def test_contradictions_and_unknown_keys_are_found_with_their_source(text, verdict, said):
    [fault] = allocator_faults(text)
    assert fault.verdict == verdict
    assert said in fault.finding
    assert fault.reason and fault.remedy and fault.source


def test_a_misspelt_key_gets_the_nearest_known_one_and_a_missing_value_an_example():
    [fault] = allocator_faults("expandable_segment:True")
    assert fault.remedy == "did you mean 'expandable_segments'?"
    [fault] = allocator_faults("expandable_segments")
    assert (fault.finding, fault.remedy) == ("'expandable_segments' has no value", "write expandable_segments:True")


@pytest.mark.parametrize("text", ["", "expandable_segments:True", "expandable_segments:False,max_split_size_mb:128",
                                  "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9",
                                  "backend:cudaMallocAsync"])  # fmt: skip
def test_settings_that_go_together_have_no_fault(text):
    assert allocator_faults(text) == []


def test_a_contradiction_is_refused_with_reason_and_source_and_what_has_no_effect_is_told():
    with pytest.raises(ConfigError) as caught:
        check_allocator("expandable_segments:True,max_split_size_mb:128", name="--allocator")
    assert caught.value.what.startswith("--allocator: expandable_segments:True together with max_split_size_mb:128")
    assert "issue 119452" in str(caught.value)
    [told] = check_allocator("expandable_segments:True,roundup_power2_divisions:4")
    assert "roundup_power2_divisions:4" in told and "issue 119452" in told
    assert check_allocator("expandable_segments:True") == []
