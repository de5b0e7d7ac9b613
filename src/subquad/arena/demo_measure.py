"""Time and memory of the demonstration, measured in a child process on one thread.

``python -m subquad.arena.demo_measure`` reads one job as JSON from standard input and writes
JSON lines: ``{"progress": ...}`` as it goes and ``{"result": ...}`` at the end. Peak memory is
that of a forked copy of the child: its peak resident set less its own at the fork, so imports,
weights and inputs do not count.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from subquad.convert.cost import MIB, peak_memory

__all__ = ["embed_rows", "measure", "peak_memory", "swap"]


def swap(model: nn.Module, mechanism: str, seed: int = 0) -> None:
    """Puts a mechanism into every layer: a spec, ``"exact"`` or ``"uniform"``."""
    from subquad.arena.uniform import Uniform
    from subquad.convert.routing import SLOT
    from subquad.convert.swap import convert, converted_layers, revert

    if mechanism == "exact":
        revert(model)
        return
    convert(model, "softmax" if mechanism == "uniform" else mechanism, seed=seed)
    if mechanism == "uniform":
        for _, layer in converted_layers(model):
            old: Any = layer._modules[SLOT]
            layer._modules[SLOT] = Uniform(head_dim=old.head_dim, num_heads=old.num_heads)


def measure(job: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Runs a job in a child process with one thread and returns its result.

    Raises:
        RuntimeError: if the child fails, with what it wrote to standard error.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "subquad.arena.demo_measure"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        assert child.stdin
        assert child.stdout
        child.stdin.write(json.dumps(job))
        child.stdin.close()
        result: dict[str, Any] | None = None
        for line in child.stdout:
            message = json.loads(line)
            if "progress" in message:
                progress(message["progress"])
            else:
                result = message["result"]
        child.stdout.close()
        if child.wait() or result is None:
            errors.seek(0)
            problem = errors.read()
            raise RuntimeError(f"measuring failed in the child process:\n{problem}")
    return result


# ---- jobs --------------------------------------------------------------------------------


def embed_rows(
    model: nn.Module, job: dict[str, Any], say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Embeddings of the passages, and errors of the layers, with each row's attention."""
    from subquad.arena.encoders import batch, embed
    from subquad.convert.compare import layer_errors

    ids, pad = job["ids"], job["pad"]
    found = {}
    for row in job["rows"]:
        say(f"embedding {len(ids)} passages: {row}")
        swap(model, row)
        layers = []
        if row != "exact":
            inputs = batch(ids[: job["layer_passages"]], pad)
            layers = [dataclasses.asdict(layer) for layer in layer_errors(model, inputs)]
        found[row] = {"embedding": embed(model, ids, pad).tolist(), "layers": layers}
    swap(model, "exact")
    return found


def _fidelity_job(job: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    from subquad.arena.encoders import load_encoder

    return embed_rows(load_encoder(job["model"]).model, job, say)


def _model_job(job: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds per passage, interleaved, and peak memory, for each row."""
    from subquad.arena.encoders import load_encoder

    model = load_encoder(job["model"]).model
    config: Any = model.config
    ids = torch.arange(job["batch"] * job["length"]).reshape(job["batch"], -1)
    ids = ids * 7919 % int(config.vocab_size)
    rows: list[str] = job["rows"]
    times: dict[str, list[float]] = {row: [] for row in rows}
    memory: dict[str, float | None] = {}
    with torch.no_grad():
        for row in rows:
            swap(model, row)
            model(input_ids=ids[:, :32])
            say(f"memory of the model: {row}")
            memory[row] = peak_memory(
                lambda: model(input_ids=ids[:, :32]), lambda: model(input_ids=ids)
            )
        for turn in range(job["rounds"]):
            for row in rows:
                say(f"time of the model: {row}, {turn + 1} of {job['rounds']}")
                swap(model, row)
                model(input_ids=ids[:1, :32])
                start = time.perf_counter()
                model(input_ids=ids)
                times[row].append((time.perf_counter() - start) / job["batch"])
    return {row: {"seconds": statistics.median(times[row]), "memory": memory[row]} for row in rows}


_REPEAT = 6.0
"""Seconds at a length after which calls are not repeated; twice that: memory is left out."""


def _explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v


def _attention_job(job: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds and peak memory of one attention call at each length, interleaved."""
    from subquad.registry import build

    heads, width = job["heads"], job["head_dim"]
    functions: dict[str, Callable[..., Any]] = {
        "sdpa": nn.functional.scaled_dot_product_attention,
        **{
            label: build(spec, head_dim=width, num_heads=heads).eval()
            for label, spec in job["mechanisms"].items()
        },
        "explicit": _explicit,
    }
    seconds: dict[str, dict[int, float]] = {name: {} for name in ("sdpa", *job["mechanisms"])}
    memory: dict[str, dict[int, float]] = {name: {} for name in functions}
    left_out: list[str] = []
    gone: set[str] = set()
    with torch.no_grad():
        for name in seconds:
            functions[name](*torch.randn(3, 1, heads, 64, width))
        for length in job["lengths"]:
            qkv = torch.randn(3, 1, heads, length, width)
            for name in seconds:
                before = seconds[name].get(length // 2)
                # Doubling the length at most quadruples the time.
                if name not in gone and before is not None and 4.2 * before > job["budget"]:
                    gone.add(name)
                    left_out.append(
                        f"{name} from {length} tokens on: a call would take more than "
                        f"{job['budget']:g} s"
                    )
            times: dict[str, list[float]] = {n: [] for n in seconds if n not in gone}
            began = time.perf_counter()
            for turn in range(job["rounds"]):
                if turn and time.perf_counter() - began > min(_REPEAT, job["budget"] / 2):
                    break
                for name, runs in times.items():
                    say(f"attention alone: {length} tokens, time of {name}")
                    start = time.perf_counter()
                    functions[name](*qkv)
                    runs.append(time.perf_counter() - start)
            for name, runs in times.items():
                seconds[name][length] = statistics.median(runs)
            del qkv
            for name, function in functions.items():
                too_long = seconds.get(name, {}).get(length, 99.0) > min(2 * _REPEAT, job["budget"])
                if name == "explicit":
                    too_long = heads * length**2 * 4 > 600 * MIB
                if too_long:
                    continue
                say(f"attention alone: {length} tokens, memory of {name}")
                inputs = torch.randn(3, 1, heads, length, width)
                short = inputs[..., :64, :].contiguous()
                peak = peak_memory(partial(function, *short), partial(function, *inputs))
                del inputs
                if peak is not None:
                    memory[name][length] = peak
    return {"seconds": seconds, "memory": memory, "left_out": left_out}


def _main() -> None:
    job = json.loads(sys.stdin.read())
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def say(text: str) -> None:
        sys.stdout.write(json.dumps({"progress": text}) + "\n")
        sys.stdout.flush()

    jobs = {"fidelity": _fidelity_job, "model": _model_job, "attention": _attention_job}
    result = jobs[job["kind"]](job, say)
    sys.stdout.write(json.dumps({"result": result}) + "\n")


if __name__ == "__main__":
    _main()
