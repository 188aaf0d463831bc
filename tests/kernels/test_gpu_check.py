"""benchmarks/gpu_check.py without a GPU: all its ways in the interpreter, and what it says of parts that fail."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gpu_check
from gpu import loop, models
from gpu.bench import REHEARSAL, Bench
from gpu.record import Part, Record, run_part
from gpu.targets import targets

SCRIPT = Path(gpu_check.__file__)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_the_rehearsal_goes_all_ways_and_keeps_no_figure(tmp_path):
    file = tmp_path / "rehearsal.json"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--rehearse", "--out", str(file)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    content = json.loads(file.read_text(encoding="utf-8"))
    parts = content["parts"]
    assert {part["status"] for part in parts.values()} == {"passed"}
    assert {name.partition("/")[0] for name in parts} == set(gpu_check.BUDGETS_S)
    assert parts["correctness/tests"]["result"]["passed"] >= 4
    rows = [row for name, part in parts.items() if name.startswith("kernels/") for row in part["result"]]
    ops = {
        "bypass_norm",
        "bypass_linear",
        "acceptance_stats",
        "accept_chain",
        "gate_tiers",
        "build_tree",
        "verify_tree",
    }
    assert ops | {"tree_attention", "compact_kv"} == {row["op"] for row in rows}
    for op in ops - {"build_tree", "verify_tree"} | {"tree_attention"}:
        assert {"triton", "torch", "torch.compile"} <= {row["way"] for row in rows if row["op"] == op}
    times = [row[name] for row in rows for name in ("p20_ms", "p50_ms", "p80_ms", "fraction")]
    steps = [own["p50_ms"] for own in parts["decode/tiny"]["result"]["cases"]]
    loops = [part["result"] for name, part in parts.items() if name.startswith("loop/")]
    assert {own["tiers"] for own in loops} == {1, 2, 3}
    assert {*times, *steps, *(own["tokens_per_s"] for own in loops)} == {None}
    assert "targets" not in content


def bench_of(record, parts):
    """Runs the parts one after the other, as the worker does."""
    bench = Bench(REHEARSAL)
    for name, run in parts.items():
        run_part(Part(name, run), bench, record)
    return bench


def test_a_part_that_fails_says_so_and_the_next_one_follows(tmp_path):
    def partly(bench):
        for number in (1, 0, 2):
            with bench.attempt(f"one by {number}"):
                1 / number
        return "the rest"

    def stop(bench):
        bench.progress({"so_far": 1})
        raise SystemExit("no figures of a wrong kernel")

    record = Record(tmp_path / "record.json")
    bench_of(record, {"a/partly": partly, "a/stop": stop, "b/fine": lambda bench: 3})
    parts = Record(record.file).parts
    assert [part["status"] for part in parts.values()] == ["failed", "failed", "passed"]
    assert parts["a/partly"]["result"] == "the rest"
    (failure,) = parts["a/partly"]["failures"]
    assert failure["what"] == "one by 0"
    assert failure["message"] == "ZeroDivisionError: division by zero"
    assert failure["where"].startswith("test_gpu_check.py:")
    assert parts["a/stop"]["result"] == {"so_far": 1}
    assert parts["a/stop"]["failures"][0]["message"] == "SystemExit: no figures of a wrong kernel"


WORKER = """
import os, sys, time
from gpu.record import Record
record = Record(__import__("pathlib").Path(sys.argv[sys.argv.index("--out") + 1]))
acts = {"fine": None, "dies": os.abort, "hangs": lambda: time.sleep(60)}
for name, act in ((f"kernels/{name}", act) for name, act in acts.items()):
    if name in record.parts:
        continue
    record.set(name, "running")
    if act:
        act()
    record.set(name, "passed")
    if name == "kernels/fine":
        sys.exit(3)  # as after an error that the device keeps
record.content["complete"] = True
record.save()
"""


def test_a_part_that_kills_or_holds_its_process_is_left_behind(tmp_path, monkeypatch):
    script, file = tmp_path / "worker.py", tmp_path / "record.json"
    script.write_text(WORKER, encoding="utf-8")
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parent))
    arguments = gpu_check.argparse.Namespace(out=file, scale=1.0, steps=["kernels"], rehearse=False)
    Record(file).save()
    ends = dict.fromkeys(gpu_check.BUDGETS_S, time.time() + 8.0)
    gpu_check.supervise(arguments, ends)
    parts = Record(file).parts
    assert {name: part["status"] for name, part in parts.items()} == {
        "kernels/fine": "passed",
        "kernels/dies": "failed",
        "kernels/hangs": "failed",
    }
    assert "ended its process with status -6" in parts["kernels/dies"]["failures"][0]["message"]
    assert "took too long" in parts["kernels/hangs"]["failures"][0]["message"]


def test_acceptance_gives_the_tokens_that_were_aimed_at():
    for tokens in (2, 3, 4):
        acceptance = loop.acceptance_for(tokens, 7)
        assert sum(acceptance**i for i in range(8)) == pytest.approx(tokens)
    drafter = loop.SetDrafter(models.full_successor, 1.0).start()
    context = type("Context", (), {"tokens": [[5, 8]], "max_tokens": [4]})
    assert drafter.propose(context).row_tokens == [[8, 9, 0, 1, 2]]


def test_targets_take_the_worst_case_of_the_best_implementation():
    def row(op, case, way, ms, fraction):
        return {"op": op, "case": case, "dtype": "bfloat16", "way": way, "p50_ms": ms, "fraction": fraction}

    rows = [
        row("accept_chain", "32 x 151,936", "triton", 2.0, 0.5),
        row("accept_chain", "32 x 151,936", "native", 1.0, 0.9),
        row("accept_chain", "8 x 151,936", "native", 1.0, 0.1),
        row("accept_chain", "32 x 151,936", "torch", 0.1, 9.0),
        row("bypass_linear", "gate_up, 8 rows", "triton", 1.0, 0.95),
        row("bypass_linear", "qkv, 8 rows", "triton", 1.0, 0.7),
        row("bypass_linear", "gate_up, 64 rows", "triton", 1.0, 0.2),
        row("bypass_linear", "gate_up, 8 rows, bypassed", "triton", 0.002, 0.2),
    ]
    loops = [
        {
            "batch": 1,
            "tiers": tiers,
            "tokens_per_pass_aimed_at": aim,
            "tokens_per_s": speed,
            "outside_passes_share": 0.1,
        }
        for tiers, aim, speed in ((1, None, 200.0), (2, 2, 300.0), (2, 3, 520.0))
    ]
    parts = {"kernels/all": {"result": rows}, "kernels/cut": {}}
    parts |= {f"loop/{i}": {"result": own} for i, own in enumerate(loops)}
    found = targets(parts)
    assert [own["measured"] for own in found] == [None, 0.9, 0.7, 2.0, None, 2.6, 0.1]
    assert [own["reached"] for own in found] == [None, True, False, True, None, True, False]
