# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the plugin, asked by the OpenAI client: greedy completions beside those that engine.py found.

server.py MODEL FOLDER [arguments of vllm serve ...]; FOLDER is one that ab.py has filled: predictions of the `emulation` backend, and the
noise of vLLM's others. Fails where a completion leaves emulation's at a lead above that noise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from engine import GREEDY_TOKENS, PROMPT_TOKENS, PROMPTS, random_prompts

PORT, PATIENCE_S, ASKED = 8091, 240, 32


def healthy() -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2).status == 200
    except OSError:
        return False


def main() -> None:
    model, folder, *arguments = sys.argv[1:]
    truth = json.loads((Path(folder) / "emulation.json").read_text())["predictions"]
    noise = json.loads((Path(folder) / "comparison.json").read_text())["rows"][0]["differences"]["noise"]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        model,
        "--port",
        str(PORT),
        "--max-model-len",
        "4096",
        *arguments,
    ]
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | os.environ | {"CHORD_VLLM": "on", "VLLM_NO_USAGE_STATS": "1"}
    server = subprocess.Popen(command, env=environment)
    try:
        start = time.monotonic()
        while not healthy():
            if server.poll() is not None or time.monotonic() - start > PATIENCE_S:
                raise SystemExit("the server did not come up; its log is above")
            time.sleep(1)
        from openai import OpenAI

        client = OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none")
        vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        prompts = random_prompts(vocabulary, PROMPTS, PROMPT_TOKENS, seed=1)[:ASKED]
        same, left_at = 0, []
        for prompt, greedy, leads in zip(prompts, truth["greedy"], truth["greedy_leads"], strict=False):
            reply = client.completions.create(
                model=model, prompt=prompt, max_tokens=GREEDY_TOKENS, temperature=0, extra_body={"ignore_eos": True}
            )
            found = [int(word.removeprefix("t")) if word.startswith("t") else -1 for word in reply.choices[0].text.split()]
            first = next((i for i, (a, b) in enumerate(zip(greedy, found, strict=True)) if a != b), None)
            same += first is None
            if first is not None:
                left_at.append(leads[first])
        said = client.completions.create(model=model, prompt="t5 t17 t99", max_tokens=4, temperature=0).choices[0].text
        found = {"asked": ASKED, "same": same, "left_at_leads_of": left_at, "noise": noise, "t5 t17 t99": said}
        print(json.dumps({"arguments": arguments, **found}))
        if any(lead > noise for lead in left_at):
            raise SystemExit("a completion leaves emulation's where its lead is above the noise")
    finally:
        server.terminate()
        server.wait(timeout=60)


if __name__ == "__main__":
    main()
