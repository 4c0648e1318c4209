"""The shipped constants against measurements by others: they may not drift away unseen."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from arena_jax.compiler.cost import FITTED
from benchmarks import _operators as ops
from benchmarks.operator_accuracy import blocks, errors_of


@pytest.fixture(autouse=True)
def data(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "DATA", shared_data)


def test_whole_layers_are_within_the_limit_of_types_never_seen() -> None:
    found = errors_of(FITTED, blocks([*ops.megatron_layers(), *ops.sailor_layers()]))
    assert {key[0] for key in found} == {"A100", "V100"}
    for key, (_, mean, _, _) in found.items():
        assert mean < 0.15, (key, mean)


def test_products_and_kernels_are_within_the_limit() -> None:
    vectors = [row for i, row in enumerate(ops.vectors()) if i % 5 == 0]
    for key, (_, mean, _, _) in errors_of(FITTED, blocks(vectors)).items():
        assert mean < 0.30, (key, mean)
    products = [row for i, row in enumerate(ops.gemms()) if i % 9 == 0]
    for key, (_, mean, _, _) in errors_of(FITTED, blocks(products)).items():
        assert mean < (0.35 if key[0] == "P4" else 0.25), (key, mean)  # a P4's rows scatter twofold


def test_weights_and_activations_of_layers_are_what_shapes_say() -> None:
    sizes: dict[tuple[str, str, int, int], np.ndarray] = defaultdict(lambda: np.zeros(4))
    for op in ops.megatron_ops():
        if op.op.startswith("enc-") and op.op != "enc-attention-softmax":  # its unfused form keeps more
            sizes[op.key] += [op.weight_bytes, op.measured_weight_bytes, op.output_bytes, op.measured_output_bytes]
    for key, (weights, measured_weights, outputs, measured_outputs) in sizes.items():
        assert weights == pytest.approx(measured_weights, rel=0.1), key
        assert outputs == pytest.approx(measured_outputs, rel=0.1), key
