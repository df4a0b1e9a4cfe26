"""The checks of `onefold doctor` that need MLX: the device, the BLAS, memory, and a forward on a small model.

They run in a process of their own, as a backend that does not fit can end the process that loads it. Each finding is
one line of JSON on stdout, with a line before it that says which check begins.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from onefold import backend, blas, machine
from onefold.cli.doctor_finding import Finding, State, guarded
from onefold.sizes import show_size

SLOW_GFLOPS = 6.0
"""A processor with a BLAS made for it does more on one core; the reference BLAS does 1 to 4."""
SIDE = 512
TIMES = 3
NO_MEMORY, LITTLE_MEMORY = 1_000_000_000, 4_000_000_000
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
}
TOKENS, KNOWN = 96, 64
TOLERANCE = 1e-2
"""The largest difference, as a share of the largest logit: GPUs round products of 32 bits to fewer. Wrong KV differs by
much more."""
TRIALS, TRIAL_SECONDS = 3, 60.0
"""Trials of kernels that are repeated, and what each may take."""
REPORT = "Report it, with the output of onefold doctor --json"


def device() -> Finding:
    """Whether MLX can be imported and computes, and on what; a problem if a CUDA backend has no GPU."""
    import mlx.core as mx

    name = "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
    info = {key: value for key, value in mx.device_info().items() if isinstance(value, (str, int, float))}
    facts = {"device": name, "metal": mx.metal.is_available(), **info}
    installed = backend.installed()
    if name == "cpu" and any("cuda" in found for found in installed):
        remedy = "Check that nvidia-smi lists a GPU; without one run: pip install 'onefold[cpu]' in a new environment"
        return Finding("device", "problem", "a CUDA backend is installed, and MLX finds no GPU", remedy, facts)
    if (total := mx.sum(mx.ones((1000,))).item()) != 1000:
        message = f"MLX computes wrongly: 1000 ones sum up to {total}"
        return Finding("device", "problem", message, reinstall(), facts)
    told = str(info.get("device_name") or info.get("architecture") or "")
    return Finding("device", "ok", f"{name} {told}".strip(), facts=facts)


def check_blas() -> Finding:
    """How fast matrices are multiplied on the CPU, and with which BLAS; a problem if it is MLX's own and slow."""
    import mlx.core as mx

    measured = gflops()
    used = blas.in_use()
    facts = {"blas": used, "gflops": round(measured, 1)}
    told = f"{used}, {measured:.1f} GFLOP/s"
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if not on_cpu or measured >= SLOW_GFLOPS:
        return Finding("blas", "ok", told, facts=facts)
    if not used.startswith("MLX's own"):
        remedy = "See whether the machine is busy or has few cores; OMP_NUM_THREADS sets the number of threads"
        return Finding("blas", "warning", f"{told}, which is slow", remedy, facts)
    remedy = "Unset ONEFOLD_BLAS" if "ONEFOLD_BLAS" in used else "Run: pip install 'onefold[cpu]', or install OpenBLAS"
    if "imported first" in used:
        remedy = "Import onefold before mlx.core"
    return Finding("blas", "problem", f"{told}, which is slow", remedy, facts)


def gflops() -> float:
    """Return the most of some products of 32-bit matrices on the CPU, in 10⁹ operations per second."""
    import mlx.core as mx

    a, b = (mx.ones((SIDE, SIDE), dtype=mx.float32, stream=mx.cpu) for _ in range(2))
    best = 0.0
    for _ in range(1 + TIMES):  # the first one starts threads
        mx.eval(a, b)
        began = time.perf_counter()
        mx.eval(mx.matmul(a, b, stream=mx.cpu))
        best = max(best, 2 * SIDE**3 / 1e9 / (time.perf_counter() - began))
    return best


def memory() -> Finding:
    """How much memory there is, whether it is short now, and the budget of a server that is given none."""
    from onefold.cache.memory import device

    total, budget, limit = device.memory_bytes(), device.default_budget(), machine.limit_bytes()
    facts: dict[str, Any] = {"memory_bytes": total, "default_budget_bytes": budget, "limit_bytes": limit}
    told = f"{show_size(total)}, default budget {show_size(budget)} less the weights"
    if total < LITTLE_MEMORY:
        remedy = "Use a small model with weights of 4 bits, or a machine with more memory"
        state: State = "problem" if total < NO_MEMORY else "warning"
        return Finding("memory", state, f"{told}, which is little for a model", remedy, facts)
    gauge = device.gauge()
    reading = machine.NOTHING_KNOWN if gauge is None else gauge()
    facts["memory_level"] = reading.level.name.lower()
    if reading.level is not machine.Level.NORMAL:
        remedy = "Close other programs: a server evicts KV, and lowers its automatic budget, while memory is short"
        return Finding("memory", "warning", f"{told}; memory is short now: {reading.why}", remedy, facts)
    return Finding("memory", "ok", told, facts=facts)


def forward() -> Finding:
    """Whether a small model gives the same logits from a reused prefix as from a fresh run."""
    import mlx.core as mx

    from onefold.cache.prefix_cache import PrefixCache
    from onefold.engine import stock

    mx.random.seed(0)
    model = stock.random_llama(CONFIG)
    tokens = [(7 * i) % CONFIG["vocab_size"] for i in range(TOKENS)]
    with PrefixCache(model, "64MB") as cache:
        with cache.lease(tokens[:KNOWN]) as lease:
            mx.eval(model(mx.array(lease.rest)[None], cache=lease.layers))
            lease.commit()
        with cache.lease(tokens) as lease:
            reused = lease.cached
            warm = model(mx.array(lease.rest)[None], cache=lease.layers)[:, -1]
            mx.eval(warm)
    fresh = model(mx.array([tokens]))[:, -1]
    difference = float(mx.abs(warm - fresh).max() / mx.abs(fresh).max())
    facts = {"reused": reused, "tokens": TOKENS, "difference": difference}
    if reused != KNOWN:
        message = f"a small model reused {reused} tokens of {TOKENS}, and {KNOWN} were known"
        return Finding("forward", "problem", message, REPORT, facts)
    if not difference <= TOLERANCE:  # also NaN
        message = f"a small model's logits from a reused prefix differ from a fresh run's by {difference:.2g}"
        return Finding("forward", "problem", message, REPORT, facts)
    told = f"a small model reused {reused} of {TOKENS} tokens, and its logits are those of a fresh run"
    return Finding("forward", "ok", told, facts=facts)


def kernels() -> Finding:
    """Whether the device's kernels compute what MLX's own operations do: tries them again for what was tried on this
    device before, or the decode kernel for a usual shape. The results are kept."""
    import mlx.core as mx

    from onefold.cache.model.kernels import current, trial
    from onefold.cache.model.kernels.decode import Format, Shape

    if current.device_kernel() is None:
        return Finding("kernels", "ok", "none for a CPU: MLX's own operations are used")
    usual = trial.Trial(Shape(128, 128, mx.float16, Format("plain", 2)), 32, 8)
    tried = list(trial.kept().values())[-TRIALS:] or [usual]
    found = {str(one): trial.repeat(one, TRIAL_SECONDS) for one in tried}
    facts: dict[str, Any] = {"trials": found, "switched_off": current.is_switched_off()}
    failed = [f"{name}: {reason}" for name, reason in found.items() if reason]
    if failed:
        message = f"a kernel is not used, and batches are slower: {'; '.join(failed)}"
        return Finding("kernels", "warning", message, REPORT, facts)
    told = f"kernels compute what MLX's own operations do, for {'; '.join(found)}"
    if current.is_switched_off():
        remedy = f"Unset {current.SWITCH} to use them"
        return Finding("kernels", "warning", f"{told}, but {current.SWITCH} switches them off", remedy, facts)
    return Finding("kernels", "ok", told, facts=facts)


def reinstall() -> str:
    """Return the command that installs MLX and its backend again; of several backends it keeps one."""
    if len(found := backend.installed()) > 1:
        return f"Run: {backend.how_to_keep_one(found)}"
    mlx = backend.version_of("mlx")
    names = sorted({"mlx", *found})
    return f"Run: pip install --force-reinstall --no-deps {' '.join(f'{name}=={mlx}' for name in names)}"


CHECKS: dict[str, Callable[[], Finding]] = {
    "device": device,
    "blas": check_blas,
    "memory": memory,
    "forward": forward,
    "kernels": kernels,
}


def main() -> int:
    """Print what the checks find, a line before and a line after each; without a device the others are left out."""
    remedies = {"device": reinstall(), "blas": "Set ONEFOLD_BLAS=off to use MLX's own BLAS"}
    for name, check in CHECKS.items():
        print(json.dumps({"begins": name}), flush=True)
        found = guarded(name, check, remedies.get(name, REPORT))
        print(json.dumps({"finding": asdict(found)}), flush=True)
        if name == "device" and "mlx.core" not in sys.modules:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
