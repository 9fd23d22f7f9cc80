"""What a script says of itself, by its syntax."""

import textwrap

import pytest

from memfit.doctor import Setup

LOADER = "import polars\nfrom torch.utils.data import DataLoader\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("DataLoader(d)", "nothing forks here"),
        ("DataLoader(d, num_workers=4)", "(num_workers=4)"),
        ("DataLoader(d, 8, True, None, None, 6)", "(num_workers=6)"),
        ("N = 3\nDataLoader(d, num_workers=N)", "(num_workers=3)"),
        ("N: int = 3\nDataLoader(d, num_workers=N)", "(num_workers=3)"),
        ("TrainingArguments(dataloader_num_workers=5)", "(num_workers=5)"),
        ("N = 3\nN = 4\nDataLoader(d, num_workers=N)", "(num_workers=N, not known here: --workers gives it)"),
        ("n = int(n)\nDataLoader(d, num_workers=n)", "(num_workers=n, not known here"),
        ("DataLoader(d, num_workers=int(os.environ['W']))", "(num_workers=int(os.environ['W']), not known here"),
        ("p.add_argument('--w', default=2)\nDataLoader(d, num_workers=args.w)", "(num_workers=args.w, not known here"),
        ("DataLoader(d, **options)", "(num_workers=**, not known here"),
    ],
)
def test_the_number_of_workers_is_known_from_a_literal_or_a_constant_alone(diagnose, text, told):
    [check] = diagnose(LOADER + text)["fork"]
    assert told in check.finding


def test_an_alias_is_the_same_loader_and_its_prefetch_is_read(diagnose):
    script = "from torch.utils.data import DataLoader as L\nL(d, num_workers=2, prefetch_factor=4)\n"
    assert "2 workers x 4 batches" in diagnose(script, setup=Setup(threads=1, batch_bytes=1))["/dev/shm"][0].finding


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import multiprocessing as mp\nmp.Pool(2)", "mp.Pool at train.py:3 forks"),
        ("from multiprocessing import Process\nProcess(target=f)", "Process at train.py:3 forks"),
        ("import os\nos.fork()", "os.fork at train.py:3 forks"),
        ("from psutil import Process\nProcess(1)", "nothing forks here"),
        ("import psutil\npsutil.Process(1)", "nothing forks here"),
        ("import multiprocessing\nmultiprocessing.get_context('spawn').Pool()", "nothing forks here"),
        ("import multiprocessing as mp\nctx = mp.get_context('spawn')\nctx.Process(target=f)", "nothing forks here"),
        ("from concurrent.futures import ProcessPoolExecutor as P\nP(mp_context=mp.get_context('forkserver'))",
         "nothing forks here"),
        (f"{LOADER}DataLoader(d, num_workers=2, multiprocessing_context=mp.get_context('spawn'))", "nothing forks here"),
    ],
)  # fmt: skip
def test_what_starts_processes_is_found_with_the_start_method_that_it_names(diagnose, text, told):
    [check] = diagnose(f"import polars\n{text}\n")["fork"]
    assert told in check.finding


def test_a_variable_set_after_the_import_of_its_reader_is_told_from_one_set_before(diagnose):
    script = """
        import os
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch
        os.environ.setdefault("MKL_NUM_THREADS", "1")
    """
    late = [one.finding for one in diagnose(textwrap.dedent(script))["threads"] if "is set at" in one.finding]
    assert late == ["MKL_NUM_THREADS is set at train.py:5, after import torch"]


def test_modules_beside_the_script_are_read_one_level_deep(diagnose, tmp_path):
    (tmp_path / "project/lib").mkdir(parents=True)
    files = {
        "features.py": "import polars\nimport deeper\n",
        "deeper.py": "import grpc\n",
        "lib/__init__.py": "",
        "lib/data.py": "import torch\nos.fork()\n",
    }
    found = diagnose("import features, numpy\nfrom lib import data\n", files=files)
    assert found["script"][0].finding == "train.py and 3 modules beside it read: 6 imports, 0 loaders"
    assert "polars (features.py:1)" in found["fork"][0].finding and "grpc" not in found["fork"][0].finding
    assert all("os.fork at lib/data.py:2" in one.finding for one in found["fork"])


def test_a_script_is_never_run_and_one_that_cannot_be_read_is_told(diagnose, tmp_path):
    assert diagnose("open('trace', 'w')\nraise SystemExit(3)\n")["script"][0].verdict == "ok"
    assert not (tmp_path / "project/trace").exists()
    [deep] = diagnose("x = " + "+".join(["1"] * 20_000))["script"]
    assert (deep.verdict, deep.source) == ("warning", "train.py")
    large = "#" * (4 << 20) + "\nx = 1\n"
    assert "not read: train.py: larger than 4 MiB" in [one.finding for one in diagnose(large)["script"]]


@pytest.mark.parametrize(
    ("text", "site"),
    [("model.cuda()", 3), ("x = 1\nmodel.to('cuda:0')", 4), ("torch.device('cuda')", 3), ("model.to('cpu')", None),
     ("torch.cuda.is_available()", None)],
)  # fmt: skip
def test_the_first_use_of_a_gpu_is_found(diagnose, text, site):
    found = diagnose(f"from torch.utils.data import DataLoader\nDataLoader(d, num_workers=1)\n{text}\n")["fork"]
    assert [f"the GPU is used at train.py:{site}" in one.finding for one in found] == [site is not None]


@pytest.mark.parametrize(
    ("data", "site"),
    [(b"def f(:\n", "train.py:1"), (b"x\0", "train.py"), (b"x = 1\ny = (\n", "train.py:2"), (b"x = 1\ny = '\xe4'\n", "train.py:2"), (b"\xef\xbb\xbfx = 1\n", None), (b"# -*- coding: latin-1 -*-\nx = '\xe4'\n", None)],
)  # fmt: skip
def test_what_python_would_refuse_is_told_with_its_line_and_what_it_takes_is_read(diagnose, tmp_path, data, site):
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").write_bytes(data)
    [check] = diagnose(words=["python", "train.py"])["script"]
    assert (check.verdict, check.source) == (("warning", site) if site else ("ok", "train.py"))
