"""The corrected script: the smallest change, a reason for each line, and nothing overwritten."""

import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.amounts import Amount
from memfit.diagnosis import Diagnosis, Evidence, Job, Ran, job_of, make_fix
from memfit.errors import UsageError
from memfit.units import GIB

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=planner
#SBATCH --nodes=4
#SBATCH --ntasks=16
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:4
#SBATCH --mem=256GB   # of each node
#SBATCH --time=24:00:00

srun python train.py \\
    dataloader.params.batch_size=22 \\
    dataloader.params.num_workers=2 \\
    trainer.params.max_epochs=40
"""
MEASURED = Job(
    task_peak=Amount(int(72.5 * GIB), "task"),
    task_mean=Amount(int(71.4 * GIB), "task"),
    node_memory=Amount(513 * GIB, "node"),
)


def diagnosis(kind="host_cgroup", cause="out_of_memory", phase="train", text="", **figures):
    return Diagnosis(kind != "none", False, kind, cause, phase, "proved", figures, (Evidence("a.err", 1, text),))


def read(path):
    """What a script is read to ask for."""
    return job_of(Ran(), path)


@pytest.fixture
def script(tmp_path):
    def write(text=SCRIPT, name="train.slurm"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def changed(fix):
    """The lines that the diff adds, without the comments that say why."""
    lines = [line[1:] for line in fix.diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    return [line for line in lines if not line.lstrip().startswith("# memfit:")]


def test_only_the_memory_of_the_script_changes_when_a_node_was_over_its_limit(script):
    fix = make_fix(script(), diagnosis(), MEASURED)
    assert changed(fix) == ["#SBATCH --mem=334G   # of each node"]
    assert [edit.line for edit in fix.edits] == [8]
    assert "4 x 72.5 GiB" in fix.edits[0].reason
    assert fix.text.splitlines()[7] == f"# memfit: {fix.edits[0].reason}"
    assert all(check.verdict == "ok" for check in fix.checks)


@pytest.mark.parametrize("letter", ["\f", "\v", "\x1c", "\x85", "\u2028", "\r"])
def test_a_comment_stays_one_line_whatever_it_holds(script, letter):
    comment = f"# a page{letter}touch planted"
    path = script()
    path.write_bytes(SCRIPT.replace("\nsrun", f"\n{comment}\nsrun").encode())
    fix = make_fix(path, diagnosis(), MEASURED)
    assert comment in fix.text.split("\n") and "#SBATCH --mem=334G   # of each node" in fix.text


def test_the_fixed_script_lies_beside_the_old_one_and_neither_is_overwritten(script, tmp_path):
    path = script()
    path.chmod(0o755)
    first, second = make_fix(path, diagnosis(), MEASURED).write(), make_fix(path, diagnosis(), MEASURED).write()
    assert path.read_text() == SCRIPT
    assert (first.new_path.name, second.new_path.name) == ("train.fixed.slurm", "train.fixed.2.slurm")
    assert first.new_path.read_text() == second.new_path.read_text() == first.text
    assert first.new_path.stat().st_mode & 0o777 == 0o755


def test_the_diff_is_one_that_patch_applies(script, tmp_path):
    if shutil.which("patch") is None:
        pytest.skip("patch is not installed")
    path = script()
    fix = make_fix(path, diagnosis(), MEASURED)
    subprocess.run(["patch", "-s", str(path)], input=fix.diff + "\n", text=True, check=True)
    assert path.read_text() == fix.text


def test_a_fixed_script_has_nothing_left_to_fix(script):
    fix = make_fix(script(), diagnosis(), MEASURED)
    assert make_fix(script(fix.text, "again.slurm"), diagnosis("none", "own_exception"), MEASURED).edits == ()


def test_units_that_slurm_does_not_document_are_written_in_one_that_it_does(script):
    fix = make_fix(script(SCRIPT.replace("256GB", "400GB")), diagnosis("none", "own_exception"))
    assert changed(fix) == ["#SBATCH --mem=400G   # of each node"]


def test_tasks_and_nodes_are_made_to_agree(script):
    fix = make_fix(script(SCRIPT.replace("--ntasks=16", "--ntasks=12")), diagnosis("none", "own_exception"))
    assert "#SBATCH --ntasks=16" in changed(fix) and "4 nodes x 4 tasks" in fix.edits[-1].reason


STEP = """\
#!/bin/bash
#SBATCH -N 2 --mem 64G
#SBATCH --mem-per-cpu=4G
#SBATCH --cpus-per-task=8
srun --mem=32G python train.py --mem 7
"""


def test_the_request_of_the_srun_that_died_is_raised_and_the_jobs_is_never_lowered(script):
    fix = make_fix(script(STEP), diagnosis())
    assert changed(fix) == ["#SBATCH --mem-per-cpu=6G", "srun --mem=48G python train.py --mem 7"]
    assert any("--mem=64G and --mem-per-cpu=4G contradict each other" in check.finding for check in fix.checks)
    small = STEP.replace("#SBATCH --mem-per-cpu=4G\n", "").replace("64G", "32G")
    assert changed(make_fix(script(small), diagnosis())) == [
        "#SBATCH -N 2 --mem 48G",
        "srun --mem=48G python train.py --mem 7",
    ]


def test_two_directives_that_contradict_each_other_are_named_and_both_raised(script):
    fix = make_fix(script("#!/bin/bash\n#SBATCH --mem=8G\n#SBATCH --mem=16G\npython a.py\n"), diagnosis())
    assert changed(fix) == ["#SBATCH --mem=24G", "#SBATCH --mem=24G"]
    assert any("--mem=8G and --mem=16G contradict each other" in check.finding for check in fix.checks)
    assert read(fix.write().new_path).node_request == Amount(24 * GIB, "node")


def test_a_fix_says_where_the_accounting_and_the_script_disagree_on_the_request(script):
    fix = make_fix(script(), diagnosis(), Job(request=Amount(128 * GIB, "node")))
    [told] = [check for check in fix.checks if "the accounting has 128.00 GiB" in check.finding]
    assert told.verdict == "warning" and "the script requests 256.00 GiB" in told.finding


@pytest.mark.parametrize(
    "text",
    [
        'export CFG="data.num_workers=3 data.persistent_workers=true"\npython a.py $CFG\n',
        'export CFG="data.num_workers=3 \\\n  data.persistent_workers=true"\npython a.py $CFG\n',
        "python a.py --config 'data.num_workers=3 data.persistent_workers=true'\n",
    ],
)
def test_settings_within_quotes_are_read_without_them(script, text):
    job = read(script(text))
    assert (job.workers, job.persistent_workers) == (3, True)


def test_time_is_asked_for_by_the_pace_and_only_when_it_is_short(script):
    paced = Job(epoch_seconds=23 * 60)
    enough = make_fix(script(SCRIPT.replace("256GB", "256G")), diagnosis("none", "own_exception"), paced)
    assert enough.edits == ()  # 40 x 23 min are 15.3 of 24 hours
    text = SCRIPT.replace("24:00:00", "12:00:00").replace("256GB", "256G")
    short = make_fix(script(text), diagnosis("none", "walltime"), paced)
    assert changed(short) == ["#SBATCH --time=18:30:00"]


def test_no_more_is_asked_for_than_a_node_has(script):
    tight = Job(task_peak=Amount(int(72.5 * GIB), "task"), node_memory=Amount(300 * GIB, "node"))
    assert changed(make_fix(script(), diagnosis(), tight)) == ["#SBATCH --mem=300G   # of each node"]
    hopeless = make_fix(
        script(), diagnosis(), Job(task_peak=Amount(100 * GIB, "task"), node_memory=Amount(300 * GIB, "node"))
    )
    assert hopeless.edits == ()
    assert [check.verdict for check in hopeless.checks if "more than the 300.00 GiB" in check.finding] == ["problem"]


def test_memory_of_each_cpu_stays_memory_of_each_cpu(script):
    fix = make_fix(script(SCRIPT.replace("--mem=256GB ", "--mem-per-cpu=4G ")), diagnosis(), MEASURED)
    assert changed(fix) == ["#SBATCH --mem-per-cpu=5344M   # of each node"]  # 334 GiB over 4 tasks of 16 CPUs
    assert "334.00 GiB: 5.22 GiB of each CPU" in fix.edits[0].reason


SPREAD = "#!/bin/bash\n#SBATCH --ntasks=128 {}\nsrun python process.py\n"


def test_where_the_nodes_are_not_known_memory_of_each_cpu_is_raised_as_such(script):
    fix = make_fix(script(SPREAD.format("--mem-per-cpu=4096M")), diagnosis())
    assert changed(fix) == ["#SBATCH --ntasks=128 --mem-per-cpu=6G"]
    measured = make_fix(
        script(SPREAD.format("--mem-per-cpu=4G -c 2")), diagnosis(), Job(task_peak=Amount(20 * GIB, "task"))
    )
    assert changed(measured) == ["#SBATCH --ntasks=128 --mem-per-cpu=12G -c 2"]  # 20 GiB of a task on 2 CPUs, + 15%
    granted = Job(node_peak=Amount(128 * GIB, "node"), request=Amount(96 * GIB, "node"))
    fixed = make_fix(script(SPREAD.format("--mem-per-cpu=4G")), diagnosis(), granted)
    assert changed(fixed) == ["#SBATCH --ntasks=128 --mem-per-cpu=6315M"]  # by as much as the node: 148 of 96 GiB


def test_memory_of_each_gpu_is_raised_as_such(script):
    fix = make_fix(script("#!/bin/bash\n#SBATCH --gpus=8 --mem-per-gpu=64G\nsrun python a.py\n"), diagnosis(), MEASURED)
    assert changed(fix) == ["#SBATCH --gpus=8 --mem-per-gpu=96G"]


def test_what_a_step_requests_of_each_gpu_is_not_written_as_a_request_of_each_node(script):
    fix = make_fix(script("#!/bin/bash\n#SBATCH --gpus=8\nsrun --mem-per-gpu=64G python a.py\n"), diagnosis(), MEASURED)
    assert changed(fix) == ["srun --mem-per-gpu=96G python a.py"]
    assert any("the script has no --mem-per-gpu" in one.finding for one in fix.checks if one.verdict == "problem")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("--mem=0", "--mem=0 stays: --mem=84G could be less than the job was granted"),
        ("--mem=$MEM", "--mem=$MEM stays: --mem=84G could be less than the job was granted"),
        ("--time=1:00:00", "the script has no --mem: --mem=84G could be less than the job was granted"),
    ],
)
def test_what_could_be_less_than_the_job_was_granted_is_said_and_not_written(script, given, why):
    fix = make_fix(
        script(f"#!/bin/bash\n#SBATCH {given}\nsrun python a.py\n"),
        diagnosis(),
        Job(node_peak=Amount(73 * GIB, "node")),
    )
    assert fix.edits == () and [check.finding for check in fix.checks if check.verdict == "problem"] == [why]


def test_a_script_without_a_request_gets_one_where_the_accounting_shows_that_it_is_more(script):
    granted = Job(node_peak=Amount(73 * GIB, "node"), request=Amount(64 * GIB, "node"))
    fix = make_fix(script("#!/bin/bash\n#SBATCH --time=1:00:00\nsrun python a.py\n"), diagnosis(), granted)
    assert changed(fix) == ["#SBATCH --mem=84G"]


def test_neither_memory_above_that_of_a_node_nor_tasks_are_lowered(script):
    fix = make_fix(script(SCRIPT.replace("256GB", "600G")), diagnosis("none", "own_exception"), MEASURED)
    assert fix.edits == () and any("a node has 513.00 GiB" in check.finding for check in fix.checks)
    many = make_fix(script(SCRIPT.replace("--ntasks=16", "--ntasks=20")), diagnosis(), MEASURED)
    assert changed(many) == ["#SBATCH --mem=334G   # of each node"]
    assert any("--ntasks=20 stays" in check.finding for check in many.checks)


KEYS = ("mem", "mem-per-cpu", "mem-per-gpu")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def grants(text, free):
    """What Slurm gives a node of a script, by the directive that it takes; ``free`` is what the script leaves open."""
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=(\w+)$", text, re.M))
    nodes, cpus = (int(given.get(name, free[name])) for name in ("nodes", "cpus-per-task"))
    tasks = int(given.get("ntasks", nodes * int(given.get("ntasks-per-node", free["ntasks-per-node"]))))
    many = {"mem": 1, "mem-per-cpu": -(-tasks // nodes) * cpus, "mem-per-gpu": free["gpus"]}
    steps = re.findall(r"^srun --(mem\S*)=(\d+)(\w)", text, re.M)
    found = {key: many[key] * int(given[key][:-1]) * UNITS[given[key][-1]] or 1 << 60 for key in KEYS if key in given}
    return found | {f"step {key}": many[key] * int(size) * UNITS[unit] for key, size, unit in steps}


counts = st.none() | st.integers(1, 6)
sizes = st.none() | st.sampled_from(["0G", "300M", "4096M", "6G", "64G", "700G"])


def measures(scope):
    return st.none() | st.builds(Amount, st.sampled_from([GIB // 8, 5 * GIB, 90 * GIB, 800 * GIB]), st.just(scope))


@pytest.mark.slow
@given(
    st.fixed_dictionaries({"nodes": counts, "ntasks": counts, "ntasks-per-node": counts, "cpus-per-task": counts}),
    st.fixed_dictionaries(dict.fromkeys(KEYS, sizes)),
    st.sampled_from(["", "--mem=32G ", "--mem-per-cpu=3G "]),
    st.fixed_dictionaries(
        {
            "task_peak": measures("task"),
            "node_peak": measures("node"),
            "tasks_per_node": counts,
            "node_memory": st.sampled_from([None, Amount(513 * GIB, "node")]),
        }
    ),
    st.none() | st.builds(Amount, st.sampled_from([GIB, 64 * GIB]), st.sampled_from(["cpu", "node", "job"])),
    st.fixed_dictionaries(dict.fromkeys(("nodes", "ntasks-per-node", "cpus-per-task", "gpus"), st.integers(1, 8))),
)
def test_no_fix_gives_a_node_less_whatever_slurm_grants(tmp_path_factory, shape, memory, step, seen, got, free):
    lines = [f"#SBATCH --{key}={value}\n" for key, value in (shape | memory).items() if value is not None]
    text = f"#!/bin/bash\n#SBATCH --partition=p\n{''.join(lines)}srun {step}python a.py\n"
    path = tmp_path_factory.mktemp("grid") / "a.slurm"
    path.write_text(text)
    fix = make_fix(path, diagnosis(), Job(request=got, **seen))
    before, after = grants(text, free), grants(fix.text, free)
    if not before.keys() & set(KEYS) and "mem" in after:  # only written where the accounting shows what there was
        before["mem"] = got.bytes
    assert before.keys() == after.keys()
    assert all(after[key] >= size for key, size in before.items())


def test_the_allocator_is_set_before_the_interpreter_starts(script):
    figures = {"device_total": 24 * GIB, "reserved": 23 * GIB, "allocated": 19 * GIB,
               "tried": GIB, "free": GIB // 2}  # fmt: skip
    fix = make_fix(script(), diagnosis("gpu_fragmentation", **figures))
    lines = fix.text.splitlines()
    at = lines.index("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert at < next(number for number, line in enumerate(lines) if line.startswith("srun"))
    given = SCRIPT.replace("srun", "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128\nsrun")
    merged = make_fix(script(given), diagnosis("gpu_fragmentation", **figures))
    assert "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in changed(merged)
    assert "max_split_size_mb:128" not in merged.text.replace(merged.edits[-1].reason, "")


def test_a_batch_is_halved_and_accumulated_twice_where_the_script_says_it(script):
    full = {"device_total": 24 * GIB, "reserved": 23 * GIB, "allocated": 23 * GIB, "tried": GIB,
            "free": GIB // 2}  # fmt: skip
    text = "#!/bin/bash\n#SBATCH --mem=64G\nB=8\npython run.py --per_device_train_batch_size $B --bf16 True\n"
    fix = make_fix(script(text), diagnosis("gpu", **full))
    assert "B=4" in changed(fix)
    assert any("--per_device_train_batch_size $B --gradient_accumulation_steps 2 --bf16" in one for one in changed(fix))
    assert "as before" in fix.edits[0].reason
    unknown = make_fix(script(SCRIPT.replace("256GB", "256G")), diagnosis("gpu", **full))
    assert unknown.edits == ()  # what accumulates there is not known: nothing is guessed
    assert any(check.verdict == "problem" for check in unknown.checks)


def test_a_validation_that_did_not_fit_leaves_the_batch_of_training(script):
    text = "#!/bin/bash\n#SBATCH --time=1:00\nsrun python a.py --per_device_train_batch_size 8 --num_train_epochs 3\n"
    full = {"device_total": 24 * GIB, "free": 0, "reserved": 23 * GIB, "allocated": 23 * GIB, "tried": GIB}
    fix = make_fix(script(text), diagnosis("gpu", phase="validate", **full))
    assert not fix.edits and "names no setting" in fix.checks[-1].finding


def test_what_the_estimate_calls_too_little_is_passed_over_for_what_may_fit(script):
    full = {"device_total": 24 * GIB, "reserved": 23 * GIB, "allocated": 23 * GIB, "tried": GIB,
            "free": GIB // 2}  # fmt: skip
    config = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
              "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000}  # fmt: skip
    options = "--per_device_train_batch_size 8 --bf16 True --max_seq_length 1024"
    text = f"#!/bin/bash\n#SBATCH --mem=64G\npython run.py {options}\n"
    fix = make_fix(script(text), diagnosis("gpu", **full), config=config)
    assert changed(fix) == [f"python run.py {options.replace('8 ', '8 --gradient_checkpointing True ', 1)}"]


def test_reasons_never_stand_inside_a_command(script):
    full = {"device_total": 24 * GIB, "reserved": 23 * GIB, "allocated": 23 * GIB, "tried": GIB}
    text = SCRIPT.replace("256GB", "256G").replace(
        "trainer.params.max_epochs=40", "trainer.params.accumulate_grad_batches=1"
    )
    fix = make_fix(script(text), diagnosis("gpu", **full))
    assert fix.edits and subprocess.run(["bash", "-n"], input=fix.text, text=True, check=False).returncode == 0
    again = read(fix.write().new_path)
    assert (again.batch, again.accumulate, again.workers) == (11, 2, 2)


def test_memory_of_others_is_nothing_that_a_script_can_fix(script):
    taken = {"device_total": 24 * GIB, "reserved": 2 * GIB, "allocated": 2 * GIB, "tried": GIB,
             "free": 0}  # fmt: skip
    fix = make_fix(script(SCRIPT.replace("256GB", "256G")), diagnosis("gpu", **taken))
    assert fix.edits == () and any("no script can change that" in check.reason for check in fix.checks)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("a.slurm", "echo hello\n", "neither an #SBATCH line"),
        ("a.yaml", "services: [", "neither an #SBATCH line"),
    ],
)
def test_what_cannot_be_corrected_is_an_error_of_three_parts(script, name, text, what):
    with pytest.raises(UsageError, match=what) as caught:
        make_fix(script(text, name), diagnosis())
    assert caught.value.rule and caught.value.remedy


@given(st.text(alphabet="#SBATCH -=abc19 G\n\\$\"'{}.,;&|\t", max_size=200))
def test_any_text_is_read_and_keeps_its_lines_where_nothing_is_to_be_fixed(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "a.slurm"
    path.write_text("#SBATCH --time=1:00:00\n" + text)
    assert read(path).limit_seconds
    fix = make_fix(path, diagnosis("none", "own_exception"))
    assert fix.edits or fix.text.splitlines() == path.read_text().splitlines()
