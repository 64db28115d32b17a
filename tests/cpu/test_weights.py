# SPDX-License-Identifier: Apache-2.0
"""PackedWeight: files, modes, validation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import random_codes, random_weight

import chord_kernels as chord
from chord_kernels.errors import FormatError
from chord_kernels.operator import pack_w4a16, pack_w4a16_grouped


@pytest.mark.parametrize("paired", [False, True])
def test_a_file_gives_the_same_weight(tmp_path: Path, paired: bool) -> None:
    weight = random_weight(3, 128, 192, paired=paired)
    weight.save(tmp_path / "w.safetensors")
    again = chord.PackedWeight.load(tmp_path / "w.safetensors")
    assert torch.equal(again.data, weight.data)
    assert again.paired == paired
    assert list(tmp_path.iterdir()) == [tmp_path / "w.safetensors"]


def test_another_layout_version_is_refused(tmp_path: Path) -> None:
    weight = random_weight(1, 64, 64)
    save_file({"data": weight.data}, tmp_path / "w", metadata={"format": "chord-w4a16", "layout_version": "99", "paired": "0"})
    with pytest.raises(FormatError, match="layout version 99, this release reads 1"):
        chord.PackedWeight.load(tmp_path / "w")


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_file({"data": torch.zeros(4)}, tmp_path / "other")
    with pytest.raises(FormatError, match="not a packed weight"):
        chord.PackedWeight.load(tmp_path / "other")
    (tmp_path / "junk").write_bytes(b"not a file of tensors")
    with pytest.raises(FormatError, match="not a readable safetensors file"):
        chord.PackedWeight.load(tmp_path / "junk")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = random_weight(1, 64, 64, seed=1)
    old.save(tmp_path / "w")

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        random_weight(1, 64, 64, seed=2).save(tmp_path / "w")
    assert torch.equal(load_file(tmp_path / "w")["data"], old.data)
    assert list(tmp_path.iterdir()) == [tmp_path / "w"]


def test_both_published_modes_give_the_one_layout() -> None:
    codes, scales = random_codes(2, 64, 128)
    for mode in ("contiguous", "masked"):
        assert torch.equal(pack_w4a16_grouped(codes, scales, mode=mode).data, pack_w4a16(codes, scales).data)
    with pytest.raises(FormatError, match="mode 'indexed' is not known"):
        pack_w4a16_grouped(codes, scales, mode="indexed")


def test_a_packed_weight_checks_its_tensor() -> None:
    with pytest.raises(FormatError, match=r"uint8 \[E, N/64, K/64, 2304\], got torch.int8"):
        chord.PackedWeight(torch.zeros((1, 1, 1, 2304), dtype=torch.int8))
    with pytest.raises(FormatError, match="contiguous"):
        chord.PackedWeight(torch.zeros((2, 2, 1, 2304), dtype=torch.uint8).transpose(0, 1))


def test_experts_are_major_and_independent() -> None:
    """HAZARDS 38: an expert's bytes depend on that expert alone."""
    codes, scales = random_codes(4, 128, 128)
    order = [2, 0, 3, 1]
    assert torch.equal(chord.pack_w4a16(codes[order], scales[order]).data, chord.pack_w4a16(codes, scales).data[order])
