"""Products: ``dot_general``, convolutions, and products with ragged groups of rows."""

from typing import Any

from arena_jax.compiler.rules.rule import Dim, Factors, Rule, factors_of, rule_for, shape_of, whole

_NONE: tuple[int, ...] = ()


@rule_for("dot_general")
def dot_general(eqn: Any) -> Rule:
    """Every batch, contracted and free dim; contracted ones leave partial sums."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    factors = Factors()
    lhs, rhs = factors.array(shape_of(eqn.invars[0])), factors.array(shape_of(eqn.invars[1]))
    for i, j in (*zip(lhs_batch, rhs_batch, strict=True), *zip(lhs_contract, rhs_contract, strict=True)):
        rhs[j] = lhs[i]
    free_lhs = [d for i, d in enumerate(lhs) if i not in (*lhs_contract, *lhs_batch)]
    free_rhs = [d for j, d in enumerate(rhs) if j not in (*rhs_contract, *rhs_batch)]
    out = tuple([lhs[i] for i in lhs_batch] + free_lhs + free_rhs)
    reduced = {f: "sum" for i in lhs_contract for f in lhs[i]}
    return Rule([tuple(lhs), tuple(rhs)], [out], factors.sizes, reduced=reduced)


@rule_for("conv_general_dilated")
def conv_general_dilated(eqn: Any) -> Rule:
    """Batch, input channels (partial sums), output channels and groups of either; not what a window spans.

    A grouped channel dim is (group, channel of the group), group first, on both sides.
    """
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    lhs_shape, rhs_shape, out_shape = (shape_of(a) for a in (*eqn.invars[:2], eqn.outvars[0]))
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    factors = Factors()
    lhs: list[Dim] = [()] * len(lhs_shape)
    rhs: list[Dim] = [()] * len(rhs_shape)
    out: list[Dim] = [()] * len(out_shape)
    fixed: set[int] = set()

    group, batch_group = factors.new(feature_groups), factors.new(batch_groups)
    rows = factors.new(lhs_shape[numbers.lhs_spec[0]] // batch_groups)
    contracted = factors.new(rhs_shape[numbers.rhs_spec[1]])
    features = factors.new(rhs_shape[numbers.rhs_spec[0]] // (feature_groups * batch_groups))
    lhs[numbers.lhs_spec[0]] = (*batch_group, *rows)
    lhs[numbers.lhs_spec[1]] = (*group, *contracted)
    rhs[numbers.rhs_spec[1]] = contracted
    rhs[numbers.rhs_spec[0]] = (*group, *batch_group, *features)
    out[numbers.out_spec[0]] = rows
    out[numbers.out_spec[1]] = (*group, *batch_group, *features)
    windows = zip(
        numbers.lhs_spec[2:],
        numbers.rhs_spec[2:],
        numbers.out_spec[2:],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        strict=True,
    )
    for i, k, j, stride, padding, dilation in windows:
        lhs[i], rhs[k] = factors.new(lhs_shape[i]), factors.new(rhs_shape[k])
        if (rhs_shape[k], stride, tuple(padding), dilation) == (1, 1, (0, 0), 1):
            out[j] = lhs[i]  # a window of one element moves nothing
            continue
        out[j] = factors.new(out_shape[j])
        fixed |= {*lhs[i], *rhs[k], *out[j]}
    reduced = dict.fromkeys(contracted, "sum")
    return Rule([tuple(lhs), tuple(rhs)], [tuple(out)], factors.sizes, reduced=reduced, fixed=fixed)


@rule_for("ragged_dot", "ragged_dot_general")
def ragged_dot(eqn: Any) -> Rule:
    """A product whose rows, contracted dim or batch come in groups of given sizes.

    What is grouped stays whole, for a device cannot tell from its part where a group begins; so do the
    groups. All other dims are as in ``dot_general``.
    """
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    lhs_shape, rhs_shape = (shape_of(a) for a in eqn.invars[:2])
    if numbers is None:  # an older form: (m, k), (g, k, n), (g) -> (m, n)
        contract, batch, ragged, groups = ((1,), (1,)), (_NONE, _NONE), (0,), (0,)
    else:
        contract, batch = numbers.dot_dimension_numbers
        ragged, groups = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    factors = Factors()
    lhs, rhs = factors.array(lhs_shape), factors.array(rhs_shape)
    for i, j in (*zip(*batch, strict=True), *zip(*contract, strict=True)):
        rhs[j] = lhs[i]
    fixed = factors_of([lhs[i] for i in ragged]) | factors_of([rhs[j] for j in groups])
    out = [lhs[i] for i in batch[0]]
    out += [d for i, d in enumerate(lhs) if i not in (*contract[0], *batch[0])]
    out += [d for j, d in enumerate(rhs) if j not in (*contract[1], *batch[1], *groups)]
    if set(ragged) & {*contract[0]}:  # one product per group
        group = factors.new(shape_of(eqn.outvars[0])[0])
        fixed |= set(group)
        out = [group, *out]
    counts = list(whole(shape_of(eqn.invars[2])))
    if len(counts) > 1:  # sizes of their own for every sample
        for k, i in enumerate(batch[0][: len(counts) - 1]):
            counts[k] = lhs[i]
        if len(counts) - 1 > len(batch[0]):
            fixed |= factors_of([d for i, d in enumerate(lhs) if i not in (*contract[0], *batch[0])])
    rest = [whole(shape_of(a)) for a in eqn.invars[3:]]
    reduced = {f: "sum" for i in contract[0] for f in lhs[i] if f not in fixed}
    return Rule(
        [tuple(lhs), tuple(rhs), tuple(counts), *rest], [tuple(out)], factors.sizes, reduced=reduced, fixed=fixed
    )
