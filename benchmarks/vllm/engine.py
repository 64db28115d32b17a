# SPDX-License-Identifier: Apache-2.0
"""One run of vLLM's engine on a checkpoint, offline: how it loads, what it predicts, how fast it decodes and prefills. Writes JSON.

backend: chord (the plugin decides), auto (vLLM without the plugin), or one of vLLM's own, such as marlin, humming, emulation.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

BATCHES = (1, 8, 20, 64, 128)
PROMPTS, PROMPT_TOKENS, GREEDY_TOKENS = 200, 32, 16
PREFILL = (8, 2048)
GRAPH_SIZES = [1, 2, 4, 8, 16, 24, 32, 64, 128, 256]  # of vLLM's default list, those that the batches here meet
KV_BYTES = 2 << 30  # said, not found out: several engines may share a card until they are measured, one after the other
DECODED = 128


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def end_when_told() -> None:
    """SIGTERM raises SystemExit: what ends the processes that were started is done."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


def environment(backend: str) -> dict[str, str]:
    """Of a vLLM that needs no network, and has the plugin for `chord` alone."""
    sampler = os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")
    plugin = "on" if backend == "chord" else "off"
    return {"VLLM_USE_FLASHINFER_SAMPLER": sampler, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "CHORD_VLLM": plugin}


def moe_backend(backend: str) -> dict[str, str]:
    """The engine argument that names it, where it is one of vLLM's own."""
    return {} if backend in ("chord", "auto") else {"moe_backend": backend}


def load(model: str, backend: str, *, eager: bool, options: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    """The engine, and what loading took: seconds until it is ready; of the weights, seconds, and GiB on the device after and meanwhile."""
    from vllm import LLM

    start = time.perf_counter()
    llm = LLM(
        model=model, skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=256, max_num_batched_tokens=8192, enforce_eager=eager,
        gpu_memory_utilization=0.1, kv_cache_memory_bytes=KV_BYTES, enable_prefix_caching=False, max_logprobs=8,
        worker_extension_cls="watched_worker.WatchedLoading",
        **({} if eager else {"compilation_config": {"cudagraph_capture_sizes": GRAPH_SIZES}}),
        **moe_backend(backend),
        **options,
    )  # fmt: skip
    return llm, llm.collective_rpc("loading")[0] | {"ready_s": round(time.perf_counter() - start, 2)}


def random_prompts(vocabulary: int, count: int, length: int, *, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, vocabulary) for _ in range(length)] for _ in range(count)]


Place = dict[int, float]  # log-probabilities of the tokens that were asked for, the likeliest two among them


@dataclass
class Predictions:
    """Of every prompt, a list each: log-probability of each of its tokens; greedy choice and its lead over the second, at each of its
    places and at each generated one."""

    logprobs: list[list[float]] = field(default_factory=list)
    choices: list[list[int]] = field(default_factory=list)
    leads: list[list[float]] = field(default_factory=list)
    greedy: list[list[int]] = field(default_factory=list)
    greedy_leads: list[list[float]] = field(default_factory=list)

    def add(self, prompt: list[int], places: list[Place], generated: list[int], generated_places: list[Place]) -> None:
        """places: of all tokens of the prompt but the first."""
        best = [_best_two(place) for place in places]
        self.logprobs.append([round(place[token], 6) for place, token in zip(places, prompt[1:], strict=True)])
        self.choices.append([token for token, _ in best])
        self.leads.append([lead for _, lead in best])
        self.greedy.append(list(generated))
        self.greedy_leads.append([_best_two(place)[1] for place in generated_places])


def _best_two(place: Place) -> tuple[int, float]:
    (first, most), (_, second) = sorted(place.items(), key=lambda item: -item[1])[:2]
    return first, round(most - second, 6)


class Bench:
    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def prompts(self, count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": ids} for ids in random_prompts(self._vocabulary, count, length, seed=seed)]

    def generate(self, prompts: list[Any], tokens: int, **options: Any) -> tuple[float, list[Any]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options)
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start, outputs

    def predictions(self) -> dict[str, list[Any]]:
        _, outputs = self.generate(self.prompts(PROMPTS, PROMPT_TOKENS, seed=1), GREEDY_TOKENS, prompt_logprobs=2, logprobs=2)
        found = Predictions()
        for output in outputs:
            generated = output.outputs[0]
            found.add(output.prompt_token_ids, _values(output.prompt_logprobs[1:]), generated.token_ids, _values(generated.logprobs))
        return vars(found)

    def decode_ms(self, batch: int, repeats: int) -> list[float]:
        """Milliseconds a token: what 128 more of them take, after 4."""
        prompts = self.prompts(batch, 32, seed=2)
        few, many = 4, 4 + DECODED
        return [round((self.generate(prompts, many)[0] - self.generate(prompts, few)[0]) / DECODED * 1e3, 4) for _ in range(repeats)]

    def prefill_tokens_s(self, repeats: int) -> list[int]:
        count, length = PREFILL
        return [round(count * length / self.generate(self.prompts(count, length, seed=3 + i), 1)[0]) for i in range(repeats)]


def _values(places: list[dict[int, Any]]) -> list[Place]:
    return [{token: entry.logprob for token, entry in place.items()} for place in places]


def card() -> dict[str, str]:
    query = "name,driver_version,clocks.max.sm"
    line = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=True)
    return dict(zip(query.split(","), line.stdout.splitlines()[0].split(", "), strict=True))


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("vllm", "torch", "chord-kernels", "humming-kernels", "cuda-core", "nvidia-cuda-nvrtc")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("backend")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5, help="0: predictions alone")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--options", type=json.loads, default={}, help='JSON of engine arguments, such as {"tensor_parallel_size": 2}')
    parser.add_argument("--wait", action="store_true", help="once ready: make the file OUT.ready, and measure after a line on stdin")
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    os.environ |= environment(given.backend)

    llm, loading = load(given.model, given.backend, eager=given.eager, options=given.options)
    bench = Bench(llm)
    row: dict[str, Any] = {
        "backend": given.backend, "card": card(), "date": time.strftime("%F"), "versions": versions(), "commit": given.commit,
        "eager": given.eager, "options": given.options, **loading,
    }  # fmt: skip
    row["predictions"] = bench.predictions()
    given.out.write_text(json.dumps(row))
    if given.wait:
        given.out.with_suffix(".ready").touch()
        sys.stdin.readline()
    if given.repeats:
        gc.collect()
        gc.freeze()
        for batch in BATCHES:
            bench.decode_ms(batch, 1)
        row["decode_ms"] = {batch: bench.decode_ms(batch, given.repeats) for batch in BATCHES}
        bench.prefill_tokens_s(1)
        row["prefill_tokens_s"] = bench.prefill_tokens_s(given.repeats)
        given.out.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
