"""Repeated layers in lists of operations whose repeats are known."""

from hypothesis import given
from hypothesis import strategies as st

from arena_jax.compiler.intra_op.repeats import classes_of

# A body that repeats nothing inside, so that its own length is the shortest period.
bodies = st.integers(8, 20).map(lambda n: list(range(100, 100 + n)))


@given(body=bodies, count=st.integers(2, 6), before=st.integers(0, 12), after=st.integers(0, 12))
def test_equal_places_of_a_repeat_share_a_class(body: list[int], count: int, before: int, after: int) -> None:
    text = [*range(before), *body * count, *range(50, 50 + after)]
    classes = classes_of(text)
    assert len(set(classes)) == before + len(body) + after
    for i in range(len(body)):
        assert len({classes[before + i + k * len(body)] for k in range(count)}) == 1


@given(first=bodies, second=bodies, counts=st.tuples(st.integers(2, 4), st.integers(2, 4)))
def test_two_stacks_are_both_found(first: list[int], second: list[int], counts: tuple[int, int]) -> None:
    text = [*first * counts[0], 0, *(x + 100 for x in second * counts[1])]
    assert len(set(classes_of(text))) == len(first) + 1 + len(second)


@given(st.lists(st.integers(0, 3), max_size=60))
def test_only_equal_operations_share_a_class(text: list[int]) -> None:
    found: dict[int, int] = {}
    for operation, group in zip(text, classes_of(text), strict=True):
        assert found.setdefault(group, operation) == operation
