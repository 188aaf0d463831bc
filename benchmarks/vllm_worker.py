"""One way of decoding with vLLM, run by the Python of vLLM's own environment: JSON lines in, JSON lines out.

The first line gives the engine's settings (`model`, `dtype`, `gamma`: drafted tokens of n-gram speculation, 0 for
none); the answer is `{"ready": version}` or `{"error": reason}`. Each line after it is a prompt (`ids`,
`max_new_tokens`, `eos_token_ids`), answered with `tokens`, `prefill_ms` and `total_ms`. vLLM does not say by itself
where prefill ends, so the prompt is decoded twice: for one token, which is the prefill, and for all.
"""

import json
import os
import sys
import time
from typing import Any, TextIO


def build(settings: dict[str, Any]) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an engine process of its own would spin while others decode
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else it takes a large share of the memory
    from vllm import LLM

    options: dict[str, Any] = {}
    if settings["gamma"]:
        speculation = {"method": "ngram", "num_speculative_tokens": settings["gamma"], "prompt_lookup_max": 3}
        options["speculative_config"] = speculation
    return LLM(
        settings["model"],
        dtype=settings["dtype"],
        enable_prefix_caching=False,
        max_model_len=settings["max_length"],
        max_num_seqs=1,
        **options,
    )


def decode(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    def run(max_tokens: int) -> tuple[list[int], float]:
        stop = request["eos_token_ids"]
        settings = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop, detokenize=False)
        started = time.perf_counter()
        output = engine.generate({"prompt_token_ids": request["ids"]}, settings, use_tqdm=False)[0]
        return list(output.outputs[0].token_ids), 1e3 * (time.perf_counter() - started)

    _, prefill_ms = run(1)
    tokens, total_ms = run(request["max_new_tokens"])
    return {"tokens": tokens, "prefill_ms": prefill_ms, "total_ms": total_ms}


def serve(answers: TextIO) -> None:
    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    settings = json.loads(sys.stdin.readline())
    try:
        import vllm
    except ImportError as error:
        answer({"error": f"{sys.executable} has no working vLLM: {error}"})
        return
    engine = build(settings)
    answer({"ready": vllm.__version__})
    for line in sys.stdin:
        answer(decode(engine, json.loads(line)))


if __name__ == "__main__":
    # vLLM writes its log to stdout; the answers keep the real one, and everything else goes to stderr.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as real_stdout:
        os.dup2(2, 1)
        serve(real_stdout)
