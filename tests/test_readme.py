"""The Python of the README and of docs/swap.md runs as it stands, and links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SWAP = (ROOT / "docs" / "swap.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = [*FENCED.findall(README), *FENCED.findall(SWAP)]


def test_there_are_examples_of_fit_and_of_an_own_loop():
    assert any("arena_jax.fit(" in example for example in EXAMPLES)
    assert any("arena_jax.compile(" in example for example in EXAMPLES)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run_from_the_readme_alone(number: int, tmp_path: Path):
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number], encoding="utf-8")
    # The examples ask for their devices themselves; the test run must not do it for them.
    environment = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "cpu:8/s" in done.stdout
    losses = [float(word) for word in re.findall(r"\d+\.\d+(?:e-?\d+)?", done.stdout)]
    assert losses[-1] < losses[0], done.stdout
    if "hook=" in EXAMPLES[number]:
        assert re.findall(r"^step (\d+): cpu:(\d)", done.stdout, re.MULTILINE) == [("40", "8"), ("80", "4")]


def test_links_to_files_lead_somewhere():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    missing = []
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                missing.append(f"{page.name}: {target}")
    assert not missing
