"""The corrected script: the smallest change, a reason for each line, and nothing overwritten."""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.amounts import Amount
from memfit.diagnosis import Diagnosis, Evidence, Job, Ran, job_of, list_remedies, make_fix
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
MEASURED = Job(task_peak=Amount(int(72.5 * GIB), "task"), task_mean=Amount(int(71.4 * GIB), "task"))
SPREAD = "#!/bin/bash\n#SBATCH --ntasks=128 {}\nsrun python process.py\n"
PACED = Job(epoch_seconds=23 * 60)
FRAGMENTS = {"device_total": 24 * GIB, "reserved": 23 * GIB, "allocated": 19 * GIB, "tried": GIB, "free": GIB // 2}
FULL, TAKEN = FRAGMENTS | {"allocated": 23 * GIB}, FRAGMENTS | {"reserved": 2 * GIB, "allocated": 2 * GIB, "free": 0}


def diagnosis(kind="host_cgroup", cause="out_of_memory", phase="train", text="", **figures):
    return Diagnosis(kind != "none", False, kind, cause, phase, "proved", figures, (Evidence("a.err", 1, text),))


def node(gib):
    return Amount(gib * GIB, "node")


def read(path):
    """What a script is read to ask for."""
    return job_of(Ran(), path)


@pytest.fixture
def script(tmp_path):
    def write(text=SCRIPT, name="train.slurm"):
        path = tmp_path / name
        path.write_text(text if text.startswith("#!") or name != "train.slurm" else f"#!/bin/bash\n{text}")
        return path

    return write


def changed(fix):
    """The lines that the diff adds, without the comments that say why."""
    lines = [line[1:] for line in fix.diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    return [line for line in lines if not line.lstrip().startswith("# memfit:")]


@pytest.mark.proves("C-15")
@pytest.mark.parametrize(
    ("text", "found", "job", "lines", "said"),
    [
        # the measured peak of a node, and 15 %
        (SCRIPT, diagnosis(), MEASURED, ["#SBATCH --mem=334G   # of each node"], "4 x 72.5 GiB"),
        # two directives that contradict each other are both raised
        ("#SBATCH --mem=8G\n#SBATCH --mem=16G\npython a.py\n", diagnosis(), Job(),
         ["#SBATCH --mem=24G", "#SBATCH --mem=24G"], "--mem=8G and --mem=16G contradict each other"),
        # 256 GiB are more than 1.5 times what it was granted
        (SCRIPT, diagnosis(), Job(request=node(128)), [], "the accounting has 128.00 GiB of each node, the script requests "
         "256.00 GiB"),
        # memory of each CPU or GPU stays that: 334 GiB over 4 tasks of 16 CPUs; without the nodes, by the same factor
        (SCRIPT.replace("--mem=256GB ", "--mem-per-cpu=4G "), diagnosis(), MEASURED,
         ["#SBATCH --mem-per-cpu=5344M   # of each node"], "334.00 GiB: 5.22 GiB of each CPU"),
        (SPREAD.format("--mem-per-cpu=4096M"), diagnosis(), Job(), ["#SBATCH --ntasks=128 --mem-per-cpu=6G"], "+ 50%"),
        (SPREAD.format("--mem-per-cpu=4G -c 2"), diagnosis(), Job(task_peak=Amount(20 * GIB, "task")),
         ["#SBATCH --ntasks=128 --mem-per-cpu=12G -c 2"], "+ 15%"),
        (SPREAD.format("--mem-per-cpu=4G"), diagnosis(), Job(node_peak=node(128), request=node(96)),
         ["#SBATCH --ntasks=128 --mem-per-cpu=6315M"], "the node's own count"),
        ("#SBATCH --gpus=8 --mem-per-gpu=64G\nsrun python a.py\n", diagnosis(), MEASURED,
         ["#SBATCH --gpus=8 --mem-per-gpu=96G"], "+ 50%"),
        # a request that is not in the script is written where the accounting shows that it is more
        ("#SBATCH --time=1:00:00\nsrun python a.py\n", diagnosis(), Job(node_peak=node(73), request=node(64)),
         ["#SBATCH --mem=84G"], "+ 15%"),
        # time by the pace, and only when it is short: 40 x 23 min are 15.3 hours
        (SCRIPT, diagnosis("none", "own_exception"), PACED, [], ""),
        (SCRIPT.replace("24:00", "12:00"), diagnosis("none", "walltime"), PACED, ["#SBATCH --time=18:30:00"], "+ 20%"),
        (SCRIPT.replace("24:00", "1:00"), diagnosis("none", "walltime"), replace(PACED, limit_seconds=24 * 3600), [], ""),
        # a device: the allocator's variable, above the command; nothing else is the script's to change
        (SCRIPT, diagnosis("gpu_fragmentation", **FRAGMENTS), Job(),
         ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"], "no tensor uses"),
        (SCRIPT.replace("srun", "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128\nsrun"),
         diagnosis("gpu_fragmentation", **FRAGMENTS), Job(), ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"],
         "It replaces max_split_size_mb:128"),
        (SCRIPT, diagnosis("gpu", **TAKEN), Job(), [], "Other processes and the driver hold"),
        (SCRIPT, diagnosis("gpu", **FULL), Job(), [], "names no setting of its memory that can be changed"),
        # a batch that the script names, through a variable too; an accumulation that is not known is not guessed
        ("B=8\npython run.py --per_device_train_batch_size $B --bf16 True\n", diagnosis("gpu", **FULL), Job(),
         ["B=4", "python run.py --per_device_train_batch_size $B --gradient_accumulation_steps 2 --bf16 True"],
         "4 x 2 samples an update on each device, as before"),
        ("python run.py train.batch_size=6 train.accumulate_grad_batches=3\n", diagnosis("gpu", **FULL), Job(),
         ["python run.py train.batch_size=3 train.accumulate_grad_batches=6"], "3 x 6 samples"),
        ("python run.py --batch_size 8\n", diagnosis("gpu", **FULL), Job(), [], "names no setting of its memory"),
        ("python run.py --per_device_train_batch_size 1 --bf16 True\n", diagnosis("gpu", **FULL), Job(),
         ["python run.py --per_device_train_batch_size 1 --gradient_checkpointing True --bf16 True"], "computes each block"),
        # a validation that did not fit leaves the batch of training
        ("python a.py --per_device_train_batch_size 8\n", diagnosis("gpu", phase="validate", **FULL), Job(), [],
         "names no setting of its memory"),
        # what could be less than was granted is said, and not written
        *((f"#SBATCH {given}\nsrun python a.py\n", diagnosis(), Job(node_peak=node(73)), [], f"{why}: --mem=84G could be "
           "less than the job was granted") for given, why in (
              ("--mem=0", "--mem=0 stays"), ("--mem=$MEM", "--mem=$MEM stays"), ("--time=1:00", "the script has no --mem"))),
        # nobody can say what the step had
        *((text, diagnosis(), Job(), [], why) for text, why in (
            ("#SBATCH --mem=16G\n#SBATCH hetjob\n#SBATCH --mem=200G\nsrun python a.py\n", "a heterogeneous job"),
            ("#SBATCH --mem=16G\n#SBATCH packjob\n#SBATCH --mem=200G\nsrun python a.py\n", "a heterogeneous job"),
            ("#SBATCH --mem=64G\nsrun --mem=4G \\\n  python a.py --mem 7\n", "srun --mem=4G limits its own step"),
            ("#SBATCH --mem=64G\nsrun --mem-per-gpu=$MEM python a.py\n", "srun --mem-per-gpu=$MEM limits its own step"),
            ("#SBATCH --mem=0\nsrun python a.py --mem 7\n", "the script requests no size"),
            ("#SBATCH --mem=$MEM\nsrun python a.py\n", "the script requests no size"))),
    ],
)  # fmt: skip
def test_a_script_gets_the_lines_that_the_diagnosis_asks_for_and_their_reason(script, text, found, job, lines, said):
    fix = make_fix(script(text), found, job)
    assert changed(fix) == lines
    told = " ".join([fix.text, *(f"{check.finding} {check.reason}" for check in fix.checks)])
    assert said in told and len({edit.line for edit in fix.edits}) == len(lines)
    assert subprocess.run(["bash", "-n"], input=fix.text, text=True, check=False).returncode == 0
    if "limits its own" in said or "heterogeneous" in said or "no size" in said:
        [advice, *_] = list_remedies(found, read(fix.path))
        assert advice.title == "request more memory" and not re.search(r"\d+[GM]", advice.setting)


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
    assert make_fix(first.new_path, diagnosis("none", "own_exception"), MEASURED).edits == ()


@pytest.mark.proves("S3-23")
def test_the_diff_is_one_that_patch_applies(script, tmp_path):
    if shutil.which("patch") is None:
        pytest.skip("patch is not installed")
    path = script()
    fix = make_fix(path, diagnosis(), MEASURED)
    subprocess.run(["patch", "-s", str(path)], input=fix.diff + "\n", text=True, check=True)
    assert path.read_text() == fix.text


@pytest.mark.parametrize("given", ["--mem=8G", "--mem-per-cpu=2G", "--mem-per-gpu=8G", '--mem="8G"', "--mem=700G"])
def test_a_file_requests_what_the_advice_says_where_the_script_has_less_than_was_granted(script, given):
    path = script(f"#!/bin/bash\n#SBATCH {given} --gres=gpu:2\n#SBATCH --ntasks=1\nsrun python a.py\n")
    granted = Job(1, 1, cpus_per_task=4, gpus_per_node=2, request=node(512), task_peak=Amount(GIB, "task"))
    [advice, *_] = list_remedies(diagnosis(), job_of(Ran(granted), path))
    fix = make_fix(path, diagnosis(), granted)
    assert advice.setting in fix.text.replace('"', "")
    assert granted.layout.to(read(fix.write().new_path).request, "node") == node(768)


@pytest.mark.parametrize(
    "text",
    [
        'export CFG="data.num_workers=3 data.max_epochs=9"\npython a.py $CFG\n',
        'export CFG="data.num_workers=3 \\\n  data.max_epochs=9"\npython a.py $CFG\n',
        "python a.py --config 'data.num_workers=3 data.max_epochs=9'\n",
        "#SBATCH -N 2\nB=3\npython a.py data.num_workers=$B --bf16 --max-epochs 9 --optim adam\n",
    ],
)
def test_settings_within_quotes_are_read_without_them(script, text):
    job = read(script(text))
    assert (job.workers, job.epochs) == (3, 9)


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
    st.fixed_dictionaries({"task_peak": measures("task"), "node_peak": measures("node"), "tasks_per_node": counts}),
    st.none() | st.builds(Amount, st.sampled_from([GIB, 64 * GIB]), st.sampled_from(["cpu", "node", "job"])),
    st.fixed_dictionaries(dict.fromkeys(("nodes", "ntasks-per-node", "cpus-per-task", "gpus"), st.integers(1, 8))),
)
def test_no_fix_gives_a_node_less_whatever_slurm_grants(tmp_path_factory, shape, memory, step, seen, got, free):
    lines = [f"#SBATCH --{key}={value}\n" for key, value in (shape | memory).items() if value is not None]
    path = tmp_path_factory.mktemp("grid") / "a.slurm"
    path.write_text(f"#!/bin/bash\n#SBATCH --partition=p\n{''.join(lines)}srun {step}python a.py\n")
    fix = make_fix(path, diagnosis(), Job(request=got, **seen))
    before, after = grants(path.read_text(), free), grants(fix.text, free)
    if not before.keys() & set(KEYS) and "mem" in after:  # only written where the accounting shows what there was
        before["mem"] = got.bytes
    assert before.keys() == after.keys()
    assert all(after[key] >= size for key, size in before.items())


@pytest.mark.parametrize(("name", "text"), [("a.slurm", "echo hello\n"), ("a.yaml", "services: [")])
def test_what_cannot_be_corrected_is_an_error_of_three_parts(script, name, text):
    with pytest.raises(UsageError, match="neither an #SBATCH line") as caught:
        make_fix(script(text, name), diagnosis())
    assert caught.value.rule and caught.value.remedy


@given(st.text(alphabet="#SBATCH -=abc19 G\n\\$\"'{}.,;&|\t", max_size=200))
def test_any_text_is_read_and_keeps_its_lines_where_nothing_is_to_be_fixed(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "a.slurm"
    path.write_text("#SBATCH --time=1:00:00\n" + text)
    assert read(path).limit_seconds
    fix = make_fix(path, diagnosis("none", "own_exception"))
    assert fix.edits or fix.text.splitlines() == path.read_text().splitlines()
