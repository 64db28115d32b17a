# SPDX-License-Identifier: Apache-2.0
"""engine.py as two ranks of vLLM's external launcher: on a card each, or both on the only one.

two_ranks.py MODEL BACKEND --out OUT.json [arguments of engine.py ...]; both ranks have all prompts, and the second one's predictions
go to OUT.rank1.json. On one card NCCL is told of two hosts, since it refuses a card that it meets twice: the same collectives, through
sockets, with the ranks taking turns on the card. What they predict is worth as much, what they take is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from engine import end_when_told, free_port

ENGINE = Path(__file__).with_name("engine.py")
RANKS = 2
POLL_S = 0.5


def environment(rank: int, port: int) -> dict[str, str]:
    cards = torch.cuda.device_count()
    launch = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % max(cards, 1)),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    sharing = {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return os.environ | launch | (sharing if cards < RANKS else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("backend")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, default={}, help='JSON of engine arguments, such as {"tensor_parallel_size": 2}')
    given, more = parser.parse_known_args()
    end_when_told()
    options = {"distributed_executor_backend": "external_launcher", "disable_custom_all_reduce": True} | given.options
    outs = [given.out, *(given.out.with_suffix(f".rank{rank}.json") for rank in range(1, RANKS))]
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ENGINE), given.model, given.backend, "--out", str(out), "--options", json.dumps(options), *more],
            env=environment(rank, port),
        )
        for rank, out in enumerate(outs)
    ]
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.kill()  # one whose partner failed would wait for it
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}; their logs are above")


if __name__ == "__main__":
    main()
