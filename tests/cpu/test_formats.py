# SPDX-License-Identifier: Apache-2.0
"""The bit layout against a packer written from its description alone, one nibble at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_codes

import chord_kernels as chord
from chord_kernels.errors import FormatError
from chord_kernels.formats import W4A16


def nibble_position(row: int, k: int) -> tuple[int, int, int, int]:
    """(block of the tile, byte offset of the word, low bit of the nibble, scale byte) of one code, from the layout's text."""
    block, r = divmod(row, 16)
    step, within = divmod(k, 16)
    g, row_half = r % 8, r // 8
    k_half, pair = divmod(within, 8)
    t, element = divmod(pair, 2)
    register = 2 * k_half + row_half
    lane = 4 * g + t
    return block, lane * 16 + step * 4, 4 * register + 16 * element, 512 + g * 8 + row_half * 4 + (k // 32) * 2


def test_every_code_of_a_tile_is_where_the_layout_says() -> None:
    codes, scales = random_codes(1, 64, 64)
    tile = chord.pack_w4a16(codes, scales).data[0, 0, 0]
    for row in range(64):
        for k in range(64):
            block, word, bit, scale = nibble_position(row, k)
            base = block * 576
            value = int.from_bytes(bytes(tile[base + word : base + word + 4].tolist()), "little") >> bit & 15
            assert value == int(codes[0, row, k])
            found = tile[base + scale : base + scale + 2].view(torch.bfloat16)
            assert torch.equal(found[0], scales[0, row, k // 32])


@pytest.mark.parametrize(("row", "k"), [(0, 0), (63, 63), (9, 17), (40, 33)])
def test_one_hot_code_sets_one_nibble(row: int, k: int) -> None:
    codes = torch.zeros((2, 128, 192), dtype=torch.uint8)
    codes[1, 64 + row, 128 + k] = 15
    weight = chord.pack_w4a16(codes, torch.zeros((2, 128, 6), dtype=torch.bfloat16))
    set_bytes = weight.data.nonzero()
    block, word, bit, _ = nibble_position(row, k)
    assert set_bytes[:, :3].unique(dim=0).tolist() == [[1, 1, 2]]
    assert set_bytes[:, 3].tolist() == [block * 576 + word + bit // 8]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 1000))
def test_unpack_inverts_pack(experts: int, tiles: int, k_tiles: int, paired: bool, seed: int) -> None:
    codes, scales = random_codes(experts, 64 * tiles, 64 * k_tiles, seed=seed)
    weight = chord.pack_w4a16(codes, scales, gate_up=paired)
    assert weight.paired == paired
    assert (weight.experts, weight.n, weight.k) == (experts, 64 * tiles, 64 * k_tiles)
    unpacked = weight.unpack()
    assert torch.equal(unpacked[0], codes)
    assert torch.equal(unpacked[1], scales)


def test_words_and_codes_pack_to_the_same_bytes() -> None:
    codes, scales = random_codes(2, 128, 256)
    words = W4A16.words_of_codes(codes)
    assert words.dtype == torch.int32
    assert torch.equal(W4A16.codes_of_words(words), codes)
    assert [int(words[1, 5, 3]) >> (4 * j) & 15 for j in range(8)] == codes[1, 5, 24:32].tolist()
    for paired in (False, True):
        assert torch.equal(chord.pack_w4a16(words, scales, gate_up=paired).data, chord.pack_w4a16(codes, scales, gate_up=paired).data)


def test_pairing_puts_eight_gate_rows_before_their_up_rows() -> None:
    paired = W4A16.pair_rows(torch.arange(64))
    assert paired[:16].tolist() == [*range(8), *range(32, 40)]
    assert torch.equal(W4A16.unpair_rows(paired), torch.arange(64))


def test_packing_in_chunks_is_packing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales = random_codes(1, 512, 256)
    whole = chord.pack_w4a16(codes, scales, gate_up=True).data
    monkeypatch.setattr("chord_kernels.formats._ROWS_AT_ONCE", 1)
    assert torch.equal(chord.pack_w4a16(codes, scales, gate_up=True).data, whole)


def test_all_codes_in_order_are_minus_8_to_7() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(64, 4)
    values = W4A16.dequantize(codes, torch.ones((64, 2), dtype=torch.bfloat16), rounded=True)
    assert values[0, :16].tolist() == list(range(-8, 8))


@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        (torch.zeros(1, 60, 64, dtype=torch.uint8), torch.ones(1, 60, 2), "N = 60 is not a positive multiple of 64"),
        (torch.zeros(1, 64, 96, dtype=torch.uint8), torch.ones(1, 64, 3), "K = 96 is not a positive multiple of 64"),
        (torch.zeros(1, 64, 352, dtype=torch.uint8), torch.ones(1, 64, 11), "K = 352"),
        (torch.zeros(1, 64, 384, dtype=torch.uint8), torch.ones(1, 64, 24), r"\[64, 24\], codes are \[64, 384\].*\[64, 12\]"),
        (torch.full((1, 64, 64), 16, dtype=torch.uint8), torch.ones(1, 64, 2), "codes reach 16"),
        (torch.zeros(1, 64, 64), torch.ones(1, 64, 2), "codes are torch.float32"),
        (torch.zeros(64, 64, dtype=torch.uint8), torch.ones(64, 2), r"must be \[E, N, ...\]"),
        (torch.zeros(1, 64, 64, dtype=torch.uint8), torch.full((1, 64, 2), float("nan")), "not finite"),
        (torch.zeros(1, 64, 64, dtype=torch.uint8), torch.full((1, 64, 2), 2.0**23), "scales reach 8.38861e"),
        (torch.zeros(1, 64, 64, dtype=torch.uint8), torch.ones(1, 64, 2, dtype=torch.int32), "scales are torch.int32"),
    ],
)
def test_wrong_input_is_refused_with_the_numbers(codes: torch.Tensor, scales: torch.Tensor, message: str) -> None:
    """HAZARDS 4, 29, 31."""
    with pytest.raises(FormatError, match=message):
        chord.pack_w4a16(codes, scales)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_scale_dtypes_are_rounded_to_bf16_once(dtype: torch.dtype) -> None:
    scales = torch.tensor([1e-7, 6e4, 1e-40, 0.1]).repeat(64, 1).view(1, 64, 4).to(dtype)
    weight = chord.pack_w4a16(torch.zeros((1, 64, 128), dtype=torch.uint8), scales)
    expected = scales.to(torch.bfloat16)
    assert torch.equal(weight.unpack()[1], torch.where(expected.abs() < 2.0**-97, 0.0, expected))  # 1e-40 is 0
