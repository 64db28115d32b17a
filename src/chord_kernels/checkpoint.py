# SPDX-License-Identifier: Apache-2.0
"""Reader of checkpoints with INT4 or MXFP8 experts.

Names and shapes: `...layers.{layer}....experts.{e}.{gate,up,down}_proj.` +

- INT4 (compressed-tensors `pack-quantized`: Kimi K2.x and alike): `weight_packed` int32 [N, K/8] (nibble j of a word is k = 8 * word + j,
  value = nibble - 8), `weight_scale` [N, K/32], `weight_shape` [2] (optional).
- MXFP8 (compressed-tensors `mxfp8-quantized`, ModelOpt, `quant_method` mxfp8): `weight` E4M3 [N, K], `weight_scale` (or
  `weight_scale_inv`) E8M0 [N, K/32]. Stacked or interleaved gate/up tensors have other names and must be converted before.

Config and tensors are checked before the first byte is packed; what is not supported is refused with the field and its value.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint_formats import INT4, MX8, Stored, stored_of
from .errors import CheckpointError
from .formats import W4A16
from .progress import progress
from .weights import PackedWeight, empty_weight, pack_expert_into

_NAME = re.compile(r"^(?P<root>.*?layers\.(?P<layer>\d+)\..*experts)\.(?P<expert>\d+)\.(?P<proj>gate|up|down)_proj\.(?P<tensor>\w+)$")
_PROJECTIONS = ("gate", "up", "down")


@dataclass(frozen=True)
class Cut:
    """This rank's share: `size` ranks, this one is `rank`."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise CheckpointError(f"rank {self.rank} of {self.size}; ranks go from 0 to size - 1")

    def of(self, total: int) -> slice:
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


class Checkpoint:
    """An opened checkpoint folder: config validated, names indexed, nothing read yet.

    path: a folder with config.json and either model.safetensors.index.json or *.safetensors. Raises CheckpointError.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        config = self._read_json("config.json")
        self.config: dict[str, Any] = config
        self._files = self._index()
        roots = self._group_names((INT4.weight, MX8.weight))
        if not roots:
            raise CheckpointError(
                f"{self.path} has no tensors named ...layers.N....experts.E.(gate|up|down)_proj.({INT4.weight}|{MX8.weight})"
            )
        beside = self._read_json("hf_quant_config.json") if (self.path / "hf_quant_config.json").exists() else {}
        self.stored: Stored = stored_of(config, beside, module=f"{next(iter(roots.values()))}.0.gate_proj")
        self._layers = self._group_names((self.stored.weight,))

    # -- what is there ----------------------------------------------------------------------------------------------------

    def _read_json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        try:
            return json.loads(file.read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing; give the folder of a checkpoint") from None
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{file} is not valid JSON: {error}") from error

    def _index(self) -> dict[str, str]:
        from safetensors import SafetensorError, safe_open

        if (self.path / "model.safetensors.index.json").exists():
            index = self._read_json("model.safetensors.index.json").get("weight_map")
            if not isinstance(index, dict):
                raise CheckpointError(f"{self.path / 'model.safetensors.index.json'} has no weight_map")
            missing = sorted({file for file in index.values() if not (self.path / file).exists()})
            if missing:
                raise CheckpointError(f"{self.path} lacks {len(missing)} of its files, first {missing[0]}; download it again")
            return index
        files: dict[str, str] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as opened:
                    files |= dict.fromkeys(opened.keys(), file.name)
            except SafetensorError as error:
                raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error
        return files

    def _group_names(self, weights: tuple[str, ...]) -> dict[int, str]:
        """Layer -> name up to and including 'experts', where a projection has a tensor of one of these names."""
        layers: dict[int, str] = {}
        for name in self._files:
            match = _NAME.match(name)
            if match and match["tensor"] in weights:
                layers[int(match["layer"])] = match["root"]
        return dict(sorted(layers.items()))

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers with quantized experts."""
        return list(self._layers)

    def experts(self, layer: int) -> int:
        """Experts of a layer; their numbers must run from 0 without a gap."""
        prefix = self._root(layer) + "."
        found = {int(name[len(prefix) :].split(".", 1)[0]) for name in self._files if name.startswith(prefix)}
        if found != set(range(len(found))):
            gap = next(e for e in range(max(found) + 1) if e not in found)
            raise CheckpointError(f"layer {layer} has experts up to {max(found)} but not expert {gap}")
        return len(found)

    def _root(self, layer: int) -> str:
        if layer not in self._layers:
            raise CheckpointError(f"{self.path} has no quantized experts in layer {layer}; layers with experts: {_ranges(self.layers)}")
        return self._layers[layer]

    # -- reading ----------------------------------------------------------------------------------------------------------

    def load(
        self,
        layer: int,
        *,
        tp: tuple[int, int] = (0, 1),
        ep: tuple[int, int] = (0, 1),
        device: torch.device | str = "cpu",
    ) -> tuple[PackedWeight, PackedWeight]:
        """Pack one layer's experts, one at a time: (gate_up [E, 2I, H] paired, down [E, H, I]) on `device`.

        tp, ep: (rank, size). TP cuts the intermediate size, EP the experts.
        """
        with ExitStack() as stack:
            source = _Source(self, layer, stack)
            experts, hidden, inter = source.check(self.experts(layer))
            tp_cut, ep_cut = Cut(*tp), Cut(*ep)
            _check_cut(experts, hidden, inter, tp_cut, ep_cut)
            mine, columns = ep_cut.of(experts), tp_cut.of(inter)
            width = columns.stop - columns.start
            form, count = self.stored.format, mine.stop - mine.start
            gate_up = empty_weight(form, count, 2 * width, hidden, paired=True, device=device)
            down = empty_weight(form, count, hidden, width, device=device)
            with progress(f"layer {layer}: packing experts", count) as step:
                for local, expert in enumerate(range(mine.start, mine.stop)):
                    gate, up = (source.rows(expert, proj, columns) for proj in ("gate", "up"))
                    pack_expert_into(gate_up, local, *(torch.cat(pair) for pair in zip(gate, up, strict=True)))
                    pack_expert_into(down, local, *source.columns(expert, "down", columns))
                    step()
        return gate_up, down

    def load_all(self, **options: Any) -> Iterator[tuple[int, PackedWeight, PackedWeight]]:
        """(layer, gate_up, down) of every layer, one at a time; options as for `load`."""
        for layer in self.layers:
            yield layer, *self.load(layer, **options)


class _Source:
    """The tensors of one layer's experts, through memory-mapped files."""

    def __init__(self, checkpoint: Checkpoint, layer: int, stack: ExitStack) -> None:
        self._checkpoint, self._stored, self._stack = checkpoint, checkpoint.stored, stack
        self._root = checkpoint._root(layer)
        self._open: dict[str, Any] = {}

    def _name(self, expert: int, proj: str, tensor: str) -> str:
        return f"{self._root}.{expert}.{proj}_proj.{tensor}"

    def _file(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        file = self._checkpoint._files.get(name)
        if file is None:
            raise CheckpointError(f"{self._checkpoint.path} has no tensor {name}")
        if file not in self._open:
            try:
                self._open[file] = self._stack.enter_context(safe_open(self._checkpoint.path / file, framework="pt"))
            except SafetensorError as error:
                raise CheckpointError(f"{self._checkpoint.path / file} is not a readable safetensors file: {error}") from error
        return self._open[file]

    def _slice(self, expert: int, proj: str, tensor: str) -> Any:
        name = self._name(expert, proj, tensor)
        file = self._file(name)
        if name not in file.keys():  # noqa: SIM118  safe_open is no mapping
            raise CheckpointError(f"the index names {name}, but its file does not hold it")
        return file.get_slice(name)

    def check(self, experts: int) -> tuple[int, int, int]:
        """Every tensor's shape and dtype, from the headers alone: (experts, hidden, intermediate)."""
        stored = self._stored
        inter, entries = self._shape(0, "gate", stored.weight)
        hidden = entries * stored.per_entry
        wanted = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
        for expert in range(experts):
            for proj in _PROJECTIONS:
                n, k = wanted[proj]
                self._need(expert, proj, stored.weight, (n, k // stored.per_entry), stored.weight_dtypes)
                self._need(expert, proj, stored.scale, (n, k // stored.format.group), stored.scale_dtypes)
                shape_name = self._name(expert, proj, "weight_shape")
                if shape_name in self._checkpoint._files:
                    stated = self._file(shape_name).get_tensor(shape_name).tolist()
                    if stated != [n, k]:
                        raise CheckpointError(f"{shape_name} says {stated}, the weight is [{n}, {k}]")
                for tensor in ("weight_zero_point", "weight_g_idx"):
                    name = self._name(expert, proj, tensor)
                    if name in self._checkpoint._files:
                        what = "zero points" if tensor == "weight_zero_point" else "a column order (g_idx)"
                        raise CheckpointError(f"{name} gives {what}; only symmetric weights in natural order are supported")
        return experts, hidden, inter

    def _shape(self, expert: int, proj: str, tensor: str) -> tuple[int, int]:
        shape = tuple(self._slice(expert, proj, tensor).get_shape())
        if len(shape) != 2:
            raise CheckpointError(f"{self._name(expert, proj, tensor)} is {list(shape)}; it has two dimensions in this format")
        return shape

    def _need(self, expert: int, proj: str, tensor: str, shape: tuple[int, int], dtypes: tuple[str, ...]) -> None:
        found, dtype = self._shape(expert, proj, tensor), self._slice(expert, proj, tensor).get_dtype()
        if found != shape or dtype not in dtypes:
            raise CheckpointError(
                f"{self._name(expert, proj, tensor)} is {dtype} {list(found)}; wanted {' or '.join(dtypes)} {list(shape)}"
            )

    def rows(self, expert: int, proj: str, rows: slice) -> tuple[Tensor, Tensor]:
        """Weight and scales of some output rows."""
        return tuple(self._slice(expert, proj, tensor)[rows] for tensor in (self._stored.weight, self._stored.scale))

    def columns(self, expert: int, proj: str, columns: slice) -> tuple[Tensor, Tensor]:
        """Weight and scales of some of K, which begins and ends at whole groups."""
        parts = ((self._stored.weight, self._stored.per_entry), (self._stored.scale, self._stored.format.group))
        return tuple(self._slice(expert, proj, tensor)[:, columns.start // per : columns.stop // per].contiguous() for tensor, per in parts)


def _check_cut(experts: int, hidden: int, inter: int, tp: Cut, ep: Cut) -> None:
    if experts % ep.size:
        raise CheckpointError(f"{experts} experts do not divide over {ep.size} EP ranks")
    needed = tp.size * W4A16.tile_k
    if inter % needed:
        raise CheckpointError(
            f"intermediate size {inter} over TP {tp.size} is {inter / tp.size:g} a rank; a rank needs a multiple of {W4A16.tile_k} "
            f"(whole tiles of whole groups of {W4A16.group}), so the intermediate size must be a multiple of {needed}"
        )
    for n, k in ((2 * inter // tp.size, hidden), (hidden, inter // tp.size)):
        if reason := W4A16.why_not(n, k):
            raise CheckpointError(f"the experts are hidden {hidden}, intermediate {inter}: {reason}")


def _ranges(numbers: list[int]) -> str:
    return f"{numbers[0]}..{numbers[-1]}" if len(numbers) > 4 else ", ".join(map(str, numbers))


def load_experts(
    path: str | os.PathLike,
    layer: int,
    *,
    tp: tuple[int, int] = (0, 1),
    ep: tuple[int, int] = (0, 1),
    device: torch.device | str = "cpu",
) -> tuple[PackedWeight, PackedWeight]:
    """(gate_up, down) of one layer of a checkpoint folder; see `Checkpoint.load`."""
    return Checkpoint(path).load(layer, tp=tp, ep=ep, device=device)
