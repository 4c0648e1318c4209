"""Train every stranger that is installed under every layout, and write the table.

    python -m tests.strangers [--only NAME] [--layout LAYOUT]

Packages are found as always; those in a folder of their own, through PYTHONPATH. Results are kept in
``benchmarks/results/strangers.json`` from run to run, one row per model.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cheap_xla import XLA_FLAGS

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks" / "results" / "strangers"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "2",
    "JAX_ENABLE_X64": "1",
    "XLA_FLAGS": XLA_FLAGS,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.strangers", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="models whose short name contains this")
    parser.add_argument("--layout", default="", help="layouts whose name contains this")
    options = parser.parse_args(argv)
    os.environ.update({k: os.environ.get(k, v) for k, v in ENVIRONMENT.items()})

    from tests.strangers import compare
    from tests.strangers.models import STRANGERS

    rows: dict[str, Any] = {}
    if TABLE.with_suffix(".json").is_file():
        rows = json.loads(TABLE.with_suffix(".json").read_text(encoding="utf-8"))
    failed = 0
    for name, make in STRANGERS.items():
        if options.only not in name:
            continue
        missing = make.missing()
        if missing:
            print(f"{name}: skipped, {', '.join(missing)} is not installed", file=sys.stderr)
            continue
        stranger = make()
        row = {**rows.get(name, {"layouts": {}}), **compare.describe(stranger)}
        for layout in compare.LAYOUTS:
            if options.layout in layout:
                row["layouts"][layout] = _one(stranger, layout)
                failed += "error" in row["layouts"][layout]
        rows[name] = row
        _write(rows)
    print(TABLE.with_suffix(".md").read_text(encoding="utf-8"))
    return 1 if failed else 0


def _one(stranger: Any, layout: str) -> dict[str, Any]:
    from arena_jax.errors import ArenaError
    from tests.strangers import compare

    try:
        found = compare.compare(stranger, layout)
    except ArenaError as error:
        print(f"{stranger.name} {layout}: {error}", file=sys.stderr)
        return {"error": f"{type(error).__name__}: {error}"}
    print(f"{stranger.name} {layout}: loss {found.difference:.1e}, parameters {found.parameters:.1e}", file=sys.stderr)
    return {
        "loss": found.difference,
        "parameters": found.parameters,
        "moved": found.moved,
        "sharded": found.sharded,
        "whole": list(found.whole),
    }


def _write(rows: dict[str, Any]) -> None:
    from benchmarks._machine import describe

    lines = [
        "# Models from elsewhere",
        "",
        "Built with random weights from their own packages, unmodified; every parameter perturbed; three steps of",
        "AdamW in float64. The largest relative difference of a loss from one device (the loop of",
        "`tests/same_numbers/oracle.py`, which shares nothing with the compiler or the runtime). Models that compute",
        f"in float32 inside differ by its rounding. {describe()}. `python -m tests.strangers` runs them.",
        "",
        "| model | kind | equations | replicated by name | tp=2 | dp=2 | 2 stages | sharded under tp=2 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows.values():
        cells = [_cell(row["layouts"].get(layout)) for layout in ("tp=2", "dp=2", "2 stages")]
        tensor = row["layouts"].get("tp=2", {})
        share = f"{tensor['sharded']:.0%} of parameters" if "sharded" in tensor else ""
        unknown = ", ".join(row["unknown"]) or "none"
        version = f"{row['name']} ({row['version']})"
        lines.append(f"| {version} | {row['kind']} | {row['equations']} | {unknown} | {' | '.join(cells)} | {share} |")
    lines += ["", "## Kept whole under tp=2", "", "Parameters of two dims or more, largest first.", ""]
    for row in rows.values():
        whole = row["layouts"].get("tp=2", {}).get("whole", [])
        lines.append(f"- {row['name']}: {', '.join(f'`{w}`' for w in whole) or 'nothing'}")
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".md", "\n".join(lines) + "\n"), (".json", json.dumps(rows, indent=1) + "\n")):
        part = TABLE.with_suffix(suffix + ".part")
        part.write_text(text, encoding="utf-8")
        part.replace(TABLE.with_suffix(suffix))


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    return result["error"].partition(":")[0] if "error" in result else f"{result['loss']:.1e}"


if __name__ == "__main__":
    raise SystemExit(main())
