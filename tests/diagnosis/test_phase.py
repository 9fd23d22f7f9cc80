"""The phase is that of the innermost frame that means one, else of the nearest line that names one."""

import pytest

from reading import look

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB of"
    " which 1.10 GiB is free. Of the allocated memory 36.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by"
    " PyTorch but unallocated."
)
LIB = "/opt/env/lib/python3.11/site-packages/"
MODULE = (LIB + "torch/nn/modules/module.py", "_call_impl", "return self._call_impl(*args, **kwargs)")


def traceback(*frames, error=OOM):
    lines = ["Traceback (most recent call last):"]
    for file, name, source in frames:
        lines += [f'  File "{file}", line 12, in {name}', f"    {source}"]
    return "\n".join([*lines, error])


FRAMES = [
    ("train", [("train.py", "main", "train(model, loader)"), ("train.py", "train", "loss.backward()")]),
    ("train", [("train.py", "<module>", "outputs = model(inputs)"), MODULE, ("net.py", "forward", "x = self.a(x)")]),
    ("train", [("t.py", "fit_all", "x = 1"), (LIB + "torch/optim/adamw.py", "step", "state['exp_avg'] = zeros(p)")]),
    (
        "train",
        [("t.py", "train_epoch", "out = net(x)"), (LIB + "torch/utils/checkpoint.py", "checkpoint", "run(*args)")],
    ),
    ("validate", [("t.py", "train", "loss = self.val_one_epoch(loader)"), ("t.py", "val_one_epoch", "self.net(x)")]),
    ("validate", [("t.py", "train", "evaluate(model)"), ("t.py", "evaluate", "y = model(x)"), MODULE]),
    ("validate", [(LIB + "pytorch_lightning/trainer/trainer.py", "_run_sanity_check", "val_loop.run()"), MODULE]),
    ("checkpoint", [("t.py", "train", "save_checkpoint(model)"), ("t.py", "save_checkpoint", "model.state_dict()")]),
    ("checkpoint", [("t.py", "main", "ckpt = torch.load(path)"), (LIB + "torch/serialization.py", "load", "_load()")]),
    ("checkpoint", [("t.py", "train", "self.restore()"), ("c.py", "restore", "opt.load_state_dict(c['opt'])")]),
    (
        "build",
        [("t.py", "main", "model = model.to(device)"), (LIB + "torch/nn/modules/module.py", "to", "self._apply()")],
    ),
    ("build", [("t.py", "train", "net = Net(cfg).cuda()"), (LIB + "torch/nn/modules/module.py", "_apply", "fn(p)")]),
    ("build", [("t.py", "main", "AutoModel.from_pretrained(n)"), (LIB + "transformers/modeling_utils.py", "f", "g()")]),
    ("load", [("t.py", "main", "d = load_dataset(p)"), ("data/reader.py", "load_dataset", "rows = list(file)")]),
    ("load", [("t.py", "train", "for x in loader:"), ("d.py", "__getitem__", "return torch.load(self.files[i])")]),
    ("unknown", [("generate.py", "main", "out = model.generate(**x)"), MODULE, ("m.py", "attend", "x = a @ b")]),
]


@pytest.mark.parametrize(("phase", "frames"), FRAMES)
def test_the_innermost_frame_that_means_a_phase_decides(phase, frames):
    assert look(traceback(*frames)).phase == phase


@pytest.mark.parametrize(
    ("before", "phase"),
    [
        ("Epoch 3:  45%|####| 450/1000 [10:00<12:00,  1.3s/it, loss=0.3]", "train"),
        ("Validating:  15%|#   | 513/3434 [2:04:33<16:18:51, 20.11s/it]", "validate"),
        ("step 500 loss 0.2\nSaving model checkpoint to out/checkpoint-500", "checkpoint"),
        ("Loading checkpoint shards:  33%|##    | 1/3 [00:09<00:18,  9.25s/it]", "build"),
        ("Loading dataset:  93%|####| 166/178 [21:03<01:18,  6.56s/it]", "load"),
        ("epoch 4 step 100 loss 0.1\nvalidation finished, val_loss 0.3", "train"),
        ("hello", "unknown"),
    ],
)
def test_without_frames_the_nearest_line_that_names_a_phase_decides(before, phase):
    assert look(f"{before}\n{OOM}").phase == phase


def test_a_dead_worker_was_loading_whatever_the_main_thread_did():
    frames = [
        ("t.py", "train", "loss.backward()"),
        (LIB + "torch/utils/data/_utils/signal_handling.py", "handler", "f()"),
    ]
    error = "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed. "
    assert look(traceback(*frames, error=error)).phase == "load"


def test_a_fork_for_a_validation_loader_is_validation():
    frames = [
        ("t.py", "main", "validate(val_loader, model)"),
        ("t.py", "validate", "for x in val_loader:"),
        ("/usr/lib/python3.11/multiprocessing/popen_fork.py", "_launch", "self.pid = os.fork()"),
    ]
    assert look(traceback(*frames, error="OSError: [Errno 12] Cannot allocate memory")).phase == "validate"


def test_frames_of_a_notebook_and_of_a_rich_console_are_read():
    notebook = (
        "OutOfMemoryError     Traceback (most recent call last)\nCell In[3], line 1\n----> 1 run()\n\n"
        "File ~/code/engine.py:44, in Engine.evaluate(self, data)\n     43 x = 1\n---> 44 y = self.net(x)\n\n" + OOM
    )
    assert look(notebook).phase == "validate"
    rich = "│ /home/me/engine.py:44 in save_checkpoint      │\n│ ❱ 44 │   state = net.state_dict()       │\n" + OOM
    assert look(rich).phase == "checkpoint"


def test_what_was_printed_says_more_than_the_path_of_a_file():
    trace = traceback(
        ("/home/me/training/run.py", "write", "file.write(rows)"), error="OSError: [Errno 28] No space left on device"
    )
    assert look(f"epoch 1 step 4 loss 0.1\nsaving checkpoint\n{trace}").phase == "checkpoint"


def test_a_decorators_wrapper_builds_nothing():
    assert look(traceback(("tools.py", "wrapper", "return function(*args)"))).phase == "unknown"


@pytest.mark.parametrize(("name", "phase"), [("validate", "validate"), ("train_epoch", "train")])
def test_the_frames_by_which_torch_calls_a_module_mean_no_phase(name, phase):
    text = (
        "Traceback (most recent call last):\n"
        f'  File "/home/me/main.py", line 9, in {name}\n    out = model(x)\n'
        '  File "/e/site-packages/torch/nn/modules/module.py", line 1751, in _wrapped_call_impl\n'
        "    return self._call_impl(*args, **kwargs)\n"
        '  File "/e/site-packages/torch/nn/modules/module.py", line 1762, in _call_impl\n'
        "    return forward_call(*args, **kwargs)\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.\n"
    )
    assert look(text).phase == phase
