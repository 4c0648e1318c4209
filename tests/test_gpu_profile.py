"""The benchmark that is prepared for a GPU, on the CPU: the same verbs, and a table that names the card."""

import json
import os
from pathlib import Path

import pytest

from benchmarks import _report, gpu_profile


@pytest.mark.skipif("ARENA_JAX_LONG" not in os.environ, reason="takes a minute; `make verify` runs it")
def test_estimates_profiles_and_measures_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("model.hidden=32", "model.num_layers=2", "model.num_heads=2", "model.sequence_length=16", "global_batch=4")
    monkeypatch.setattr(gpu_profile, "CASES", {"tiny": ("gpt_tiny", *small), "absent": ("no_such_recipe",)})
    monkeypatch.setattr(gpu_profile, "STEPS", 3)
    monkeypatch.setattr(gpu_profile, "write", lambda *a, **k: _report.write(*a, folder=tmp_path, **k))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("ARENA_JAX_HOME", str(tmp_path / "home"))
    tiny, absent = gpu_profile.main(["--budget", "2", "--name", "gpu_profile"])
    assert tiny["measured_s"] > 0
    assert tiny["estimated_s"] > 0
    assert tiny["from_profiles_s"] > 0
    assert "no_such_recipe" in absent["failed"]
    kept = json.loads((tmp_path / "gpu_profile.json").read_text())
    assert kept["type"] == "cpu"
    assert "jaxlib" in kept["versions"]
    text = (tmp_path / "gpu_profile.md").read_text()
    assert "| tiny " in text
    assert kept["card"] in text
