"""Gathers and scatters, as embeddings, routing and their gradients use them."""

from typing import Any

from arena_jax.compiler.rules.rule import Dim, Factors, Rule, factors_of, rule_for, shape_of

# How updates of one place combine; what overwrites does not.
_SCATTERS = {
    "scatter-add": "sum",
    "scatter-sub": "sum",
    "scatter-mul": "prod",
    "scatter_mul": "prod",
    "scatter-min": "min",
    "scatter-max": "max",
    "scatter": "",
}


@rule_for("gather")
def gather(eqn: Any) -> Rule:
    """Index batch dims, whole-slice dims and (as a masked sum) indexed dims of the operand."""
    numbers, slices = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand_shape, index_shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    out_shape = shape_of(eqn.outvars[0])
    factors = Factors()
    index = [*factors.array(index_shape[:-1]), ()]
    operand_batch = tuple(getattr(numbers, "operand_batching_dims", ()))
    index_batch = tuple(getattr(numbers, "start_indices_batching_dims", ()))
    operand: list[Dim] = [()] * len(operand_shape)
    reduced: dict[int, str] = {}
    fixed: set[int] = set()
    window = [i for i in range(len(operand_shape)) if i not in (*numbers.collapsed_slice_dims, *operand_batch)]
    out: list[Dim] = [()] * len(out_shape)
    for i, j in zip(operand_batch, index_batch, strict=True):
        operand[i] = index[j]
    for i, j in zip(window, numbers.offset_dims, strict=True):
        operand[i] = factors.new(operand_shape[i])
        if slices[i] == operand_shape[i]:
            out[j] = operand[i]
        elif slices[i] == 1 and i in numbers.start_index_map:
            reduced |= dict.fromkeys(operand[i], "sum")
        else:
            out[j] = factors.new(out_shape[j])
            fixed |= {*operand[i], *out[j]}
    for i in numbers.collapsed_slice_dims:
        operand[i] = factors.new(operand_shape[i])
        if i in numbers.start_index_map:
            reduced |= dict.fromkeys(operand[i], "sum")
        else:  # always the first element
            fixed |= set(operand[i])
    batch_dims = iter(index[:-1])
    for j in range(len(out_shape)):
        if j not in numbers.offset_dims:
            out[j] = next(batch_dims)
    return Rule([tuple(operand), tuple(index)], [tuple(out)], factors.sizes, reduced=reduced, fixed=fixed)


@rule_for(*_SCATTERS)
def scatter(eqn: Any) -> Rule:
    """Transpose of a gather: rows of the updates leave partial results where updates of one place combine.

    Partial results each start from the operand, so all but one part begin with the neutral element. An
    indexed dim may be sharded: a device drops the updates that fall elsewhere.
    """
    numbers, kind = eqn.params["dimension_numbers"], _SCATTERS[eqn.primitive.name]
    operand_shape, index_shape, update_shape = (shape_of(a) for a in eqn.invars)
    factors = Factors()
    operand = factors.array(operand_shape)
    index = [*factors.array(index_shape[:-1]), ()]
    operand_batch = tuple(getattr(numbers, "operand_batching_dims", ()))
    index_batch = tuple(getattr(numbers, "scatter_indices_batching_dims", ()))
    update: list[Dim] = [()] * len(update_shape)
    fixed: set[int] = set()
    window = [i for i in range(len(operand_shape)) if i not in (*numbers.inserted_window_dims, *operand_batch)]
    for i, j in zip(operand_batch, index_batch, strict=True):
        index[j] = operand[i]
    for i, j in zip(window, numbers.update_window_dims, strict=True):
        if update_shape[j] == operand_shape[i]:
            update[j] = operand[i]
        else:
            update[j] = factors.new(update_shape[j])
            fixed |= {*operand[i], *update[j]}
    for i in numbers.inserted_window_dims:
        if i not in numbers.scatter_dims_to_operand_dims:
            fixed |= set(operand[i])
    rows = iter(index[:-1])
    for j in range(len(update_shape)):
        if j not in numbers.update_window_dims:
            update[j] = next(rows)
    free_rows = factors_of(index) - factors_of(operand)
    reduced = dict.fromkeys(free_rows, kind) if kind else {}
    if not kind:
        fixed |= free_rows
    dims = tuple(operand)
    sizes = {f: n for f, n in factors.sizes.items() if f in factors_of([*operand, *index, *update])}
    return Rule([dims, tuple(index), tuple(update)], [dims], sizes, reduced=reduced, fixed=fixed)
