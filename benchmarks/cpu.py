"""Wall-clock time of a train step on this CPU, in several ways side by side.

    PYTHONPATH=. python benchmarks/cpu.py [--model mlp] [--batch N] [--rounds 15]
        [--modes float32 by_hand ours] [--tensorflow PYTHON] [--python PYTHON]
        [--json FILE]

The model is `models/mlp.py`, of 1024 examples, or two layers of `models/gpt2.py` with
4000 words, on 4 texts of 256. Every mode runs in a process of its own, and they take
turns, one step each, while all others wait; so what else the machine does falls on all
alike. Shown are medians, and the median over the rounds of the ratio to float32 of
the same round. With `--tensorflow`, the interpreter of an environment with
`tensorflow-cpu`, TensorFlow runs the MLP too, in float32 and with its own pass
(`auto_mixed_precision_onednn_bfloat16`); its ratio is to its own float32.

Times mean something only on an idle machine: the load average before, during and after
is part of the result. bfloat16 is fast on CPUs with AVX512-BF16 or AMX.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).parent

# What is not as in the other benchmarks: a step is to take less than a second.
SIZES: dict[str, dict[str, int]] = {
    "mlp": {},
    "gpt2": {"length": 256, "layers": 2, "vocabulary": 4000},
}
BATCHES = {"mlp": 1024, "gpt2": 4}


class Worker:
    """A process that runs one step whenever it is asked, and says how long it took."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.loss = self.read()

    def read(self) -> float:
        """The next number that the process says; its other lines are skipped."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("bench "):
                return float(line.split()[1])
        raise RuntimeError(f"{self.process.args} ended before it said anything")

    def step(self) -> float:
        """Seconds of one step."""
        assert self.process.stdin is not None
        print("step", file=self.process.stdin, flush=True)
        return self.read()

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(model: str, mode: str, batch: int) -> None:
    """Runs steps in this process, as `Worker` asks for them."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import models
    import modes

    module = models.load(model)
    size = module.Size(batch=batch, **SIZES[model])
    made = modes.MODES[mode](module, size)
    workload = module.make(jax.numpy.float32, size)
    params, state = workload.init(jax.random.key(0))
    opt_state = workload.optimizer.init(params)
    data = workload.batch(jax.random.key(1))
    step = jax.jit(made.step, donate_argnums=(0, 1))
    for _ in range(3):
        params, opt_state, state, loss = step(params, opt_state, state, data)
    print("bench", float(loss), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        out = step(params, opt_state, state, data)
        params, opt_state, state, loss = jax.block_until_ready(out)
        print("bench", time.perf_counter() - start, flush=True)


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """The command of every mode's process."""
    batch = str(options.batch)
    size = ["--model", options.model, "--batch", batch]
    found = {
        mode: [options.python, __file__, "--serve", mode, *size]
        for mode in options.modes
    }
    if options.tensorflow:
        script = str(HERE / "cpu_tensorflow.py")
        for mode in ("float32", "auto"):
            found[f"tensorflow {mode}"] = [options.tensorflow, script, mode, batch]
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Lets the processes take turns."""
    load = [os.getloadavg()[0]]
    workers = {mode: Worker(c) for mode, c in commands(options).items()}
    times: dict[str, list[float]] = {mode: [] for mode in workers}
    for worker in workers.values():  # so that none of them is cold in the first round
        worker.step()
    for _ in range(options.rounds):
        for mode, worker in workers.items():
            times[mode].append(worker.step())
        load.append(os.getloadavg()[0])
    for worker in workers.values():
        worker.close()
    result = {
        mode: {"ms": 1e3 * statistics.median(t), "loss": workers[mode].loss}
        for mode, t in times.items()
    }
    for mode, cells in result.items():
        base = "tensorflow float32" if mode.startswith("tensorflow") else "float32"
        pairs = zip(times[mode], times.get(base, []), strict=False)
        ratios = sorted(a / b for a, b in pairs)
        if ratios:
            cells["of_float32"] = statistics.median(ratios)
            quarter = len(ratios) // 4
            cells["quartiles"] = [ratios[quarter], ratios[-1 - quarter]]
    return {"modes": result, "load": [round(x, 2) for x in load]}


def machine() -> dict[str, Any]:
    """The processor and what it can do in half precision."""
    info = pathlib.Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", info)
    flags = sorted(set(re.findall(r"\b(avx512_bf16|amx_bf16|avx512_fp16)\b", info)))
    return {
        "processor": name[1] if name else platform.processor(),
        "cores": os.cpu_count(),
        "half": flags,
    }


def version(python: str, package: str) -> str:
    """The version of a package in another environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or importlib.metadata.version(package)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="mlp")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--modes", nargs="+", default=["float32", "by_hand", "ours"])
    parser.add_argument("--python", default=sys.executable, help="runs the JAX modes")
    parser.add_argument("--tensorflow", metavar="PYTHON")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.batch = options.batch or BATCHES[options.model]
    if options.serve:
        serve(options.model, options.serve, options.batch)
        return
    if options.tensorflow and options.model != "mlp":
        parser.error("TensorFlow runs the MLP alone")
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "jax": version(options.python, "jax"),
        **machine(),
        "model": options.model,
        "batch": options.batch,
        "rounds": options.rounds,
        **measure(options),
    }
    if options.tensorflow:
        result["tensorflow"] = version(options.tensorflow, "tensorflow-cpu")
    for mode, cells in result["modes"].items():
        ratio = cells.get("of_float32", float("nan"))
        low, high = cells.get("quartiles", (float("nan"),) * 2)
        print(
            f"{mode:20} {cells['ms']:9.1f} ms  {ratio:.3f} of float32 "
            f"({low:.3f} to {high:.3f})  loss {cells['loss']:.4f}"
        )
    print(f"load average {result['load'][0]} before, {max(result['load'])} at most")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
