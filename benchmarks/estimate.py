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

from memfit.estimation import Setup, estimate_formula, find_gpu
from memfit.units import GIB, MIB

T5_XL = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_model": 2048,
    "d_kv": 64,
    "d_ff": 5120,
    "num_heads": 32,
    "num_layers": 24,
    "num_decoder_layers": 24,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "is_encoder_decoder": True,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
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
#: GiB of weights, gradients and moments of 2.85 billion parameters, before any activation: 8, 12 and 16 bytes of each.
STATES = (
    ("pure bf16", BASE, 21.2, 21.3),
    ("bf16 with fp32 moments", replace(BASE, state_dtype="fp32"), 31.8, 31.9),
    ("fp32 masters", replace(BASE, master_weights=True), 42.0, 48.0),
)


def trace_here(request: Mapping[str, Any]) -> dict[str, Any]:
    """The traced estimate of a request, in this process."""
    from memfit.estimation import estimate_config

    gpu = None if request["gpu"] is None else find_gpu(request["gpu"])
    return estimate_config(request["config"], Setup(**request["setup"]), gpu=gpu).to_dict()


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


def target(text: str, *, met: bool) -> bool:
    print(f"{'met   ' if met else 'MISSED'} {text}")
    return met


def check_speed(models: Mapping[str, tuple[dict[str, Any], Setup]], rows: list[dict[str, Any]]) -> Iterator[bool]:
    print("\ntraced                              wall s   CPU s      RSS  allocated GiB     device GiB")
    for name, (config, setup) in models.items():
        found = trace_apart(config, setup, None)
        rows.append({"name": name, **found})
        device = found["device"]
        print(
            f"{name:34} {found['wall_seconds']:7.1f} {found['cpu_seconds']:7.1f} {found['rss_bytes'] / MIB:6.0f} M "
            f"{figure(device['allocated_bytes'])} {figure(device['device_bytes'])}"
        )
        yield target(
            f"{name}: {found['wall_seconds']:.0f} s of at most {MOST_SECONDS}, "
            f"{found['rss_bytes'] / GIB:.2f} GiB of at most {MOST_BYTES / GIB:.0f}, {found['method']}",
            met=found["wall_seconds"] <= MOST_SECONDS
            and found["rss_bytes"] < MOST_BYTES
            and found["method"] == "traced",
        )


def check_states(config: dict[str, Any]) -> Iterator[bool]:
    print("\nweights, gradients and moments before any activation, by the formula")
    for name, setup, low, high in STATES:
        parts = estimate_formula(config, replace(setup, num_microbatches=2)).to_dict()["parts"]
        size = sum(parts[part]["value"] for part in ("weights", "gradients", "optimizer")) / GIB
        yield target(f"{name}: {size:.1f} GiB, in {low} to {high}", met=low <= round(size, 1) <= high)


def check_grid(config: dict[str, Any], rows: list[dict[str, Any]], *, traced: bool) -> Iterator[bool]:
    print(f"\n{'device':12}{'form':14}{'checkpointing':15}{'optimizer':12}{'formula, GiB':19}verdict")
    for gpu, form, blocks, optimizer in itertools.product(GPUS, FORMS, ("none", "full"), ("adamw", "adamw8bit")):
        setup = Setup(**asdict(FORMS[form]) | {"gradient_checkpointing": blocks, "optimizer": optimizer})
        quick = estimate_formula(config, setup, gpu=find_gpu(gpu)).to_dict()
        row: dict[str, Any] = {
            "gpu": gpu,
            "form": form,
            "checkpointing": blocks,
            "optimizer": optimizer,
            "formula": quick,
        }
        text = f"{gpu:12}{form:14}{blocks:15}{optimizer:12}{figure(quick['device']['device_bytes'])}   "
        text += f"{quick['verdict']:14}"
        if traced and (gpu, form, blocks, optimizer) in TRACED:
            found = row["traced"] = trace_apart(config, setup, gpu)
            text += f"traced: {figure(found['device']['device_bytes'])} {found['verdict']}"
        rows.append(row)
        print(text)
    for row in [row for row in rows if "traced" in row]:
        values = [row[how]["device"]["allocated_bytes"] for how in ("formula", "traced")]
        yield target(
            f"{row['gpu']}, {row['form']}, {row['checkpointing']}, {row['optimizer']}: the formula's bound holds for "
            f"what was traced ({values[1]['value'] / GIB:.1f} <= {values[0]['upper'] / GIB:.1f} GiB allocated)",
            met=values[1]["value"] <= values[0]["upper"],
        )


def main() -> int:
    """Print all tables; the exit status is the module's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="so many blocks in place of all, to try it out")
    parser.add_argument("--skip-traced", action="store_true", help="only what the formula says")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--request", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.request is not None:
        print(json.dumps(trace_here(json.loads(chosen.request.read_text()))))
        return 0
    t5, llama = dict(T5_XL), dict(LLAMA_8B)
    if chosen.layers:
        t5 |= {"num_layers": chosen.layers, "num_decoder_layers": chosen.layers}
        llama |= {"num_hidden_layers": chosen.layers}
    speed: list[dict[str, Any]] = []
    grid: list[dict[str, Any]] = []
    models = {
        "T5 3B, 8 x 512 to 128": (t5, BASE),
        "Llama 8B, 1 x 4096": (llama, Setup(batch=1, seq_len=4096, foreach=False)),
    }
    met = [] if chosen.skip_traced else list(check_speed(models, speed))
    met += check_states(t5)
    met += check_grid(t5, grid, traced=not chosen.skip_traced)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"speed": speed, "grid": grid}, indent=1))
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
