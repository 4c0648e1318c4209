"""What XLA built: the collectives in the text of a compiled program, and what runs beside them.

The text is HLO as ``Compiled.as_text()`` prints it, in the order in which it runs. Loops count as often as
they go round where XLA knows it, which it does for every ``lax.scan``.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

_BITS = {"pred": 8, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r"\s*(?P<opcode>[\w\-]+)\(")
_ARRAY = re.compile(r"\b(?P<dtype>[a-z]+\d*\w*)\[(?P<dims>[\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_CALLS = re.compile(r"\b(?:calls|body|to_apply|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=\w*mesh\w*\[(?P<dims>[^\]]*)\]\s*\{(?P<axes>[^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_USED = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "all_gather",
}
# Starts of these carry their operands beside their results.
_CARRIES_OPERANDS = ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# The TPU compiler writes a reduce-scatter as a computation of its own: an all-reduce of which one shard is taken.
_SCATTERING = "all-reduce-scatter"
# What costs nothing of its own.
_FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional"})


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one sort in a program.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``permute``.
        num_bytes: of one: what one device holds in the end; of a ``reduce_scatter``, in the beginning.
        size: devices of a group.
        stride: how far neighbours of a group are apart, in devices.
        count: how often it runs.
        beside_flops, beside_bytes: FLOPs of products, and bytes read and written by what else runs between
            the start and the end of one. Both are 0 where nothing else runs meanwhile.
    """

    kind: str
    num_bytes: float
    size: int
    stride: int
    count: float = 1.0
    beside_flops: float = 0.0
    beside_bytes: float = 0.0


def collectives(text: str) -> tuple[Collective, ...]:
    """The collectives of a compiled module, equal ones together, the most bytes first."""
    module = _Module.parse(text)
    found: Counter[Collective] = Counter()
    for collective in module.walk(module.entry, 1.0):
        found[replace(collective, count=1.0)] += collective.count  # type: ignore[assignment]
    merged = [replace(collective, count=float(count)) for collective, count in found.items()]
    return tuple(sorted(merged, key=lambda c: (-c.num_bytes * c.count, c.kind, c.size, c.stride)))


def collective_bytes(text: str) -> Counter[str]:
    """Kind -> bytes of :class:`Collective`, over all collectives of a compiled module's text."""
    found: Counter[str] = Counter()
    for collective in collectives(text):
        found[collective.kind] += round(collective.num_bytes * collective.count)
    return found


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    rest: str

    @cached_property
    def arrays(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return _arrays(self.shape)

    @cached_property
    def num_bytes(self) -> float:
        return sum(_array_bytes(*array) for array in self.arrays)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_OPERAND.findall(self.rest[: _closing(self.rest)]))

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that this one runs, where they run whole rather than once per element."""
        if self.opcode not in ("fusion", "call", "while", "conditional", "async-start"):
            return ()
        names: list[str] = []
        for match in _CALLS.findall(self.rest):
            names += [name.strip().lstrip("%") for name in match.strip("{}").split(",")]
        return tuple(names)

    @property
    def is_start(self) -> bool:
        return self.opcode.endswith("-start")

    @property
    def is_done(self) -> bool:
        return self.opcode.endswith("-done")


@dataclass(frozen=True)
class _Module:
    entry: str
    computations: Mapping[str, Sequence[_Instruction]]
    _known: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "_Module":
        entry, name = "", ""
        computations: dict[str, list[_Instruction]] = {}
        for line in text.splitlines():
            if not line.startswith(" "):
                header = _HEADER.match(line)
                if header and " -> " in line:
                    name = header["name"]
                    computations[name] = []
                    entry = name if header["entry"] else entry
                continue
            match = _INSTRUCTION.match(line)
            if match and name:
                shape, rest = _split_shape(match["rest"])
                opcode = _OPCODE.match(rest)
                if opcode:
                    computations[name].append(
                        _Instruction(match["name"], shape, opcode["opcode"], rest[opcode.end() :])
                    )
        return cls(entry, computations)

    def walk(self, name: str, times: float, begun: set[str] | None = None) -> Iterator[Collective]:
        """Collectives that running a computation so often runs, in order.

        Args:
            begun: of a fusion's computation, channels of collectives that fusions before it began. The TPU compiler
                spreads one collective over several fusions, and names it in each.
        """
        instructions = self.computations.get(name, ())
        beside = self._beside(instructions)
        fused: set[str] = set() if begun is None else begun
        for instruction in instructions:
            collective = self._collective(instruction)
            if collective is not None:
                channel = _CHANNEL.search(instruction.rest)
                if begun is not None and channel:
                    if channel[1] in begun:
                        continue
                    begun.add(channel[1])
                flops, num_bytes = beside.get(instruction.name, (0.0, 0.0))
                kind = collective.kind
                if kind == "all_reduce" and name.startswith(_SCATTERING):
                    kind = "reduce_scatter"
                yield replace(collective, kind=kind, count=times, beside_flops=flops, beside_bytes=num_bytes)
                continue
            in_fusion = fused if instruction.opcode == "fusion" else None
            for called in instruction.called:
                yield from self.walk(called, times * self._trips(instruction), in_fusion)

    def _trips(self, instruction: _Instruction) -> float:
        """How often a loop goes round: as XLA says, or as it compares its counter with one number."""
        if instruction.opcode != "while":
            return 1.0
        known = _TRIPS.search(instruction.rest)
        if known:
            return float(known[1])
        condition = _CONDITION.search(instruction.rest)
        compared = self.computations.get(condition[1], ()) if condition else ()
        limits = [i.rest.partition(")")[0] for i in compared if i.opcode == "constant" and i.shape.startswith("s32[]")]
        counts = any("direction=LT" in i.rest for i in compared)
        return float(limits[0]) if counts and len(limits) == 1 and limits[0].isdigit() else 1.0

    def _collective(self, instruction: _Instruction) -> Collective | None:
        """The collective that an instruction starts or is."""
        kind = instruction.opcode.removesuffix("-start")
        inner = instruction
        if kind == "async":
            wrapped = [i for name in instruction.called for i in self.computations.get(name, ()) if i.opcode in _KINDS]
            if len(wrapped) != 1:
                return None
            (inner,) = wrapped
            kind = inner.opcode
        if kind not in _KINDS:
            return None
        arrays = list(inner.arrays)
        if inner.is_start and kind in _CARRIES_OPERANDS:
            arrays = [a for a in arrays if a[1]]  # without the counters of a permute
            arrays = arrays[len(arrays) // 2 :]
        num_bytes = sum(_array_bytes(*array) for array in arrays)
        size, stride = _group(inner.rest)
        if kind == "reduce-scatter":
            num_bytes *= size
        return Collective(kind=_KINDS[kind], num_bytes=num_bytes, size=size, stride=stride)

    def _beside(self, instructions: Sequence[_Instruction]) -> dict[str, list[float]]:
        """By start of a collective, FLOPs and bytes of what runs before its end; shared where several are open."""
        found: dict[str, list[float]] = {}
        running: list[str] = []
        for instruction in instructions:
            if instruction.is_done:
                running = [name for name in running if name not in instruction.operands]
            elif self._collective(instruction) is not None:
                if instruction.is_start:
                    found[instruction.name] = [0.0, 0.0]
                    running.append(instruction.name)
            elif running:
                work = self.work(instruction, instructions)
                for name in running:
                    found[name][0] += work[0] / len(running)
                    found[name][1] += work[1] / len(running)
        return found

    def work(self, instruction: _Instruction, around: Sequence[_Instruction]) -> tuple[float, float]:
        """FLOPs of products, and bytes that move through memory unless they are a product's."""
        if instruction.opcode in ("while", "call", "conditional"):
            flops = num_bytes = 0.0
            for name in instruction.called:
                inside = self._work_inside(name)
                trips = self._trips(instruction)
                flops, num_bytes = flops + inside[0] * trips, num_bytes + inside[1] * trips
            return flops, num_bytes
        if instruction.opcode in _FREE or instruction.is_start or instruction.is_done:
            return 0.0, 0.0
        flops = _dot_flops(instruction, around)
        for name in instruction.called:
            flops += sum(_dot_flops(i, self.computations[name]) for i in self.computations.get(name, ()))
        if flops:
            return flops, 0.0
        shapes = {i.name: i for i in around}
        read = sum(shapes[name].num_bytes for name in instruction.operands if name in shapes)
        return 0.0, instruction.num_bytes + read

    def _work_inside(self, name: str) -> tuple[float, float]:
        if name not in self._known:
            around = self.computations.get(name, ())
            each = [self.work(i, around) for i in around]
            self._known[name] = sum(f for f, _ in each), sum(b for _, b in each)
        return self._known[name]


def _split_shape(text: str) -> tuple[str, str]:
    """An instruction's shape, and what follows it. Tuples nest, and tiled layouts hold parentheses."""
    if not text.startswith("("):
        head, _, tail = text.partition(" ")
        return head, tail
    end = _closing(text[1:]) + 2
    return text[:end], text[end:]


def _closing(text: str) -> int:
    """Where the parenthesis that is open at the beginning of a text closes."""
    depth = 1
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return at
    return len(text)


def _arrays(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(
        (match["dtype"], tuple(int(d) for d in match["dims"].split(",") if d)) for match in _ARRAY.finditer(text)
    )


def _array_bytes(dtype: str, dims: tuple[int, ...]) -> float:
    bits = _BITS.get(dtype)
    if bits is None:
        digits = re.search(r"\d+", dtype)
        bits = int(digits[0]) if digits else 8
    return math.prod(dims) * bits / 8


def _group(rest: str) -> tuple[int, int]:
    """Size of a collective's groups, and how far their neighbours are apart; 1 and 1 where it is not said."""
    pair = _PAIRS.search(rest)
    if pair:
        return 2, max(1, abs(int(pair[2]) - int(pair[1])))
    listed = _LISTED.search(rest)
    if listed:
        members = [int(m) for m in listed[1].split(",") if m]
        return max(1, len(members)), members[1] - members[0] if len(members) > 1 else 1
    mesh = _MESH.search(rest)
    if mesh:
        return _mesh_group(_AXIS.findall(mesh["dims"]), _USED.findall(mesh["axes"]))
    iota = _IOTA.search(rest)
    if iota is None:
        return 1, 1
    size = int(iota[2])
    dims = [int(d) for d in iota[3].split(",")]
    order = [int(d) for d in iota[4].split(",")] if iota[4] else list(range(len(dims)))
    if size == 1:
        return 1, 1
    # Neighbours of a group differ in the last dim of the transposed iota that has more than one entry.
    strides = [math.prod(dims[d + 1 :]) for d in range(len(dims))]
    last = next((d for d in reversed(order) if dims[d] > 1), order[-1])
    return size, strides[last]


def _mesh_group(dims: Sequence[tuple[str, str]], used: Sequence[tuple[str, str, str]]) -> tuple[int, int]:
    """Groups along axes of a mesh; ``'a':(2)4`` is the part of 4 of an axis behind one of 2."""
    sizes = {name: int(size) for name, size in dims}
    strides: dict[str, int] = {}
    behind = 1
    for name in reversed(sizes):
        strides[name] = behind
        behind *= sizes[name]
    size, stride = 1, 1
    for name, before, part in used:
        own = int(part) if part else sizes[name]
        after = sizes[name] // (int(before) * own) if part else 1
        if own > 1:
            size, stride = size * own, strides[name] * after
    return size, stride


def _dot_flops(instruction: _Instruction, around: Sequence[_Instruction]) -> float:
    """FLOPs of a product: two for each entry of the result and of the dims that are summed over."""
    if instruction.opcode == "dot":
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
    elif instruction.opcode == "convolution":
        return _convolution_flops(instruction, around)
    elif instruction.opcode == "custom-call" and "gemm" in instruction.rest:
        dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.rest)
    else:
        return 0.0
    lhs = next((i for i in around if instruction.operands and i.name == instruction.operands[0]), None)
    if dims is None or lhs is None or not lhs.arrays or not instruction.arrays:
        return 0.0
    summed = [int(d) for d in re.findall(r"\d+", dims[1])]
    shape = lhs.arrays[0][1]
    return 2.0 * math.prod(instruction.arrays[0][1]) * math.prod(shape[d] for d in summed if d < len(shape))


def _convolution_flops(instruction: _Instruction, around: Sequence[_Instruction]) -> float:
    """FLOPs of a convolution, as which the TPU compiler has products too: two for each entry and kernel element."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)
    kernel = next((i for i in around if len(instruction.operands) > 1 and i.name == instruction.operands[1]), None)
    if labels is None or kernel is None or not kernel.arrays or not instruction.arrays:
        return 0.0
    shape = kernel.arrays[0][1]
    features = labels[1].index("o")
    each = math.prod(size for dim, size in enumerate(shape) if dim != features)
    return 2.0 * math.prod(instruction.arrays[0][1]) * each
