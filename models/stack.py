"""Equal blocks applied in turn: unrolled, or as one ``lax.scan``; with or without rematerialisation."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


class Stack(nnx.Module):
    """``num_blocks`` equal blocks applied in turn: unrolled, or as one ``lax.scan`` over stacked parameters.

    Under ``scan`` every parameter of a block gains a leading dimension L, and the stacked arrays are
    the scan's direct inputs, so that a compiler can cut the stack between any two layers.

    Args:
        make_block: ``rngs -> module``; the module maps a carry (any pytree) to the next one.
        num_blocks: L.
        scan: compile one block and loop, rather than L of them.
        remat: recompute each block in the backward pass instead of keeping its activations.
        rngs: source of keys; every block draws keys of its own.
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        num_blocks: int,
        *,
        scan: bool,
        remat: bool,
        rngs: nnx.Rngs,
    ) -> None:
        self.scan = scan
        self.remat = remat
        if scan:
            stacked = nnx.vmap(make_block, in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=num_blocks)(stacked)(rngs)
        else:
            self.blocks = nnx.List([make_block(rngs) for _ in range(num_blocks)])

    def __call__(self, carry: Any) -> Any:
        if self.scan:
            graphdef, parameters, other = nnx.split(self.blocks, nnx.Param, ...)
            apply = _applier(graphdef, self.remat, in_scan=True)
            carry, other = jax.lax.scan(lambda c, state: apply(c, *state), carry, (parameters, other))
            nnx.update(self.blocks, other)
            return carry
        for block in self.blocks:
            if self.remat:
                graphdef, parameters, other = nnx.split(block, nnx.Param, ...)
                carry, other = _applier(graphdef, remat=True, in_scan=False)(carry, parameters, other)
                nnx.update(block, other)
            else:
                carry = block(carry)
        return carry


def _applier(graphdef: Any, remat: bool, *, in_scan: bool) -> Callable[..., tuple[Any, nnx.State]]:
    """One block as a pure function: (carry, parameters, other state) -> (carry, other state)."""

    def apply(carry: Any, parameters: nnx.State, other: nnx.State) -> tuple[Any, nnx.State]:
        block = nnx.merge(graphdef, parameters, other)
        carry = block(carry)
        return carry, nnx.state(block, nnx.Not(nnx.Param))

    # Inside a scan the compiler cannot merge the two passes, so nothing has to keep it from it.
    return jax.checkpoint(apply, prevent_cse=not in_scan) if remat else apply
