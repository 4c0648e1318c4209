"""Operator and layer measurements by others, each with what ran: products, streams and collectives.

``Measured.parts`` describes a measurement in the cost model's terms; how often a kernel passes over
its tensors is a fact about the program that was measured (eager PyTorch, Megatron), not about a GPU.
"""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arena_jax.grid import CATALOGUE, DeviceType

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("ARENA_JAX_DATA", ROOT / "../shared/data")).resolve()
# A launch from Python and its synchronisation, seconds; rows under three times it are not judged.
LAUNCH_S = 3.5e-5

_V100, _P100, _A100 = CATALOGUE["v100-32"], CATALOGUE["p100"], CATALOGUE["a100-40"]
DEVICES: dict[str, DeviceType] = {
    # Not in the catalogue: a type that nothing else here has seen. NVIDIA Tesla P4 datasheet.
    "P4": replace(
        CATALOGUE["t4"],
        name="p4",
        peak_flops={"float32": 5.5e12, "float16": 0.086e12},
        memory_bytes=8 * 2**30,
        memory_bandwidth=192e9,
        num_cores=20,
        fp32_lanes_per_core=128,
        cache_bytes=2 * 2**20,
        power_w=75,
        process_nm=16,
        year=2016,
    ),
    "T4": CATALOGUE["t4"],
    # PCIe cards: clock and power differ from the catalogue's SXM cards (datasheets of the same families).
    "P100-PCIE-16GB": replace(_P100, peak_flops={"float32": 9.3e12, "float16": 18.7e12}, power_w=250),
    "V100-PCIE-32GB": replace(_V100, peak_flops={"float32": 14e12, "float16": 112e12}, power_w=250),
    "A100-PCIE-40GB": replace(_A100, power_w=250),
    "V100-SXM2-16GB": CATALOGUE["v100-16"],
    "V100-SXM2-32GB": replace(CATALOGUE["v100-16"], memory_bytes=32 * 2**30),
    "A100-SXM4-40GB": _A100,
    "A100-40": _A100,
    "A100-80": CATALOGUE["a100-80"],
    "V100-16": CATALOGUE["v100-16"],
}


def family(gpu: str) -> str:
    """The type that is left out together: P4, T4, P100, V100 or A100."""
    return gpu.partition("-")[0]


@dataclass(frozen=True)
class Product:
    """``(batch, m, k) x (batch, k, n)``."""

    dtype: str
    batch: float
    m: float
    k: float
    n: float


@dataclass(frozen=True)
class Stream:
    """A kernel that moves bytes: ``elementwise``, ``reduce`` or ``gather``."""

    kind: str
    num_bytes: float


@dataclass(frozen=True)
class AllReduce:
    """``bandwidth``: bytes/s of a ring where it was measured beside, else the cost model's."""

    num_bytes: float
    size: int
    bandwidth: float | None = None


Part = Product | Stream | AllReduce


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measurement: ``group`` is what it is reported under, ``parts`` run one after the other."""

    gpu: str
    group: str
    label: str
    seconds: float
    parts: tuple[Part, ...]


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (DATA / name).open() as lines:
        yield from csv.DictReader(lines)


def gemms() -> list[Measured]:
    """Single products: float32 on five GPUs, float16 on two."""
    out = []
    for r in _rows("operators/ops_gemm_fp32.csv"):
        shape = (float(r[c]) for c in ("batch", "m", "k", "n"))
        out.append(
            Measured(
                gpu=r["gpu"],
                group="gemm fp32",
                label=f"{r['op']} {r['shapes']}",
                seconds=float(r["latency_us"]) * 1e-6,
                parts=(Product("float32", *shape),),
            )
        )
    for r in _rows("operators/ops_gemm_fp16.csv"):
        shape = (float(r[c]) for c in ("batch", "m", "k", "n"))
        out.append(
            Measured(
                gpu=r["gpu"],
                group="gemm fp16",
                label="matmul",
                seconds=float(r["fwd_us"]) * 1e-6,
                parts=(Product("float16", *shape),),
            )
        )
    return out


def vectors() -> list[Measured]:
    """Elementwise and row operations in float32: two inputs for the binary ones, one for the rest."""
    out = []
    for r in _rows("operators/ops_vector_fp32.csv"):
        reduces = r["op"] in ("softmax", "ln")
        passes = 3 if r["op"] in ("add", "mul", "div", "pow") else 2
        moved = 4.0 * passes * float(r["rows"]) * float(r["cols"])
        out.append(
            Measured(
                gpu=r["gpu"],
                group="reduce fp32" if reduces else "elementwise fp32",
                label=r["op"],
                seconds=float(r["latency_us"]) * 1e-6,
                parts=(Stream("reduce" if reduces else "elementwise", moved),),
            )
        )
    return out


def operators_fwd_bwd() -> list[Measured]:
    """Forward and backward of the operators of two models in float32 on a V100."""
    out = []
    for r in _rows("operators/ops_fwd_bwd_fp32.csv"):
        shape = [[int(d) for d in x.strip("[]").split("x")] for x in r["input_shapes"][1:-1].split("]x[")]
        result = [int(d) for d in r["output_shape"].split("x")]
        size = 4.0
        for d in result:
            size *= d
        forward: tuple[Part, ...]
        backward: tuple[Part, ...]
        if r["op"] in ("linear", "addmm", "matmul"):
            *batch, m, n = result
            lead = 1
            for d in batch:
                lead *= d
            k = shape[-2][-1] if r["op"] == "addmm" else shape[0][-1]
            if r["op"] == "matmul":
                forward = (Product("float32", lead, m, k, n),)
                backward = (Product("float32", lead, m, n, k), Product("float32", lead, k, m, n))
            else:
                forward = (Product("float32", 1, lead * m, k, n),)
                backward = (Product("float32", 1, lead * m, n, k), Product("float32", 1, k, lead * m, n))
        elif r["op"] == "dropout":  # backward scales a mask of bytes into floats, then multiplies
            forward, backward = (Stream("elementwise", 2.25 * size),), (Stream("elementwise", 4.25 * size),)
        elif r["op"] in ("gelu", "tanh"):
            forward, backward = (Stream("elementwise", 2 * size),), (Stream("elementwise", 3 * size),)
        elif r["op"] == "softmax":
            forward, backward = (Stream("reduce", 2 * size),), (Stream("reduce", 3 * size),)
        else:  # layernorm; its backward reads again for the sums over rows
            forward, backward = (Stream("reduce", 2 * size),), (Stream("reduce", 5 * size), Stream("reduce", 2 * size))
        kind = "gemm" if isinstance(forward[0], Product) else forward[0].kind  # type: ignore[union-attr]
        for way, parts in (("fwd", forward), ("bwd", backward)):
            out.append(
                Measured(
                    gpu=r["gpu"],
                    group=f"{kind} fp32 {way}",
                    label=f"{r['op']} of {r['model']}",
                    seconds=float(r[f"{way}_us"]) * 1e-6,
                    parts=parts,
                )
            )
    return out


# ----------------------------------------------------------------------------- Megatron layers, float16


@dataclass(frozen=True, kw_only=True)
class MegatronOp:
    """One operator of a Megatron GPT layer: what its passes are, and its bytes."""

    key: tuple[str, str, int, int]
    op: str
    fwd_s: float
    bwd_s: float
    forward: tuple[Part, ...]
    backward: tuple[Part, ...]
    weight_bytes: float
    output_bytes: float
    measured_weight_bytes: float
    measured_output_bytes: float


def megatron_ops() -> list[MegatronOp]:
    """All operators but the embedding, whose rows are not usable.

    The backward pass of a product was measured for its input only. With tp > 1 the row-parallel
    forward and the column-parallel backward end with an all-reduce.
    """
    out = []
    for r in _rows("operators/layer_ops_fp16_megatron.csv"):
        if r["op"] == "encoder-embedding":
            continue
        h, ffn, seq, vocab, mb, tp, heads = (
            int(r[c]) for c in ("hidden", "ffn", "seq", "vocab", "micro_batch", "tp", "heads")
        )
        rows = mb * seq
        model, wide, scores = 2.0 * rows * h, 2.0 * rows * ffn / tp, 2.0 * mb * heads * seq * seq / tp
        out.append(
            MegatronOp(
                key=(r["gpu"], r["model"], mb, tp),
                op=r["op"],
                fwd_s=float(r["fwd_us"]) * 1e-6,
                bwd_s=float(r["bwd_us"]) * 1e-6,
                measured_weight_bytes=float(r["weights_mb"]) * 2**20,
                measured_output_bytes=float(r["activations_mb"]) * 2**20,
                **_megatron(r["op"], rows, mb, seq, h, ffn, vocab, heads, tp, model, wide, scores),
            )
        )
    return out


def _megatron(
    op: str,
    rows: int,
    mb: int,
    seq: int,
    h: int,
    ffn: int,
    vocab: int,
    heads: int,
    tp: int,
    model: float,
    wide: float,
    scores: float,
) -> dict[str, Any]:
    def product(m: float, k: float, n: float, batch: float = 1) -> Product:
        return Product("float16", batch, m, k, n)

    def made(forward: tuple[Part, ...], backward: tuple[Part, ...], weights: float, output: float) -> dict[str, Any]:
        return {"forward": forward, "backward": backward, "weight_bytes": weights, "output_bytes": output}

    reduced = (AllReduce(model, tp),) if tp > 1 else ()
    group, width = mb * heads / tp, h / heads
    if op == "enc-attention-qkv":
        n = 3 * h / tp
        return made((product(rows, h, n),), (product(rows, n, h), *reduced), 2 * h * n, 2 * rows * n)
    if op == "enc-MLP-GEMM-1":
        n = ffn / tp
        return made((product(rows, h, n),), (product(rows, n, h), *reduced), 2 * h * n, 2 * rows * n)
    if op in ("enc-attention-dense", "enc-MLP-GEMM-2"):
        k = (h if op == "enc-attention-dense" else ffn) / tp
        return made((product(rows, k, h), *reduced), (product(rows, h, k),), 2 * h * k, model)
    if op == "enc-attention-score":
        back = (product(seq, seq, width, group), product(seq, seq, width, group))
        return made((product(seq, width, seq, group),), back, 0.0, scores)
    if op == "enc-attention-context":
        back = (product(seq, width, seq, group), product(seq, seq, width, group))
        return made((product(seq, seq, width, group),), back, 0.0, model / tp)
    if op == "gpt-post-process":
        logits = rows * vocab / tp
        # Cast to float32, maximum, subtract, exponentiate, sum and divide, each a pass of its own.
        forward = (product(rows, h, vocab / tp), Stream("elementwise", 38.0 * logits))
        backward = (Stream("elementwise", 14.0 * logits), product(rows, vocab / tp, h), *reduced)
        return made(forward, backward, 2.0 * h * vocab / tp, 4.0 * logits)
    if op.endswith("layernorm"):
        # The input's gradient reads its rows twice; the sums over rows read them once more.
        parts = Stream("reduce", 5 * model), Stream("reduce", 2 * model)
        return made((Stream("reduce", 2 * model),), parts, 4.0 * h, model + 8.0 * rows)
    if op == "enc-attention-softmax":
        return made((Stream("reduce", 2 * scores),), (Stream("reduce", 3 * scores),), 0.0, scores)
    if op == "enc-attention-dropout":
        return made((Stream("elementwise", 2.5 * scores),), (Stream("elementwise", 2.5 * scores),), 0.0, 1.5 * scores)
    if op == "enc-MLP-gelu":  # with its bias, whose gradient is one more pass
        return made((Stream("elementwise", 2 * wide),), (Stream("elementwise", 4 * wide),), 0.0, wide)
    # Dropout between a bias and the residual, not fused: 2 + 2.5 + 3 passes; back 2.5 and the bias's.
    return made((Stream("elementwise", 7.5 * model),), (Stream("elementwise", 4.0 * model),), 0.0, 1.5 * model)


_GROUPS = {"qkv": "gemm", "dense": "gemm", "GEMM": "gemm", "score": "attention", "context": "attention"}


def megatron_operators() -> list[Measured]:
    """The operators one by one; only products without a collective count as products."""
    out = []
    for op in megatron_ops():
        for way, seconds, parts in (("fwd", op.fwd_s, op.forward), ("bwd", op.bwd_s, op.backward)):
            if any(isinstance(part, AllReduce) for part in parts):
                continue
            found = [group for word, group in _GROUPS.items() if word in op.op]
            first = parts[0]
            kind = found[0] if found else ("head" if op.op == "gpt-post-process" else first.kind)  # type: ignore[union-attr]
            out.append(Measured(gpu=op.key[0], group=f"{kind} fp16 {way}", label=op.op, seconds=seconds, parts=parts))
    return out


def megatron_layers() -> list[Measured]:
    """Whole transformer layers: the sum of their operators, forward and backward."""
    layers: dict[tuple[str, str, int, int], list[MegatronOp]] = {}
    for op in megatron_ops():
        if op.op.startswith("enc-"):
            layers.setdefault(op.key, []).append(op)
    out = []
    for (gpu, model, mb, tp), ops in layers.items():
        for way in ("fwd", "bwd"):
            seconds = sum(op.fwd_s if way == "fwd" else op.bwd_s for op in ops)
            parts = tuple(part for op in ops for part in (op.forward if way == "fwd" else op.backward))
            out.append(
                Measured(
                    gpu=gpu, group=f"layer fp16 {way}", label=f"{model} mb{mb} tp{tp}", seconds=seconds, parts=parts
                )
            )
    return out


# ------------------------------------------------------------------------------- Sailor layers, float32


@dataclass(frozen=True, kw_only=True)
class _Eager:
    """A transformer layer of eager PyTorch. Passes are over the scores and over the wide activations.

    Attributes:
        tf32: whether its products on A100s ran in TF32: those of the two large models reach 0.89 of
            the plain float32 rate there, those of the small ones several times that rate.
    """

    hidden: int
    ffn: int
    seq: int
    heads: int
    kv_heads: int
    tf32: bool
    gated: bool = False
    score_passes: tuple[float, float]
    wide_passes: tuple[float, float]


# OPT clamps scores with ``torch.max``, whose backward pass is half a dozen kernels. The stored bytes of
# layer_memory.csv have no room for masks of dropout, nor for the parts of an activation function.
_SAILOR = {
    "OPT-350": _Eager(
        hidden=1024, ffn=4096, seq=2048, heads=16, kv_heads=16, tf32=True, score_passes=(4, 14), wide_passes=(2, 3)
    ),
    "GPT-Neo-2.7": _Eager(
        hidden=2560, ffn=10240, seq=2048, heads=20, kv_heads=20, tf32=True, score_passes=(4, 5), wide_passes=(2, 3)
    ),
    "OPT-30": _Eager(
        hidden=7168, ffn=28672, seq=2048, heads=56, kv_heads=56, tf32=False, score_passes=(4, 14), wide_passes=(2, 3)
    ),
    "LLAMA-3-8": _Eager(
        hidden=4096,
        ffn=14336,
        seq=8192,
        heads=32,
        kv_heads=8,
        tf32=False,
        gated=True,
        score_passes=(4, 5),
        wide_passes=(5, 8),
    ),
}


# What the fits of bandwidth, parabolas in log2 of the size, may reach beyond their data, GB/s.
_CEILING = {"A100-40": 249.0, "A100-80": 249.0, "V100-16": 68.0}


def sailor_layers() -> list[Measured]:
    """Transformer layers of eager PyTorch models in float32; A100s multiply in TF32."""
    out = []
    fits = {
        (r["gpu"], int(r["gpus_per_node"])): (float(r["c2"]), float(r["c1"]), float(r["c0"]))
        for r in _rows("sailor/network_fits.csv")
        if r["scope"] == "intra"
    }
    for r in _rows("sailor/layer_profiles.csv"):
        if int(r["first_layer"]) not in (1, 2) or int(r["last_layer"]) < 2:
            continue
        layer = _SAILOR[r["model"]]
        mb, tp = int(r["mbs"]), int(r["tp"])
        if layer.heads % tp:  # seven devices: the heads do not divide
            continue
        dtype = "tensorfloat32" if r["gpu"].startswith("A100") and layer.tf32 else "float32"
        fit = fits.get((r["gpu"], tp)) or fits[r["gpu"], 4]
        size = np.log2(4.0 * mb * layer.seq * layer.hidden / 2**20)
        reduced = AllReduce(
            4.0 * mb * layer.seq * layer.hidden, tp, 1e9 * min(float(np.polyval(fit, size)), _CEILING[r["gpu"]])
        )
        forward, backward = _eager_layer(dtype, mb, tp, layer, reduced)
        for way, parts in (("fwd", forward), ("bwd", backward)):
            out.append(
                Measured(
                    gpu=r["gpu"],
                    group=f"layer fp32 {way}",
                    label=f"{r['model']} mb{mb} tp{tp}",
                    seconds=float(r[f"{way}_s"]),
                    parts=parts,
                )
            )
    return out


def _eager_layer(
    dtype: str, mb: int, tp: int, layer: _Eager, all_reduce: AllReduce
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    h, ffn, seq = layer.hidden, layer.ffn, layer.seq
    rows, width, group = mb * seq, h // layer.heads, mb * layer.heads / tp
    model, wide, scores = 4.0 * rows * h, 4.0 * rows * ffn / tp, 4.0 * group * seq * seq
    columns = [(h, (h + 2 * layer.kv_heads * width) / tp), *([(h, ffn / tp)] * (2 if layer.gated else 1))]
    dense = [*columns, (h / tp, h), (ffn / tp, h)]
    reduced = (all_reduce,) * 2 if tp > 1 else ()

    def way(products: tuple[Product, ...], i: int, softmax: float, norms: float, residuals: float) -> tuple[Part, ...]:
        return (
            *products,
            Stream("elementwise", layer.score_passes[i] * scores),
            Stream("reduce", softmax * scores),
            Stream("reduce", norms * model),
            Stream("elementwise", layer.wide_passes[i] * wide),
            Stream("elementwise", residuals * model),
            *reduced,
        )

    into, out = Product(dtype, group, seq, width, seq), Product(dtype, group, seq, seq, width)
    forward = (*(Product(dtype, 1, rows, k, n) for k, n in dense), into, out)
    backward = (
        *(Product(dtype, 1, rows, n, k) for k, n in dense),
        *(Product(dtype, 1, k, rows, n) for k, n in dense),
        *(into, out, out, out),
    )
    return way(forward, 0, 2, 4, 6), way(backward, 1, 3, 14, 4)
