"""Everything about the GPU kernels that takes a GPU to say, in 8 minutes and one JSON.

    python benchmarks/gpu_check.py

Needs torch, Triton, transformers and pytest; viasd need not be installed. Where nvcc is found, the kernels in CUDA C++
are built first. In this order, each step up to its own deadline:

- environment: the device, versions, memory bandwidth; the build
- correctness: the tests of tests/kernels/gpu, on the device
- kernels: each op beside the plain torch expression, torch.compile of it, and other projects' kernels
- decode: the step of Llama-3.1-8B and Qwen3-8B shapes with random weights, full and slim
- loop: tokens per second of the decode loop with a drafter whose acceptance is set by hand, beside plain decoding
- sweep: other sizes for the configuration files

The JSON is written after every part. A part that fails says so in it, and the next one follows; one that takes the
process along, or never ends, is left behind by a new process. The exit status is 1 if anything failed.

`--rehearse` goes the same ways with tiny shapes on the CPU, in Triton's interpreter, and keeps no figures.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

from gpu.record import Record  # noqa: E402 - the packages need not be installed

BUDGETS_S = {"environment": 70, "correctness": 90, "kernels": 110, "decode": 80, "loop": 80, "sweep": 50}
GRACE_S = 20.0  # after a deadline, which parts keep between cases, until the process is ended
POLL_S = 0.25


def deadlines(started: float, scale: float) -> dict[str, float]:
    """When each step ends at the latest; what one leaves, the next ones have."""
    ends, end = {}, started
    for step, budget_s in BUDGETS_S.items():
        end += budget_s * scale
        ends[step] = end
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON; default: by the device's name, among the results")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes in Triton's interpreter, no figures")
    parser.add_argument("--steps", nargs="+", choices=BUDGETS_S, default=list(BUDGETS_S))
    parser.add_argument("--scale", type=float, default=1.0, help="of all deadlines")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    if arguments.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"
    arguments.out = (arguments.out or default_file(arguments.rehearse)).resolve()
    arguments.out.unlink(missing_ok=True)
    started = time.time()
    record = Record(arguments.out)
    record.content |= {"rehearsal": arguments.rehearse, "started": started, "steps": arguments.steps}
    record.save()
    supervise(arguments, deadlines(started, arguments.scale))
    raise SystemExit(finish(arguments.out, time.time() - started))


def default_file(rehearsal: bool) -> Path:
    if rehearsal:
        return Path(tempfile.gettempdir()) / "viasd_gpu_check_rehearsal.json"
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("gpu_check: torch finds no GPU; --rehearse goes the same ways without one")
    name = re.sub(r"\W+", "_", torch.cuda.get_device_name(0)).lower()
    return ROOT / "benchmarks" / "results" / f"gpu_check_{name}.json"


def supervise(arguments: argparse.Namespace, ends: dict[str, float]) -> None:
    """Have workers do the parts until all are done or the time is up; each new one starts where the last one ended."""
    options = ["--out", str(arguments.out), "--scale", str(arguments.scale), "--steps", *arguments.steps]
    options += ["--rehearse"] if arguments.rehearse else []
    while True:
        had = len(Record(arguments.out).parts)
        with tempfile.TemporaryFile() as errors:
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", *options]
            worker = subprocess.Popen(command, stderr=errors)
            overdue = wait(worker, arguments.out, ends)
            errors.seek(0)
            tail = errors.read().decode(errors="replace")[-1500:]
        record = Record(arguments.out)
        if record.content.get("complete"):
            return
        part = record.running
        reason = "took too long" if overdue else f"ended its process with status {worker.returncode}"
        if part is None and len(record.parts) > had:  # between two parts: after one that broke the device's state
            continue
        if part is None:  # it never came to one, and another worker would fare no better
            record.set("worker", "failed", failures=[{"what": "worker", "message": f"{reason}: {tail}"}])
            return
        found = {name: own for name, own in record.parts[part].items() if name == "result"}
        record.set(part, "failed", **found, failures=[{"what": part, "message": f"{reason}: {tail}"}])
        print(f"{'failed':8} {part}", flush=True)
        if time.time() > max(ends.values()) + GRACE_S:
            return


def wait(worker: subprocess.Popen[bytes], file: Path, ends: dict[str, float]) -> bool:
    """Until the worker ends, or is ended because of a part that does not."""
    while worker.poll() is None:
        time.sleep(POLL_S)
        running = Record(file).running
        limit = ends[running.partition("/")[0]] if running else max(ends.values())
        if time.time() > limit + GRACE_S:
            worker.kill()
            worker.wait()
            return True
    return False


def work(arguments: argparse.Namespace) -> None:
    """Do all parts that the file does not have yet."""
    from gpu import bench as benches
    from gpu import correctness, decode, environment, kernels, loop, sweep
    from gpu.record import run_part

    modules = (environment, correctness, kernels, decode, loop, sweep)
    record = Record(arguments.out)
    ends = deadlines(record.content["started"], arguments.scale)
    bench = benches.Bench(benches.REHEARSAL if arguments.rehearse else benches.Plan())
    for step, module in zip(BUDGETS_S, modules, strict=True):
        if step not in arguments.steps:
            continue
        bench.clear()
        bench.deadline = time.monotonic() + ends[step] - time.time()
        for part in module.parts(bench):
            if part.name in record.parts:
                continue
            if bench.remaining_s <= 0:
                record.set(part.name, "skipped", reason="the step's time was up")
            else:
                run_part(part, bench, record)
            print(f"{record.parts[part.name]['status']:8} {part.name}", flush=True)
            bench.synchronize()  # where nothing can run any more this raises: a new process takes over
    record.content["complete"] = True
    record.save()


def finish(file: Path, elapsed_s: float) -> int:
    """Targets into the file and onto the terminal; the exit status."""
    from gpu.targets import targets

    record = Record(file)
    record.content["elapsed_seconds"] = elapsed_s
    record.save()
    failures = [(name, own) for name, part in record.parts.items() for own in part.get("failures", ())]
    if not record.content["rehearsal"]:
        record.content["targets"] = targets(record.parts)
        record.save()
        for target in record.content["targets"]:
            measured = "not measured" if target["measured"] is None else f"{target['measured']:.3g}"
            bound = f">= {target['at_least']}" if "at_least" in target else f"<= {target['at_most']}"
            print(f"{measured:>12} ({bound:>7})  {target['target']}")
    for name, failure in failures:
        lines = failure["message"].strip().splitlines() or [""]
        print(f"{name}: {failure['what']}: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}")
    print(f"{len(record.parts)} parts, {len(failures)} failures: {file}")
    return int(bool(failures))


if __name__ == "__main__":
    main()
