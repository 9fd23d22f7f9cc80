"""What a user installs: wheel and sdist in a fresh environment without torch, on this host and on a real Slurm."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.long, pytest.mark.slow]

BUILD = "import sys; from setuptools import build_meta as b; out = sys.argv[1]; b.build_sdist(out); b.build_wheel(out)"
DEAD = """epoch 2/5 step 40/100 loss 0.61
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacity of 23.64 GiB.
"""
GPT2 = '{"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}'


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the wheel of the tree, the wheel of its sdist, and the sdist unpacked."""
    folder = tmp_path_factory.mktemp("release")
    tree = folder / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build(tree, folder / "dist")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    build(unpacked, folder / "again")
    return next((folder / "dist").glob("*.whl")), next((folder / "again").glob("*.whl")), unpacked


def build(tree, out):
    subprocess.run([sys.executable, "-c", BUILD, out], cwd=tree, check=True, capture_output=True)


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Install the wheel of the sdist beside the packages that it asks for, and no others; return the programs' folder.

    The packages are links into this environment, for which pip has chosen them: that needs no network.
    """
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        folder / "bin/python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, built[1]], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (dist,) = Distribution.discover(path=[str(site)])
    wanted, seen = list(dist.requires), set()
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name in seen or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        found = Distribution.from_name(requirement.name)
        assert found.version in requirement.specifier
        wanted += found.requires or []
        for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(found.locate_file(top)))
    return folder / "bin"


@pytest.fixture
def call(installed, tmp_path, monkeypatch):
    """Run a program of the fresh environment in an empty folder; return its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEMFIT_", "PYTHON", "COVERAGE"))}

    def run(*words, **more):
        done = subprocess.run(
            [installed / words[0], *words[1:]],
            env={**kept, "NO_COLOR": "1", "PATH": f"{installed}{os.pathsep}{os.environ['PATH']}", **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout

    return run


def test_the_sdist_makes_the_same_wheel_and_both_hold_every_file(built):
    wheels = [{one.filename: one.CRC for one in zipfile.ZipFile(wheel).infolist()} for wheel in built[:2]]
    assert wheels[0] == wheels[1]
    src = ROOT / "src"
    files = [path.relative_to(src).as_posix() for path in src.rglob("*") if path.is_file()]
    here = {name for name in files if "__pycache__" not in name and ".egg-info" not in name}
    assert here == {name for name in wheels[0] if ".dist-info/" not in name}
    assert (built[2] / "CHANGELOG.md").exists() and not (built[2] / "tests").exists()


def test_a_fresh_environment_has_no_torch_and_knows_its_version(call):
    assert call("python", "-c", "import torch")[0] == 1
    version = ROOT.joinpath("pyproject.toml").read_text().split('version = "')[1].split('"')[0]
    assert call("memfit", "--version") == (0, f"memfit {version}\n")


def test_what_needs_no_torch_works_without_it(call, tmp_path):
    (tmp_path / "train.err").write_text(DEAD)
    (tmp_path / "gpt2.json").write_text(GPT2)
    (tmp_path / "train.py").write_text("def train(ctx):\n    return {'score': 0.5}\n")
    (tmp_path / "job.yaml").write_text(
        "experiment: train\nstages: {train: {run: [python, train.py]}}\nresources: {memory: 4GiB}\n"
    )
    estimate = ("estimate", "--hf-config", "gpt2.json", "--gpu", "24GiB", "--seq-len", "512")
    for words, shown in (
        (("budget",), "Jobs can have"),
        (("run", "--", "true"), "the command ended with exit code 0"),
        (("run", "--name", "two", "--param", "a=1,2", "--", "sh", "-c", "echo {a}"), "completed 2"),
        (("run", "train:train"), "score: 0.5"),
        (("ps", "--all"), "runs/two/run_"),
        (("watch", "two"), "completed"),
        (("report", "two"), "wrote "),
        (("diagnose", "train.err"), "out of the GPU's memory (proved)"),
        (estimate, "fits: needs"),
        (("launch", "job.yaml", "--format", "sbatch"), "#SBATCH --mem=5G"),
    ):
        code, text = call("memfit", *words)
        assert code == 0 and shown in text, (words, text)
    code, text = call("python", "-c", "import memfit; print(memfit.Budget.read().headroom_bytes)")
    assert code == 0 and int(text) > 0


def test_what_needs_torch_says_the_line_that_installs_it(call, tmp_path):
    (tmp_path / "train.py").write_text("def train(ctx):\n    from memfit import Trainer\n")
    for extra, words in (
        ("torch", ("memfit", "run", "train:train")),
        ("torch", ("python", "-c", "from memfit import Trainer")),
        ("huggingface", ("python", "-c", "import memfit.integrations.huggingface")),
        ("hpo", ("memfit", "tune", "--param", "a=1..2", "--objective", "x", "--minimize", "--", "true", "{a}")),
    ):
        code, text = call(*words)
        assert code != 0 and f"pip install 'memfit[{extra}]'" in text, (words, text)
        assert words[0] == "python" or "Traceback" not in text


@pytest.mark.root
@pytest.mark.slurm
def test_jobs_of_a_real_slurm_need_no_torch(call, cluster, tmp_path):
    words = (
        "run",
        "--backend",
        "slurm",
        "--memory",
        "60MiB",
        "--param",
        "a=1,2",
        "--",
        "sh",
        "-c",
        "echo {a} > {a}.txt",
    )
    slurm = {name: value for name, value in cluster.env.items() if os.environ.get(name) != value and name != "PATH"}
    code, text = call("memfit", *words, **slurm)
    assert code == 0 and "completed 2" in text, text
    assert [(tmp_path / f"{a}.txt").read_text() for a in (1, 2)] == ["1\n", "2\n"]
