"""The optax transformation that a recipe's ``optimizer`` section describes."""

import re
from typing import Any

import jax
import optax

from arena_jax.recipe.schema import DECAYING, OptimizerSection

# Parameters that weight decay leaves alone, by the last part of their path.
_UNDECAYED = re.compile(r"(bias|scale)$")


def build_optimizer(section: OptimizerSection, *, steps: int) -> optax.GradientTransformation:
    """Return the transformation; ``steps`` is the length of the run, where the schedule ends by default."""
    updates = -(-steps // section.accumulate_steps)
    rate = learning_rate(section, num_updates=updates)
    options: dict[str, Any] = dict(section.options)
    parts: list[optax.GradientTransformation] = []
    if section.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(section.clip_norm))
    if section.weight_decay and section.name in DECAYING:
        options |= {"weight_decay": section.weight_decay, "mask": decayed}
    elif section.name in DECAYING:
        options |= {"weight_decay": 0.0}
    elif section.weight_decay and section.name == "adafactor":
        options |= {"weight_decay_rate": section.weight_decay, "weight_decay_mask": decayed}
    elif section.weight_decay:
        parts.append(optax.add_decayed_weights(section.weight_decay, mask=decayed))
    parts.append(getattr(optax, section.name)(learning_rate=rate, **options))
    transformation = optax.chain(*parts)
    if section.accumulate_steps > 1:
        multi = optax.MultiSteps(transformation, every_k_schedule=section.accumulate_steps)
        return multi.gradient_transformation()
    return transformation


def learning_rate(section: OptimizerSection, *, num_updates: int) -> optax.Schedule:
    """Return the schedule over updates of the optimizer; constant without warm-up is a constant schedule."""
    every = section.accumulate_steps
    warmup = -(-section.warmup_steps // every)
    end = num_updates if section.decay_steps is None else -(-section.decay_steps // every)
    peak, final = section.learning_rate, section.learning_rate * section.final_fraction
    after: optax.Schedule
    if section.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif section.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, max(1, end - warmup), alpha=section.final_fraction)
    else:
        after = optax.linear_schedule(peak, final, max(1, end - warmup))
    if not warmup:
        return after
    # The first update already moves: a rate of exactly zero would waste it.
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup), after], [warmup])


def decayed(parameters: Any) -> Any:
    """Return a tree of booleans: which parameters weight decay applies to."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not _UNDECAYED.search(_last_name(path)), parameters)


def _last_name(path: tuple[Any, ...]) -> str:
    """The last key of a path that is a name; arrays may sit below it under ``value`` or an index."""
    text = jax.tree_util.keystr(path, simple=True, separator="/")
    names = [part for part in re.split(r"[/.]", text) if part and part != "value" and not part.isdigit()]
    return names[-1] if names else ""
