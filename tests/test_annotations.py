"""What users say of how values lie is kept: by plans, by programs, by the losses of one device."""

import warnings
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import arena_jax
from arena_jax.compiler import Constraints, analyse, make_problem, plan_problem
from arena_jax.compiler.annotations import AxisRules
from arena_jax.compiler.emit import Emitter
from arena_jax.compiler.intra_op.layout import DP, TP, MeshShape
from arena_jax.compiler.job_key import job_key
from arena_jax.errors import InfeasibleError, PlanError, RecipeError, UsageError
from arena_jax.grid import GridShape, Plan
from arena_jax.recipe import load_recipe

INIT = nnx.initializers.lecun_normal()
OPTIMIZER = optax.adam(1e-2)


class Annotated(nnx.Module):
    """An MLP whose kernels and hidden layer are annotated."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        up: Any = ("fsdp", "model"),
        down: Any = ("model", "fsdp"),
        hidden: Any = None,
        **meta: Any,
    ) -> None:
        self.up = nnx.Linear(8, 32, rngs=rngs, kernel_init=nnx.with_partitioning(INIT, up, **meta))
        self.down = nnx.Linear(32, 8, rngs=rngs, kernel_init=nnx.with_partitioning(INIT, down, **meta))
        self.out = nnx.Linear(8, 3, rngs=rngs)
        self.hidden = hidden

    def __call__(self, x: Any) -> Any:
        y = jax.nn.gelu(self.up(x))
        if self.hidden is not None:
            explicit = jax.sharding.get_abstract_mesh().axis_types[:1] == (AxisType.Explicit,)
            y = (jax.sharding.reshard if explicit else lax.with_sharding_constraint)(y, P(*self.hidden))
        return self.out(x + self.down(y))


def score(model: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


RNG = np.random.default_rng(0)
BATCH = {"x": RNG.standard_normal((8, 8)).astype("float32"), "y": np.arange(8, dtype="int32") % 3}


def factory(**options: Any) -> Any:
    return lambda rngs: Annotated(rngs, **options)


def fitted(model: Any, grid: str, **options: Any) -> tuple[list[float], Plan]:
    result = arena_jax.fit(model, OPTIMIZER, score, [BATCH] * 3, steps=3, grid=grid, num_microbatches=2, **options)
    return [record.loss for record in result.history], result.plan


def planned(model: Any, grid: str, axis_rules: Any = None, specs: Any = None, **pins: Any) -> Any:
    problem = make_problem(model, OPTIMIZER, score, BATCH, axis_rules=axis_rules, specs=specs)
    (row,) = plan_problem(problem, [GridShape.parse(grid)], constraints=Constraints(**pins), num_microbatches=1)
    return row


def mesh(*names: str, kind: AxisType = AxisType.Auto) -> Any:
    return jax.set_mesh(jax.make_mesh((2, 2), names, axis_types=(kind,) * 2))


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    losses, _ = fitted(factory(), "cpu:1")
    assert len(set(losses)) == 3
    return losses


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 1), (1, 4)])
def test_parameters_lie_as_annotated(dp: int, tp: int) -> None:
    row = planned(factory(), "cpu:4/s1", dp=dp, tp=tp)
    (stage,) = row.plan.stages
    names = {"fsdp": "dp" if dp > 1 else None, "model": "tp" if tp > 1 else None}
    for leaf, spec in (("up/kernel", ("fsdp", "model")), ("down/kernel", ("model", "fsdp"))):
        wanted = [names[axis] for axis in spec]
        assert [*stage.parameters[leaf], None][:2] == wanted


def test_an_annotated_model_trains_as_on_one_device(one_device: list[float]) -> None:
    """Parameters over dp and tp, a hidden layer that the search alone would have split, and what the program does."""
    with mesh("data", "model"):
        model = factory(hidden=("data", None))
        plan = planned(model, "cpu:4/s1", dp=2, tp=2).plan
        (stage,) = plan.stages
        assert stage.parameters["up/kernel"] == ("dp", "tp")
        losses, ran = fitted(model, "cpu:4", plan=plan)
        assert losses == pytest.approx(one_device, rel=1e-5)
        assert ran == plan


def test_parameters_over_dp_train_in_two_stages(one_device: list[float]) -> None:
    plan = planned(factory(), "cpu:4/s2", dp=2, tp=1).plan
    assert {name: spec for stage in plan.stages for name, spec in stage.parameters.items() if "up" in name} == {
        "up/kernel": ("dp",)
    }
    losses, _ = fitted(factory(), "cpu:4/s2", plan=plan)
    assert losses == pytest.approx(one_device, rel=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("hidden", "spec"),
    [((None, None), ()), ((None, "model"), (None, "tp")), (("data", None), ("dp",)), ((None, "data"), (None, "dp"))],
)
def test_constraints_in_the_loss_are_kept(hidden: Any, spec: Any, kind: AxisType) -> None:
    """On the plan's mesh: the author's has other names, and another number of devices."""
    with mesh("data", "model", kind=kind):
        row = planned(factory(up=(None, None), down=(None, None), hidden=hidden), "cpu:8/s1", dp=2, tp=4)
    (stage,) = row.plan.stages
    problem_key = [key for key, axes in stage.activations.items() if key.endswith(":0") and axes == spec]
    assert problem_key
    assert set(stage.parameters) <= {"out/kernel", "up/bias", "down/bias", "out/bias"}


class Swapped(nnx.Module):
    """Constrains what no search would: the features of a small value over data."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        def block(x: Any, _: Any) -> tuple[Any, None]:
            return lax.with_sharding_constraint(jnp.sin(x), P("model", "data")), None

        x, _ = lax.scan(jax.checkpoint(block), x, length=2)
        return self.out(x)


def test_programs_hold_the_constraint_on_their_own_mesh() -> None:
    """Inside a scan of rematerialised blocks, too."""
    with mesh("data", "model"):
        analysis = analyse(make_problem(lambda rngs: Swapped(rngs), OPTIMIZER, score, BATCH))
    specs = {key: tuple(axes) for key, axes in analysis.shardings.find(2, 2).specs.items()}
    grid = np.array(jax.devices()[:4]).reshape(2, 2)
    emitter = Emitter(jax.sharding.Mesh(grid, ("dp", "tp"), axis_types=(AxisType.Auto,) * 2), specs)
    jaxpr = analysis.trace.jaxpr

    def run(*args: Any) -> Any:
        env = dict(zip(jaxpr.invars, args, strict=True))
        emitter.run([(node.key, node.eqn) for node in analysis.graph.nodes], env)
        return env[jaxpr.outvars[0]]

    traced = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars))
    (scan,) = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan"]
    (block,) = [eqn for eqn in scan.params["jaxpr"].jaxpr.eqns if eqn.primitive.name.startswith(("remat", "check"))]
    kept = [eqn.params["sharding"] for eqn in block.params["jaxpr"].eqns if eqn.primitive.name == "sharding_constraint"]
    assert P("tp", "dp") in [sharding.spec for sharding in kept]
    assert {sharding.mesh.axis_names for sharding in kept} == {("dp", "tp")}


class Dense(nn.Module):
    names: Any = ("data", "model")
    logical: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        annotate: Any = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        y = nn.gelu(nn.Dense(32, kernel_init=annotate(INIT, self.names))(x))
        if self.logical:
            y = nn.with_logical_constraint(y, ("batch", "mlp"))
        return nn.Dense(3)(y)


def linen(**options: Any) -> Any:
    return lambda rngs: nnx.bridge.ToNNX(Dense(**options), rngs=rngs).lazy_init(jnp.ones((4, 8)))


def test_a_linen_model_trains_as_on_one_device() -> None:
    one, _ = fitted(linen(), "cpu:1")
    rules = (("embed", "data"), ("mlp", "model"), ("batch", "data"))
    with mesh("data", "model"), nn.logical_axis_rules(rules):
        for model in (linen(), linen(names=("embed", "mlp"), logical=True)):
            plan = planned(model, "cpu:4/s1", dp=2, tp=2).plan
            (stage,) = plan.stages
            assert stage.parameters["Dense_0/kernel"] == ("dp", "tp")
        assert ("dp", "tp") in [spec for key, spec in stage.activations.items() if key.endswith(":0")]
        losses, _ = fitted(model, "cpu:4", plan=plan)
    assert losses == pytest.approx(one, rel=1e-5)


def test_axes_map_by_rules() -> None:
    model = factory(up=("rows", "columns"), down=("columns", P.UNCONSTRAINED))
    row = planned(model, "cpu:4/s1", axis_rules={"rows": None, "columns": "tp"}, dp=2, tp=2)
    (stage,) = row.plan.stages
    assert stage.parameters["up/kernel"] == (None, "tp")
    assert stage.parameters["down/kernel"][0] == "tp"
    with nn.logical_axis_rules((("rows", "model"), ("columns", ("fsdp",)))):
        row = planned(factory(up=("rows", "columns"), down=("columns", "rows")), "cpu:4/s1", dp=2, tp=2)
    (stage,) = row.plan.stages
    assert stage.parameters["up/kernel"] == ("tp", "dp")
    assert stage.parameters["down/kernel"] == ("dp", "tp")


def test_layouts_of_a_dim_that_is_left_open() -> None:
    required = AxisRules().require(("model", P.UNCONSTRAINED, P.UNCONSTRAINED), (4, 6, 3), "x")
    assert set(required.layouts(MeshShape(2, 2))) == {(TP, 0, 0), (TP, DP, 0)}
    assert set(required.layouts(MeshShape(3, 1))) == {(0, 0, 0), (0, DP, 0), (0, 0, DP)}
    assert AxisRules().require((("data", "model"),), (4, 6), "x").layouts(MeshShape(2, 2)) == ((DP | TP, 0),)


def test_zero_3_leaves_what_an_annotation_says() -> None:
    kept = planned(factory(up=(None, "model"), down=("fsdp", None)), "h100:4/s1", dp=4, tp=1, zero="search")
    assert "up/kernel" not in kept.plan.stages[0].parameters
    row = planned(factory(up=(None, "model"), down=("fsdp", None)), "cpu:4/s1", dp=4, tp=1, zero=3)
    assert not row.feasible
    assert "pinned zero 3" in row.reason
    assert "(None, 'model') of up/kernel keeps it whole" in row.reason
    everywhere = planned(factory(up=("fsdp", None), down=("fsdp", None)), "cpu:4/s1", dp=4, tp=1, zero=3)
    assert everywhere.plan.stages[0].parameters["out/kernel"] == ("dp",)
    row = planned(factory(up=(P.UNCONSTRAINED, None), down=("fsdp", None)), "cpu:4/s1", dp=4, tp=1, zero=3)
    assert row.plan.stages[0].parameters["up/kernel"] == ("dp",)


def test_a_changed_annotation_or_rule_has_another_key() -> None:
    def key(model: Any, axis_rules: Mapping[str, str | None] | None = None) -> str:
        problem = make_problem(model, OPTIMIZER, score, BATCH, axis_rules=axis_rules)
        trace = analyse(problem).trace
        grids = [GridShape.parse("cpu:2/s1")]
        made = job_key(problem, trace, grids, constraints=Constraints(), num_microbatches=1, coupled=False)
        return made.digest

    keys = [key(factory()), key(factory(up=("fsdp", None))), key(factory(), {"fsdp": "tp", "model": "dp"})]
    with mesh("data", "model"):
        keys += [key(factory(hidden=("data", None))), key(factory(hidden=("data", None)), {"data": "tp"})]
    assert len(set(keys)) == 5
    assert key(factory()) == keys[0]


@pytest.mark.parametrize(
    ("options", "rules", "message", "hint"),
    [
        ({"up": ("fsdp", "modle")}, None, "of up/kernel names an unknown axis 'modle' (did you mean 'model'?)", "None"),
        ({"up": ("fsdp", "data")}, None, "shards dim 0 by 'fsdp' and dim 1 by 'data', and both are dp", "'tp'"),
        ({"up": ("fsdp", None, "model")}, None, "has 3 dims, the value has 2: (8, 32)", "an entry a dim"),
        ({}, {"model": "tpp"}, "maps 'model' to 'tpp', which is no axis of a plan (did you mean 'tp'?)", "'dp' or"),
        ({}, {"model": "dp"}, "shards dim 0 by 'model' and dim 1 by 'fsdp', and both are dp", "to 'tp' or to None"),
        (
            {"up": ("embed", None), "sharding_rules": (("embed", "model"),)},
            {"embed": "dp"},
            "axis_rules says that 'embed' is dp, and flax's rules that it is 'model', which is tp",
            "leave 'embed' out",
        ),
        (
            {"up": ("mlp", None), "sharding_rules": (("mlp", "mesh_y"),)},
            None,
            "whose 'mlp' is 'mesh_y' by flax's rules, names an unknown axis 'mesh_y'",
            "axis_rules={'mesh_y'",
        ),
    ],
)
def test_annotations_that_cannot_hold(options: Any, rules: Any, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        make_problem(factory(**options), OPTIMIZER, score, BATCH, axis_rules=rules)
    assert message in error.value.message
    assert hint in error.value.hint


def test_rules_that_contradict_each_other() -> None:
    model = factory(up=("embed", None), sharding_rules=(("embed", "model"),))
    with nn.logical_axis_rules((("embed", "data"),)), pytest.raises(UsageError) as error:
        make_problem(model, OPTIMIZER, score, BATCH)
    assert "its own rules say that 'embed' is 'model', the rules in force that it is 'data'" in error.value.message


def test_constraints_that_cannot_hold() -> None:
    with mesh("data", "mdoel"), pytest.raises(UsageError, match="names an unknown axis 'mdoel'") as error:
        planned(factory(hidden=("data", "mdoel")), "cpu:2/s1")
    assert "the constraint ('data', 'mdoel') on a value of shape (8, 32)" in error.value.message
    assert "(did you mean 'model'?)" in error.value.message


def test_dims_that_a_mesh_does_not_divide() -> None:
    model = factory(up=(None, "model"), down=(None, "model"))  # (32, 8) over 8 and more
    row = planned(model, "h100:2x8/s1", dp=1, tp=16)
    assert not row.feasible
    assert row.reason == (
        "pinned dp 1 and tp 16: the annotation (None, 'model') of down/kernel shards dim 1 of 8, "
        "which tp 16 does not divide"
    )
    free = planned(model, "h100:2x8/s1")
    assert free.plan.stages[0].tp <= 8
    with pytest.raises(InfeasibleError, match="which tp 3 does not divide"):
        arena_jax.compile(
            factory(up=(None, "fsdp"), down=(None, "model")),
            OPTIMIZER,
            score,
            BATCH,
            grid="cpu:3/s1",
            axis_rules={"fsdp": "tp", "model": "tp", "data": "tp"},
            num_microbatches=1,
        )


def test_a_constraint_out_of_reach_is_named() -> None:
    class Branches(Annotated):
        def __call__(self, x: Any) -> Any:
            y = lax.cond(x.sum() > 0, lambda x: lax.with_sharding_constraint(x, P("data", None)), jnp.sin, x)
            return super().__call__(y)

    with mesh("data", "model"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned(lambda rngs: Branches(rngs), "cpu:2/s1")
    assert any("the constraint ('data', None) on a value of shape (8, 8) is not kept" in str(w.message) for w in caught)


def test_a_plan_that_stores_parameters_otherwise_is_refused() -> None:
    plan = planned(factory(up=(None, "model"), down=("model", None)), "cpu:2/s1", dp=1, tp=2).plan
    with pytest.raises(PlanError) as error:
        arena_jax.compile(factory(), OPTIMIZER, score, BATCH, plan=plan, axis_rules={"fsdp": "tp", "model": "dp"})
    assert error.value.message == (
        "the plan stores down/kernel as ('tp',) in stage 0, against the annotation ('model', 'fsdp') of down/kernel"
    )


def test_a_recipe_maps_axes() -> None:
    recipe = load_recipe("gpt_tiny", ["plan.axis_rules.embed=tp", "plan.axis_rules.layers=null"])
    assert recipe.plan.axis_rules == {"embed": "tp", "layers": None}
    with pytest.raises(RecipeError, match=r"plan\.axis_rules"):
        load_recipe("gpt_tiny", ["plan.axis_rules.embed=tensor"])


OPEN = {"up": None, "down": None}


def test_pinned_parameters_lie_as_pinned(one_device: list[float]) -> None:
    """Both products split by rows, which the search alone would not choose, in a model that says nothing itself."""
    model = factory(**OPEN)
    specs = {"*/kernel": ["tp", None]}
    free, pinned = (planned(model, "cpu:2/s1", specs=s, dp=1, tp=2) for s in ({}, specs))
    (stage,) = pinned.plan.stages
    kernels = ["up/kernel", "down/kernel"]
    assert [stage.parameters[name] for name in kernels] == [("tp",), ("tp",)]
    assert [free.plan.stages[0].parameters.get(name) for name in kernels] != [("tp",), ("tp",)]
    losses, _ = fitted(model, "cpu:2", plan=pinned.plan, specs=specs)
    assert losses == pytest.approx(one_device, rel=1e-5)


@pytest.mark.parametrize(
    ("model", "specs", "message"),
    [
        ({}, {"up/kernle": [None]}, "no parameter is called 'up/kernle' (did you mean 'up/kernel'?)"),
        (
            {},
            {"up/kernel": [None, "tp"]},
            "the pin [None, 'tp'] of up/kernel ('up/kernel') contradicts the annotation ('fsdp', 'model') of up/kernel",
        ),
        (
            OPEN,
            {"up/k*": ["tp", None], "*/kernel": [None, "tp"]},
            "the pin [None, 'tp'] of up/kernel ('*/kernel') contradicts the pin ['tp', None] of up/kernel ('up/k*')",
        ),
        (OPEN, {"up/kernel": ["tp", "tp"]}, "shards dim 0 by 'tp' and dim 1 by 'tp', and both are tp"),
        (OPEN, {"up/kernel": ["ttp"]}, "names an unknown axis 'ttp' (did you mean 'tp'?)"),
        (OPEN, {"up/kernel": [None, None, "tp"]}, "has 3 dims, the value has 2"),
    ],
)
def test_pins_that_cannot_hold(model: Any, specs: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        planned(factory(**model), "cpu:2/s1", specs=specs)
    assert message in error.value.message


def test_a_recipe_pins_parameters() -> None:
    recipe = load_recipe("gpt_tiny", ['plan.specs={"blocks/*/up/kernel": [null, tp]}'])
    assert recipe.plan.specs == {"blocks/*/up/kernel": [None, "tp"]}


def test_where_a_product_is_asked_to_lie_counts_but_not_parts_of_a_shard_map() -> None:
    class Asks(Annotated):
        def __call__(self, x: Any) -> Any:
            y = jnp.einsum("bi,io->bo", x, self.up.kernel[...], out_sharding=P(None, "model"))
            inside = jax.shard_map(
                lambda y: jax.sharding.reshard(y, P(None, "model")),
                in_specs=P("data"),
                out_specs=P("data"),
                axis_names={"data"},
            )
            return self.out(jnp.tanh(inside(y)) @ self.down.kernel[...])

    with mesh("data", "model", kind=AxisType.Explicit):
        text = [
            eqn.params["name"]
            for eqn in analyse(
                make_problem(lambda rngs: Asks(rngs, up=(None, None), down=(None, None)), OPTIMIZER, score, BATCH)
            ).trace.jaxpr.eqns
            if eqn.primitive.name == "name"
        ]
    assert text == ["sharding constraint (None, 'model')"]
