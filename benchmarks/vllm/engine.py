# SPDX-License-Identifier: Apache-2.0
"""One run of vLLM's engine on a checkpoint, offline: how it loads, what it predicts, how fast it decodes and prefills. Writes JSON.

backend: chord (the plugin decides), auto (vLLM without the plugin), or one of vLLM's own, such as marlin, humming, emulation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

BATCHES = (1, 8, 20, 64, 128)
PROMPTS, PROMPT_TOKENS, GREEDY_TOKENS = 200, 32, 16
PREFILL = (8, 2048)
GRAPH_SIZES = [1, 2, 4, 8, 16, 24, 32, 64, 128, 256]  # of vLLM's default list, those that the batches here meet


def load(model: str, backend: str, *, eager: bool, parallel: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    """The engine, and what loading took: seconds, and GiB on the device while and after weights were loaded."""
    import torch
    from vllm import LLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    found: dict[str, float] = {}
    original = GPUModelRunner.load_model

    def watched(self: Any, *args: Any, **named: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = original(self, *args, **named)
        torch.cuda.synchronize()
        found["weights_s"] = round(time.perf_counter() - start, 2)
        found["weights_gib"] = round(torch.cuda.memory_allocated() / 2**30, 3)
        found["weights_peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        return result

    GPUModelRunner.load_model = watched
    start = time.perf_counter()
    llm = LLM(
        model=model, skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=8192, enforce_eager=eager,
        gpu_memory_utilization=0.6, enable_prefix_caching=False, max_logprobs=8,
        **({} if eager else {"compilation_config": {"cudagraph_capture_sizes": GRAPH_SIZES}}),
        **({} if backend in ("chord", "auto") else {"moe_backend": backend}),
        **parallel,
    )  # fmt: skip
    return llm, found | {"ready_s": round(time.perf_counter() - start, 2)}


class Bench:
    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def prompts(self, count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
        draw = random.Random(seed)
        return [{"prompt_token_ids": [draw.randrange(2, self._vocabulary) for _ in range(length)]} for _ in range(count)]

    def generate(self, prompts: list[Any], tokens: int, **options: Any) -> tuple[float, list[Any]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options)
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start, outputs

    def predictions(self) -> dict[str, list[Any]]:
        """Of every prompt: log-probability of each of its tokens; greedy choice and its lead over the second, at each of its places and
        at each generated one."""
        _, outputs = self.generate(self.prompts(PROMPTS, PROMPT_TOKENS, seed=1), GREEDY_TOKENS, prompt_logprobs=2, logprobs=2)
        found: dict[str, list[Any]] = {"logprobs": [], "choices": [], "leads": [], "greedy": [], "greedy_leads": []}
        for output in outputs:
            places = output.prompt_logprobs[1:]
            best = [_best_two(place) for place in places]
            ids = output.prompt_token_ids[1:]
            found["logprobs"].append([round(place[token].logprob, 6) for place, token in zip(places, ids, strict=True)])
            found["choices"].append([token for token, _ in best])
            found["leads"].append([lead for _, lead in best])
            generated = output.outputs[0]
            found["greedy"].append(list(generated.token_ids))
            found["greedy_leads"].append([_best_two(place)[1] for place in generated.logprobs])
        return found

    def decode_ms(self, batch: int, repeats: int) -> list[float]:
        """Milliseconds a token: 64 more of them, after 4."""
        prompts = self.prompts(batch, 32, seed=2)
        return [round((self.generate(prompts, 68)[0] - self.generate(prompts, 4)[0]) / 64 * 1e3, 4) for _ in range(repeats)]

    def prefill_tokens_s(self, repeats: int) -> list[int]:
        count, length = PREFILL
        return [round(count * length / self.generate(self.prompts(count, length, seed=3 + i), 1)[0]) for i in range(repeats)]


def _best_two(place: dict[int, Any]) -> tuple[int, float]:
    ranked = sorted(place.items(), key=lambda item: -item[1].logprob)[:2]
    return ranked[0][0], round(ranked[0][1].logprob - ranked[1][1].logprob, 6)


def _card() -> dict[str, str]:
    query = "name,driver_version,clocks.max.sm"
    line = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=True)
    return dict(zip(query.split(","), line.stdout.splitlines()[0].split(", "), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("backend")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5, help="0: predictions alone")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--parallel", type=json.loads, default={}, help='JSON of engine arguments, such as {"tensor_parallel_size": 2}')
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "CHORD_VLLM": "on" if given.backend == "chord" else "off"}

    llm, loading = load(given.model, given.backend, eager=given.eager, parallel=given.parallel)
    bench = Bench(llm)
    import vllm

    row: dict[str, Any] = {
        "backend": given.backend, "vllm": vllm.__version__, "card": _card(), "commit": given.commit, "eager": given.eager,
        "parallel": given.parallel, **loading,
    }  # fmt: skip
    row["predictions"] = bench.predictions()
    given.out.write_text(json.dumps(row))
    if given.repeats:
        for batch in BATCHES:
            bench.decode_ms(batch, 1)
        row["decode_ms"] = {batch: bench.decode_ms(batch, given.repeats) for batch in BATCHES}
        bench.prefill_tokens_s(1)
        row["prefill_tokens_s"] = bench.prefill_tokens_s(given.repeats)
        print(given.backend, {b: statistics.median(v) for b, v in row["decode_ms"].items()}, statistics.median(row["prefill_tokens_s"]))
        given.out.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
