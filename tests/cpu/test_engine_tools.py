# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/vllm writes and computes, without an engine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from support import ROOT

import chord_kernels as chord

TOOLS = ROOT / "benchmarks" / "vllm"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"engine_tool_{name}", TOOLS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mini-kimi")
    tool("mini_kimi").write(folder, hidden=256, intermediate=128, experts=4, layers=1, vocabulary=32, device="cpu")
    return folder


def test_the_checkpoint_is_one_that_chord_reads(checkpoint: Path) -> None:
    layer = chord.MoELayer.from_checkpoint(checkpoint, 1, device="cpu")
    assert (layer.gate_up.experts, layer.hidden, layer.intermediate) == (4, 256, 128)


def test_its_codes_have_no_mean(checkpoint: Path) -> None:
    """With one, all tokens of a random model are alike after a few layers."""
    with safe_open(checkpoint / "model-00001.safetensors", "pt") as file:
        words = file.get_tensor("model.layers.1.mlp.experts.0.up_proj.weight_packed")
    codes = torch.stack([(words >> 4 * i) & 15 for i in range(8)])
    assert codes.min() == 1
    assert abs(codes.float().mean() - 8) < 0.1


def test_every_tensor_of_the_index_is_there(checkpoint: Path) -> None:
    files = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    for name in set(files.values()):
        with safe_open(checkpoint / name, "pt") as file:
            assert set(file.keys()) == {tensor for tensor, where in files.items() if where == name}


def predictions(logprob: float, choice: int, greedy: list[int]) -> dict[str, list]:
    return {"logprobs": [[logprob]], "choices": [[choice]], "leads": [[0.5]], "greedy": [greedy], "greedy_leads": [[0.5, 0.1]]}


@pytest.mark.parametrize(
    ("found", "clear_wrong", "greedy_clear_wrong"),
    [
        (predictions(-1.1, 3, [1, 2]), 0, 0),  # all the same
        (predictions(-1.1, 4, [1, 2]), 1, 0),  # another choice, though the lead is above the noise of 0.1
        (predictions(-1.6, 4, [1, 2]), 0, 0),  # the lead is below it
        (predictions(-1.2, 3, [1, 9]), 0, 0),  # leaves where the lead is 0.1
        (predictions(-1.2, 3, [9, 2]), 0, 1),  # leaves where it is 0.5
    ],
)
def test_differences_count_where_the_lead_is_clear(found: dict[str, list], clear_wrong: int, greedy_clear_wrong: int) -> None:
    compare, truth = tool("compare"), predictions(-1.0, 3, [1, 2])
    d = compare.differences(truth, found, max(compare.apart(truth, found)))
    assert (d["clear_wrong"], d["greedy_clear_wrong"]) == (clear_wrong, greedy_clear_wrong)
    assert d["greedy_left"] == (found["greedy"] != truth["greedy"])
    assert d["greedy_left_at_most"] == (0.5 if greedy_clear_wrong else 0.1 if d["greedy_left"] else 0.0)


def test_what_is_judged_does_not_set_the_noise() -> None:
    """A backend that is far off everywhere would have no clear place left."""
    compare, truth = tool("compare"), {"predictions": predictions(-1.0, 3, [1, 2])}
    chord, marlin = ({"backend": name, "predictions": predictions(value, 4, [9, 2])} for name, value in (("chord", -3.0), ("marlin", -1.1)))
    noise = compare.peers_noise(truth, [chord, marlin])
    assert noise == pytest.approx(0.1)
    assert compare.differences(truth["predictions"], chord["predictions"], noise)["clear_wrong"] == 1
    with pytest.raises(SystemExit, match="vLLM's own"):
        compare.peers_noise(truth, [chord])


def test_the_comparison_writes_what_a_result_file_needs(tmp_path: Path) -> None:
    for backend in ("emulation", "chord", "marlin"):
        row = {"backend": backend, "options": {}, "card": {"name": "x"}, "date": "d", "versions": {}, "commit": "c"}
        row |= {"predictions": predictions(-1.0, 3, [1, 2]), "decode_ms": {"1": [2.0, 1.0, 3.0]}, "prefill_tokens_s": [5, 7, 6]}
        row |= {"weights_s": 1.0, "weights_gib": 2.0, "weights_peak_gib": 3.0, "weights_held_gib": 4.0}
        (tmp_path / f"{backend}.json").write_text(json.dumps(row))
    command = [sys.executable, TOOLS / "compare.py", *(tmp_path / f"{name}.json" for name in ("emulation", "chord", "marlin"))]
    command += ["--out", tmp_path / "all.json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| chord | 2.000 | 6 |" in printed
    written = json.loads((tmp_path / "all.json").read_text())
    assert set(written) == {"card", "date", "versions", "commit", "command", "rows"}
    assert "predictions" not in written["rows"][0]


def test_predictions_are_the_best_and_their_leads() -> None:
    found = tool("engine").Predictions()
    found.add([5, 3, 4], [{3: -2.0, 8: -0.5, 9: -0.75}, {4: -0.25, 9: -1.0}], [7, 8], [{7: -1.0, 2: -1.5}, {8: -0.5, 1: -0.5}])
    assert (found.logprobs, found.choices, found.leads) == ([[-2.0, -0.25]], [[8, 4]], [[0.25, 0.75]])
    assert (found.greedy, found.greedy_leads) == ([[7, 8]], [[0.5, 0.0]])


def test_the_servers_answers_are_the_engines_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    choice = SimpleNamespace(
        prompt_logprobs=[None, {"3": {"logprob": -2.0}, "8": {"logprob": -0.5}, "9": {"logprob": -0.75}}],
        logprobs=SimpleNamespace(top_logprobs=[{"token_id:7": -1.0, "token_id:2": -1.5}]),
        token_ids=[7],
    )
    completions = SimpleNamespace(create=lambda **asked: SimpleNamespace(choices=[choice]))
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=lambda **where: SimpleNamespace(completions=completions)))
    found = tool("server").ask(1, "a model", [[5, 3], [5, 3]])
    assert found == {
        "logprobs": [[-2.0]] * 2,
        "choices": [[8]] * 2,
        "leads": [[0.25]] * 2,
        "greedy": [[7]] * 2,
        "greedy_leads": [[0.5]] * 2,
    }


@pytest.mark.parametrize(("cards", "local", "hosts"), [(2, ["0", "1"], [None, None]), (1, ["0", "0"], ["rank0", "rank1"])])
def test_two_ranks_have_a_card_each_or_share_the_only_one(
    monkeypatch: pytest.MonkeyPatch, cards: int, local: list[str], hosts: list[str | None]
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    found = [tool("two_ranks").environment(rank, 1234) for rank in range(2)]
    assert [rank["LOCAL_RANK"] for rank in found] == local
    assert [rank.get("NCCL_HOSTID") for rank in found] == hosts


def two_ranks(folder: Path, engine: str) -> subprocess.Popen:
    """two_ranks.py over a stub of engine.py."""
    (folder / "two_ranks.py").write_text((TOOLS / "two_ranks.py").read_text())
    shared = "import os, signal, sys, time\nfree_port = lambda: 1\n"
    ended = "end_when_told = lambda: signal.signal(signal.SIGTERM, lambda *_: sys.exit('terminated'))\n"
    (folder / "engine.py").write_text(shared + ended + f"if __name__ == '__main__':\n    {engine}\n")
    command = [sys.executable, folder / "two_ranks.py", "a model", "chord", "--out", folder / "out.json"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_a_rank_whose_partner_fails_does_not_wait_for_it(tmp_path: Path) -> None:
    ended = two_ranks(tmp_path, "sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)")
    assert "[None, 3]" in ended.communicate(timeout=50)[1]
    assert ended.returncode


def test_ranks_end_with_who_started_them(tmp_path: Path) -> None:
    started = two_ranks(tmp_path, f"open(f'{tmp_path}/{{os.getpid()}}.pid', 'w').close(); time.sleep(60)")
    deadline = time.monotonic() + 40
    while len(ranks := list(tmp_path.glob("*.pid"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    started.terminate()
    started.communicate(timeout=20)
    while alive := [rank for rank in ranks if _runs(int(rank.stem))]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


def _runs(process: int) -> bool:
    """Not so if it has ended and nobody has asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
