# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`, asked by the OpenAI client, one prompt at a time: the predictions that engine.py takes of all prompts at once.

server.py MODEL BACKEND --out OUT.json [arguments of vllm serve ...]; compare.py holds its files beside each other, as engine.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from engine import (
    GREEDY_TOKENS,
    PROMPT_TOKENS,
    Place,
    Predictions,
    card,
    end_when_told,
    environment,
    free_port,
    moe_backend,
    random_prompts,
    versions,
)

PATIENCE_S, ASKED = 300, 32


def healthy(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200
    except OSError:
        return False


def ask(port: int, model: str, prompts: list[list[int]]) -> dict[str, list[Any]]:
    from openai import OpenAI

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    more = {"ignore_eos": True, "prompt_logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    found = Predictions()
    for prompt in prompts:
        reply = client.completions.create(model=model, prompt=prompt, max_tokens=GREEDY_TOKENS, temperature=0, logprobs=2, extra_body=more)
        choice = reply.choices[0]
        places = [{int(token): entry["logprob"] for token, entry in place.items()} for place in choice.prompt_logprobs[1:]]
        generated = [_named(place) for place in choice.logprobs.top_logprobs]
        found.add(prompt, places, choice.token_ids, generated)
    return vars(found)


def _named(place: dict[str, float]) -> Place:
    return {int(token.removeprefix("token_id:")): value for token, value in place.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("backend")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    given, more = parser.parse_known_args()
    end_when_told()
    port, own = free_port(), [f"--{name.replace('_', '-')}={value}" for name, value in moe_backend(given.backend).items()]
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", given.model, "--port", str(port), "--max-model-len", "4096"]
    server = subprocess.Popen([*serve, *own, *more], env=os.environ | environment(given.backend))
    try:
        start = time.monotonic()
        while not healthy(port):
            if server.poll() is not None or time.monotonic() - start > PATIENCE_S:
                raise SystemExit("the server did not come up; its log is above")
            time.sleep(1)
        vocabulary = json.loads((Path(given.model) / "config.json").read_text())["vocab_size"]
        row = {
            "backend": given.backend, "card": card(), "date": time.strftime("%F"), "versions": versions(), "commit": given.commit,
            "options": {"served": True}, "arguments": more, "ready_s": round(time.monotonic() - start, 1),
            "predictions": ask(port, given.model, random_prompts(vocabulary, ASKED, PROMPT_TOKENS, seed=1)),
        }  # fmt: skip
        given.out.write_text(json.dumps(row))
    finally:
        server.terminate()
        server.wait(timeout=60)


if __name__ == "__main__":
    main()
