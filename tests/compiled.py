"""What XLA built: the collectives in the text of a compiled program."""

import math
import re
from collections import Counter

_BYTES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1, "s64": 8, "u64": 8}
_COLLECTIVE = re.compile(
    r"= (?P<shapes>\(.*?\)|\S+) (?P<kind>all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def collective_bytes(text: str) -> Counter[str]:
    """Kind -> bytes of results on one device, over all collectives of a compiled module's text."""
    found: Counter[str] = Counter()
    for match in _COLLECTIVE.finditer(text):
        found[match["kind"].replace("-", "_")] += sum(_array_bytes(*a) for a in _ARRAY.findall(match["shapes"]))
    return found


def _array_bytes(dtype: str, dims: str) -> int:
    return _BYTES.get(dtype, 0) * math.prod(int(d) for d in dims.split(",") if d)
