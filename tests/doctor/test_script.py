"""What a script says of itself, by its syntax."""

import textwrap

import pytest

from memfit.doctor._script import Outside, read_script


def read(text, **outside):
    return read_script(None, Outside(**outside), text=textwrap.dedent(text))


LOADER = "from torch.utils.data import DataLoader\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("DataLoader(d)", 0),
        ("DataLoader(d, num_workers=4)", 4),
        ("DataLoader(d, 8, True, None, None, 6)", 6),
        ("N = 3\nDataLoader(d, num_workers=N)", 3),
        ("N: int = 3\nDataLoader(d, num_workers=N * 2 - 1)", 5),
        ("N = 3\nN = 4\nDataLoader(d, num_workers=N)", None),
        ("n = int(n)\nDataLoader(d, num_workers=n)", None),
        ("DataLoader(d, num_workers=int(os.environ.get('NUM_WORKERS', 2)))", 7),
        ("DataLoader(d, num_workers=int(os.environ['NUM_WORKERS']))", 7),
        ("DataLoader(d, num_workers=int(os.getenv('OTHER', '2')))", 2),
        ("DataLoader(d, num_workers=os.cpu_count() // 2)", 32),
        ("p.add_argument('-w', '--num-workers', default=2)\nDataLoader(d, num_workers=args.num_workers)", 9),
        ("p.add_argument('--other', default=2)\nDataLoader(d, num_workers=args.other)", 2),
        ("p.add_argument('--other')\nDataLoader(d, num_workers=args.other)", None),
        ("DataLoader(d, **options)", None),
        ("DataLoader(d, num_workers=compute())", None),
        ("TrainingArguments(dataloader_num_workers=5)", 5),
    ],
)
def test_the_number_of_workers_is_known_where_the_syntax_the_environment_or_the_command_tells(text, value):
    env, words = {"NUM_WORKERS": "7"}, ["--lr", "1", "--num-workers=9"]
    script = read(LOADER + text, env=env, arguments=words, num_cpus=64)
    assert [one.num_workers for one in script.loaders] == [value]


def test_an_alias_is_the_same_loader_and_its_context_and_prefetch_are_read():
    script = read("""
        from torch.utils.data import DataLoader as L
        L(d, num_workers=2, multiprocessing_context=mp.get_context("spawn"), prefetch_factor=4)
        L(d, num_workers=2, multiprocessing_context=how)
    """)
    first, second = script.loaders
    assert (first.site, first.method, first.prefetch_factor) == ("-c:3", "spawn", 4)
    assert (second.method, second.prefetch_factor) == ("", 2)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import multiprocessing as mp\nmp.Pool(2)", [("mp.Pool", None)]),
        ("from multiprocessing import Process\nProcess(target=f)", [("Process", None)]),
        ("from psutil import Process\nProcess(1)", []),
        ("import psutil\npsutil.Process(1)", []),
        ("import multiprocessing\nmultiprocessing.get_context('spawn').Pool()", [("multiprocessing.get_context.Pool", "spawn")]),
        ("import multiprocessing as mp\nctx = mp.get_context('spawn')\nctx.Process(target=f)", [("ctx.Process", "spawn")]),
        ("from concurrent.futures import ProcessPoolExecutor as P\nP(mp_context=mp.get_context('forkserver'))",
         [("P", "forkserver")]),
        ("import os\nos.fork()", [("os.fork", "fork")]),
    ],
)  # fmt: skip
def test_what_starts_processes_is_found_with_the_start_method_that_it_names(text, found):
    assert [(one.name, one.method) for one in read(text).forks] == found


def test_a_variable_set_after_the_import_of_its_reader_is_told_from_one_set_before():
    script = read("""
        import os
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch
        os.environ.setdefault("MKL_NUM_THREADS", "1")
    """)
    told = [(one.name, one.site, one.more) for one in script.variables]
    assert told == [("OMP_NUM_THREADS", "-c:3", None), ("MKL_NUM_THREADS", "-c:5", "torch")]


def test_modules_beside_the_script_are_read_one_level_deep_and_are_no_package(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "train.py").write_text("import features, numpy\nfrom lib import data\n")
    (tmp_path / "features.py").write_text("import polars\nimport deeper\n")
    (tmp_path / "deeper.py").write_text("import grpc\n")
    (tmp_path / "lib/__init__.py").write_text("")
    (tmp_path / "lib/data.py").write_text("import torch\n")
    script = read_script(tmp_path / "train.py", Outside(), cwd=tmp_path)
    assert script.imports["polars"] == "features.py:1"
    assert {"numpy", "polars", "torch", "deeper"} == set(script.imports)
    assert script.files == ["train.py", "features.py", "lib/__init__.py", "lib/data.py"]


def test_a_script_is_never_run_and_one_that_is_no_python_is_told(tmp_path):
    (tmp_path / "train.py").write_text("open('trace', 'w')\nraise SystemExit(3)\n")
    (tmp_path / "bad.py").write_text("def f(:\n")
    assert read_script(tmp_path / "train.py", Outside(), cwd=tmp_path).errors == []
    assert not (tmp_path / "trace").exists()
    assert read_script(tmp_path / "bad.py", Outside(), cwd=tmp_path).errors[0].site == "bad.py:1"
    (tmp_path / "deep.py").write_text("x = " + "+".join(["1"] * 20_000))
    assert len(read_script(tmp_path / "deep.py", Outside(), cwd=tmp_path).errors) == 1
    assert read_script(tmp_path / "none.py", Outside(), cwd=tmp_path).errors[0].site == "none.py"


@pytest.mark.parametrize(
    ("text", "site"),
    [("model.cuda()", "-c:1"), ("x = 1\nmodel.to('cuda:0')", "-c:2"), ("torch.device('cuda')", "-c:1"),
     ("model.to('cpu')", None), ("torch.cuda.is_available()", None)],
)  # fmt: skip
def test_the_first_use_of_a_gpu_is_found(text, site):
    assert read(text).cuda == site


@pytest.mark.parametrize(
    ("data", "site"),
    [(b"x = 1\ny = (\n", "a.py:2"), (b"x = 1\n\0", "a.py:2"), (b"x = 1\ny = '\xe4'\n", "a.py:2"),
     (b"\xef\xbb\xbfx = 1\n", None), (b"# -*- coding: latin-1 -*-\nx = '\xe4'\n", None)],
)  # fmt: skip
def test_what_python_would_refuse_is_told_with_its_line_and_what_it_takes_is_read(tmp_path, data, site):
    (tmp_path / "a.py").write_bytes(data)
    errors = read_script(tmp_path / "a.py", Outside(), cwd=tmp_path).errors
    assert [(one.site, one.more == "syntax") for one in errors] == ([(site, True)] if site else [])
