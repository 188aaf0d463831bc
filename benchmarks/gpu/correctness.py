"""The tests of the GPU kernels, on the device, in several processes: compiling is what they wait for.

A test may take its process along, that of a kernel that writes where it should not; the other processes go on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu.bench import Bench
from gpu.environment import ROOT
from gpu.record import Part

TESTS = "tests/kernels/gpu"
REHEARSED = "bypassed_row or fully_bypassed or parents_of_more"  # quick ones of two files
MAX_PROCESSES = 8
OUTCOME = re.compile(rf"^({TESTS}/\S+?::.*) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
MESSAGE = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?) - (.*)$", re.MULTILINE)
OPTIONS = ("-p", "no:cacheprovider", "--confcutdir", TESTS, "--no-header", "--tb=short")


def parts(bench: Bench) -> list[Part]:
    return [Part("correctness/tests", run_tests)]


def run_tests(bench: Bench) -> dict[str, Any]:
    """Counts and messages; a test that fails, and one that was never reached, is a failure of the part."""
    tests = collect(bench)
    num_processes = 1 if bench.plan.rehearsal else max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) // 2))
    shards = [tests[first::num_processes] for first in range(num_processes)]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{i}.log" for i in range(num_processes)]
        processes = [start(shard, log) for shard, log in zip(shards, logs, strict=True)]
        while any(process.poll() is None for process in processes) and bench.remaining_s > 0:
            time.sleep(0.2)
        for process in processes:
            process.kill()
            process.wait()
        output = "".join(log.read_text(encoding="utf-8", errors="replace") + "\n" for log in logs)
    outcomes = dict(OUTCOME.findall(output))
    messages = dict(MESSAGE.findall(output))
    counts = {kind.lower(): list(outcomes.values()).count(kind) for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    result = {"processes": num_processes, "collected": len(tests), **counts}
    for test, outcome in outcomes.items():
        if outcome in ("FAILED", "ERROR"):
            bench.attempts.add(test, messages.get(test, outcome.lower()))
    missing = [test for test in tests if test not in outcomes]
    for test in missing[:20]:
        bench.attempts.add(test, "not reached: its process ended, or the time was up")
    if not tests or missing:
        bench.attempts.add("end of the output", output[-1500:])
    return result | {"not_reached": len(missing)}


def collect(bench: Bench) -> list[str]:
    chosen = ("-k", REHEARSED) if bench.plan.rehearsal else ()
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *OPTIONS, *chosen, TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    tests = [line for line in done.stdout.splitlines() if line.startswith(TESTS) and "::" in line]
    if not tests:
        raise RuntimeError(f"pytest found no tests: {(done.stdout + done.stderr)[-1500:]}")
    return tests


def start(tests: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-v", *OPTIONS, *tests]
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT)


def environment() -> dict[str, str]:
    """For pytest: the packages lie in the source tree, lines are as long as they are."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "python")])
    return {**os.environ, "PYTHONPATH": paths, "COLUMNS": "300"}
