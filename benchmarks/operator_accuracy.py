"""How far the compile-time model is from operators and layers that others measured, and on types it never saw.

Constants are fitted on all types but one and asked about that one, each in turn, and then fitted with
it. The error is |predicted / measured - 1|. Rows under three launches are not judged.

    python -m benchmarks.operator_accuracy [--refit]
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from arena_jax.compiler.cost import FITTED, Efficiency, Hardware
from arena_jax.compiler.cost.hardware import itemsize_of
from arena_jax.compiler.cost.links import group_link
from arena_jax.compiler.cost.matmul import matmul_s
from arena_jax.grid import CATALOGUE, Allocation, Submesh
from benchmarks import _operators as ops
from benchmarks._report import table, write

TYPES = ("P4", "P100", "V100", "T4", "A100")
# What is fitted on what: every constant but those that no row of these tables can tell.
UNTOLD = ("conv_share", "conv_weight_passes", "launch_s", "shared_lanes_share", "unfused_share", "new_gddr_share")
FREE = tuple(f.name for f in fields(Efficiency) if f.name not in UNTOLD)
# How strongly a constant is held at its round starting value, in units of its logarithm's deviation.
_HOLD = 0.6
_ROWS_PER_CELL = 60
# One type on its own: nothing else speaks for its constants, so more rows, held less, and fitted to what is judged.
_OWN_ROWS_PER_CELL, _OWN_HOLD = 400, 3.0


@dataclass(frozen=True)
class Block:
    """Rows of one device with the same kinds of parts, as arrays for one evaluation.

    ``owner`` says which row each part belongs to.
    """

    gpu: str
    rows: list[ops.Measured]
    products: dict[str, tuple[np.ndarray, np.ndarray]]
    streams: dict[str, tuple[np.ndarray, np.ndarray]]
    fixed_s: np.ndarray
    seconds: np.ndarray

    @classmethod
    def of(cls, gpu: str, rows: list[ops.Measured]) -> "Block":
        products: dict[str, tuple[list[int], list[Any]]] = {}
        streams: dict[str, tuple[list[int], list[Any]]] = {}
        fixed = np.zeros(len(rows))
        for i, row in enumerate(rows):
            for part in row.parts:
                fixed[i] += ops.LAUNCH_S if "layer" not in row.group or "fp16" in row.group else 0.0
                if isinstance(part, ops.Product):
                    owner, shapes = products.setdefault(part.dtype, ([], []))
                    owner.append(i)
                    shapes.append((part.batch, part.m, part.k, part.n))
                elif isinstance(part, ops.Stream):
                    owner, shapes = streams.setdefault(part.kind, ([], []))
                    owner.append(i)
                    shapes.append(part.num_bytes)
                else:
                    fixed[i] += _link_s(gpu, part)
        return cls(
            gpu,
            rows,
            {k: (np.array(o), np.array(v, float).T) for k, (o, v) in products.items()},
            {k: (np.array(o), np.array(v, float)) for k, (o, v) in streams.items()},
            fixed,
            np.array([row.seconds for row in rows]),
        )

    def predicted_s(self, efficiency: Efficiency) -> np.ndarray:
        device = ops.DEVICES[self.gpu]
        hardware = Hardware(device=device, allocation=Allocation(device.name, 1, 1), efficiency=efficiency)
        total = self.fixed_s.copy()
        for dtype, (owner, shapes) in self.products.items():
            np.add.at(total, owner, matmul_s(device, efficiency, dtype, itemsize_of(dtype), *shapes))
        for kind, (owner, moved) in self.streams.items():
            np.add.at(total, owner, hardware.op_s(kind, "float32", np.zeros(1), moved) - hardware.launch_s)
        return total


def _link_s(gpu: str, part: ops.AllReduce) -> float:
    if part.bandwidth is not None:
        return 2 * (part.size - 1) / part.size * part.num_bytes / part.bandwidth
    device = ops.DEVICES[gpu]
    hardware = Hardware(device=device, allocation=Allocation(device.name, 1, part.size))
    return float(group_link(hardware, Submesh(1, part.size), part.size, 1).all_reduce_s(part.num_bytes))


def blocks(rows: Iterable[ops.Measured]) -> list[Block]:
    by_gpu: dict[str, list[ops.Measured]] = {}
    for row in rows:
        if row.seconds > 3 * ops.LAUNCH_S:
            by_gpu.setdefault(row.gpu, []).append(row)
    return [Block.of(gpu, found) for gpu, found in by_gpu.items()]


def sample(rows: Sequence[ops.Measured], most: int = _ROWS_PER_CELL, seed: int = 0) -> list[ops.Measured]:
    """At most ``most`` rows of every (gpu, group, label): no table outweighs another."""
    cells: dict[tuple[str, str, str], list[ops.Measured]] = {}
    for row in rows:
        if row.seconds > 3 * ops.LAUNCH_S:
            label = "" if row.group.startswith("layer") else row.label
            cells.setdefault((row.gpu, row.group, label), []).append(row)
    rng = np.random.default_rng(seed)
    out = []
    for _, found in sorted(cells.items()):
        keep = min(len(found), most)
        out += [found[i] for i in rng.choice(len(found), keep, replace=False)]
    return out


# Where fits begin, and are held lightly: round numbers of public microbenchmarks and kernel guides.
ROUND = Efficiency(
    float32_share=0.9,
    tensor_share=0.8,
    flops_per_joule=57e9,
    tensor_flops_per_joule=350e9,
    tile_128x64=0.95,
    tile_64x64=0.7,
    tile_64x32=0.45,
    tile_32x32=0.22,
    tile_16x16=0.1,
    tile_start_depth=16,
    exposed_share=0.2,
    store_cost=1.3,
    unaligned_share=0.9,
    old_unaligned_share=0.65,
    old_long_rows=0.4,
    stream_share=0.9,
    old_stream_share=0.76,
    reduce_share=0.7,
)


def fit(rows: Sequence[ops.Measured], start: Efficiency = ROUND, *, own: bool = False) -> Efficiency:
    """Constants that fit rows best, robustly, held near ``start``.

    Args:
        own: the rows are of the one type that the constants are for. Then relative errors, which are what is
            judged, are fitted; otherwise logarithms, which favour no direction.
    """
    found = blocks(sample(rows, _OWN_ROWS_PER_CELL if own else _ROWS_PER_CELL))
    hold = _OWN_HOLD if own else _HOLD
    first = np.log([getattr(start, name) for name in FREE])
    # A share is at most one.
    upper = np.where([name.endswith("share") for name in FREE], np.log(0.98), np.inf)
    cells: dict[tuple[str, str], int] = {}
    for block in found:
        for row in block.rows:
            cells[block.gpu, row.group] = cells.get((block.gpu, row.group), 0) + 1
    weights = np.concatenate([[1 / np.sqrt(cells[b.gpu, r.group]) for r in b.rows] for b in found])

    def residuals(x: np.ndarray) -> np.ndarray:
        made = replace(start, **dict(zip(FREE, map(float, np.exp(x)), strict=True)))
        ratios = np.concatenate([b.predicted_s(made) / b.seconds for b in found])
        errors = (ratios - 1) / 0.05 if own else np.log(ratios) / 0.2
        return np.concatenate([errors * weights, (x - first) / hold * 0.3])

    x0 = np.minimum(first, upper - 1e-6)
    answer = least_squares(residuals, x0, bounds=(-np.inf, upper), loss="soft_l1", max_nfev=40 if own else 15)
    return replace(start, **{k: float(f"{v:.3g}") for k, v in zip(FREE, np.exp(answer.x), strict=True)})


def errors_of(efficiency: Efficiency, found: Sequence[Block]) -> dict[tuple[str, str], tuple[int, float, float, float]]:
    """By (type, group): rows, mean and median error, median of predicted / measured."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for block in found:
        for row, ratio in zip(block.rows, block.predicted_s(efficiency) / block.seconds, strict=True):
            ratios.setdefault((ops.family(block.gpu), row.group), []).append(float(ratio))
    out = {}
    for key, values in sorted(ratios.items()):
        error = np.abs(np.array(values) - 1)
        out[key] = len(values), float(error.mean()), float(np.median(error)), float(np.median(values))
    return out


def unmeasured_types() -> list[list[str]]:
    """What large products and streams reach on every GPU of the catalogue, by datasheet facts."""
    out = []
    for name, device in CATALOGUE.types.items():
        if device.platform != "cuda":
            continue
        row = [name]
        for dtype in ("float32", "float16"):
            for size in (1024, 8192):
                seconds = float(matmul_s(device, FITTED, dtype, itemsize_of(dtype), 1, size, size, size))
                rate = 2 * size**3 / seconds
                row.append(f"{rate / 1e12:.1f} ({100 * rate / device.peak(dtype):.0f} %)")
        out.append([*row, f"{FITTED.bytes_per_s(device) / 1e9:.0f}"])
    return out


LIMITS = {"gemm": (0.25, 0.15), "layer": (0.15, 0.08)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refit", action="store_true", help="print constants fitted on all rows")
    args = parser.parse_args()
    rows = [
        *ops.gemms(),
        *ops.vectors(),
        *ops.operators_fwd_bwd(),
        *ops.megatron_operators(),
        *ops.megatron_layers(),
        *ops.sailor_layers(),
    ]
    everything = blocks(rows)
    with_all = fit(rows)
    if args.refit:
        print(with_all)
    seen = errors_of(with_all, everything)
    shipped = errors_of(FITTED, everything)
    unseen: dict[tuple[str, str], tuple[int, float, float, float]] = {}
    own: dict[tuple[str, str], tuple[int, float, float, float]] = {}
    for left_out in TYPES:
        others = fit([row for row in rows if ops.family(row.gpu) != left_out])
        alone = fit([row for row in rows if ops.family(row.gpu) == left_out], with_all, own=True)
        mine = [b for b in everything if ops.family(b.gpu) == left_out]
        unseen |= errors_of(others, mine)
        own |= errors_of(alone, mine)
    lines = []
    for key, (count, mean, median, ratio) in unseen.items():
        limit = LIMITS.get(key[1].split()[0], (0.30, 0.20))
        lines.append(
            [
                *key,
                count,
                *(f"{100 * x:.1f}" for x in (mean, median)),
                f"{ratio:.2f}",
                f"{100 * limit[0]:.0f}",
                "yes" if mean <= limit[0] else "no",
                *(f"{100 * x:.1f}" for x in own[key][1:3]),
                f"{100 * limit[1]:.0f}",
                "yes" if own[key][1] <= limit[1] else "no",
                *(f"{100 * x:.1f}" for x in shipped[key][1:3]),
            ]
        )
    head = ["type", "kind", "rows", "unseen mean %", "median %", "ratio", "limit %", "met"]
    head += ["fitted mean %", "median %", "limit %", "met", "shipped mean %", "median %"]
    write(
        "operator_accuracy",
        title="Operators and layers: compile-time model against measurements by others",
        lines=[
            *table(head, lines),
            "",
            "unseen: constants fitted on all other types. fitted: on this type alone. shipped: the constants in",
            "`arena_jax.compiler.cost`. ratio: median of predicted over measured, unseen.",
            "",
            "## Every GPU: predicted TFLOP/s of square products (share of the datasheet), GB/s of streams",
            "",
            *table(
                ["type", "float32 1024", "float32 8192", "float16 1024", "float16 8192", "stream"], unmeasured_types()
            ),
        ],
        data={
            "unseen": {" | ".join(k): v for k, v in unseen.items()},
            "fitted": {" | ".join(k): v for k, v in own.items()},
            "all": {" | ".join(k): v for k, v in seen.items()},
            "shipped": {" | ".join(k): v for k, v in shipped.items()},
            "constants": {f.name: getattr(with_all, f.name) for f in fields(Efficiency)},
        },
    )


if __name__ == "__main__":
    main()
