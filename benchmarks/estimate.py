"""What `memfit estimate` says of a 3B T5 and an 8B Llama, what that takes, and on which cards the T5 can be trained.

    python benchmarks/estimate.py [--layers N] [--skip-traced] [--json FILE]

*Speed*: each of the two models is traced by a process of its own that may use two cores, everything from its start on
counted: wall clock, CPU seconds and its own memory at the peak. The T5 has the shape of the v1.1 XL models (24 + 24
blocks of width 2048, 2.85 billion parameters), the Llama that of the 8B models.

*Grid*: the T5 with batches of 8, sources of 512 tokens and targets of 128, on devices of 24, 32 and 80 GB; weights,
gradients and moments in bf16, or the same with fp32 copies of the weights, or fp32 with autocast to bf16; with and
without gradient checkpointing; AdamW, and AdamW with moments in 8 bits; clipped, and updated by a fused kernel, as
without that the update takes temporaries as large as the weights. Every row is by the formula; where a row was traced
too, the traced figures stand behind it. *Fits*: the bound is within the device's memory, CUDA's context included.

Exit status: 0 all targets met, 1 one missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness import parser, print_table, told, write_json
from memfit.estimation import Setup, estimate_config, estimate_formula, find_gpu
from memfit.units import GIB

T5_XL = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 2048, "d_kv": 64, "d_ff": 5120,
    "num_heads": 32, "num_layers": 24, "num_decoder_layers": 24, "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "is_encoder_decoder": True,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip
MOST_SECONDS, MOST_BYTES = 60, 2 * GIB
BASE = Setup(batch=8, seq_len=512, target_len=128, foreach=False)
GPUS = ("RTX 4090", "RTX 5090", "A100-80GB")
FORMS = {
    "pure bf16": BASE,
    "fp32 masters": replace(BASE, master_weights=True),
    "bf16-amp": replace(BASE, dtype="bf16-amp"),
}
TRACED = (
    ("RTX 5090", "pure bf16", "full", "adamw"),
    ("RTX 4090", "pure bf16", "full", "adamw8bit"),
    ("RTX 5090", "bf16-amp", "full", "adamw8bit"),
    ("A100-80GB", "fp32 masters", "none", "adamw"),
)
#: GiB of weights, gradients and moments of 2.85 billion parameters, before any activation: 8 and 16 bytes of each.
STATES = (
    ("pure bf16", BASE, 21.2, 21.3),
    ("fp32 masters", replace(BASE, master_weights=True), 42.0, 48.0),
)


def trace_apart(config: Mapping[str, Any], setup: Setup, gpu: str | None) -> dict[str, Any]:
    """The traced estimate by a process of its own on two cores, and its seconds and bytes."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"config": config, "setup": asdict(setup), "gpu": gpu}, file)
        file.flush()
        cores = set(sorted(os.sched_getaffinity(0))[:2])
        start = time.monotonic()
        child = subprocess.Popen(
            [sys.executable, __file__, "--request", file.name],
            stdout=subprocess.PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        assert child.stdout is not None
        printed = child.stdout.read()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"the tracing process ended with {child.returncode}")
    found: dict[str, Any] = json.loads(printed)
    found["wall_seconds"] = time.monotonic() - start
    found["cpu_seconds"] = used.ru_utime + used.ru_stime
    found["rss_bytes"] = used.ru_maxrss * 1024
    return found


def figure(interval: Mapping[str, int]) -> str:
    return f"{interval['value'] / GIB:6.1f} <= {interval['upper'] / GIB:6.1f}"


def check_speed(models: Mapping[str, tuple[dict[str, Any], Setup]], rows: list[dict[str, Any]]) -> Iterator[bool]:
    for name, (config, setup) in models.items():
        found = trace_apart(config, setup, None)
        rows.append({"name": name, **found})
        device, seconds, size = found["device"], found["wall_seconds"], found["rss_bytes"]
        text = f"allocated {figure(device['allocated_bytes'])}, device {figure(device['device_bytes'])} GiB"
        text = f"{name}: {seconds:.0f} s of at most {MOST_SECONDS} ({found['cpu_seconds']:.0f} of CPU), {text}"
        is_met = seconds <= MOST_SECONDS and size < MOST_BYTES and found["method"] == "traced"
        yield told(is_met, f"{text}; {size / GIB:.2f} GiB of at most {MOST_BYTES / GIB:.0f}, {found['method']}")


def check_states(config: dict[str, Any]) -> Iterator[bool]:
    print("\nweights, gradients and moments before any activation, by the formula")
    for name, setup, low, high in STATES:
        parts = estimate_formula(config, replace(setup, num_microbatches=2)).to_dict()["parts"]
        size = sum(parts[part]["value"] for part in ("weights", "gradients", "optimizer")) / GIB
        yield told(low <= round(size, 1) <= high, f"{name}: {size:.1f} GiB, in {low} to {high}")


def check_grid(config: dict[str, Any], rows: list[dict[str, Any]], *, traced: bool) -> Iterator[bool]:
    keys, lines = ("gpu", "form", "checkpointing", "optimizer"), list[tuple[object, ...]]()
    lines.append(("device", *keys[1:], "formula, GiB", "verdict", "traced"))
    for chosen in itertools.product(GPUS, FORMS, ("none", "full"), ("adamw", "adamw8bit")):
        gpu, form, blocks, optimizer = chosen
        setup = Setup(**asdict(FORMS[form]) | {"gradient_checkpointing": blocks, "optimizer": optimizer})
        quick = estimate_formula(config, setup, gpu=find_gpu(gpu)).to_dict()
        row: dict[str, Any] = dict(zip(keys, chosen, strict=True)) | {"formula": quick}
        text = ""
        if traced and chosen in TRACED:
            found = row["traced"] = trace_apart(config, setup, gpu)
            text = f"{figure(found['device']['device_bytes'])} {found['verdict']}"
        rows.append(row)
        lines.append((*chosen, figure(quick["device"]["device_bytes"]), quick["verdict"], text))
    print_table(lines)
    for row in [row for row in rows if "traced" in row]:
        bound, value = row["formula"]["device"]["allocated_bytes"], row["traced"]["device"]["allocated_bytes"]["value"]
        name = ", ".join(row[key] for key in keys)
        text = f"the formula's bound holds for what was traced ({value / GIB:.1f} <= {bound['upper'] / GIB:.1f} GiB)"
        yield told(value <= bound["upper"], f"{name}: {text}")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, help="so many blocks in place of all, to try it out")
    options.add_argument("--skip-traced", action="store_true", help="only what the formula says")
    options.add_argument("--request", type=Path, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.request is not None:
        asked = json.loads(chosen.request.read_text())
        gpu = None if asked["gpu"] is None else find_gpu(asked["gpu"])
        print(json.dumps(estimate_config(asked["config"], Setup(**asked["setup"]), gpu=gpu).to_dict()))
        return 0
    t5, llama = dict(T5_XL), dict(LLAMA_8B)
    if chosen.layers:
        t5 |= {"num_layers": chosen.layers, "num_decoder_layers": chosen.layers}
        llama |= {"num_hidden_layers": chosen.layers}
    speed, grid = list[dict[str, Any]](), list[dict[str, Any]]()
    llama_setup = Setup(batch=1, seq_len=4096, foreach=False)
    models = {"T5 3B, 8 x 512 to 128": (t5, BASE), "Llama 8B, 1 x 4096": (llama, llama_setup)}
    met = [] if chosen.skip_traced else list(check_speed(models, speed))
    met += check_states(t5)
    met += check_grid(t5, grid, traced=not chosen.skip_traced)
    write_json(chosen.json, {"speed": speed, "grid": grid})
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
