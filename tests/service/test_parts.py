"""Small parts by hand: submissions, estimates, devices, allocations worth planning."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.errors import UsageError
from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster
from arena_jax.service.devices import Ledger, check_node, node_names
from arena_jax.service.estimates import IndexedStep, candidate_allocations, corrected, index_from_json, index_to_json
from arena_jax.service.job import Held, Job, Phase, Place, Submission
from arena_jax.service.steering import left_after
from tests.service.stub import CLUSTER, recipe

QUICK = [Allocation("quick", 1, n) for n in (1, 2, 4)]

submissions = st.builds(
    Submission,
    kind=st.sampled_from(["recipe", "closure"]),
    name=st.from_regex(r"[a-z][a-z_0-9]{0,20}", fullmatch=True),
    recipe=st.text('a: \n"é', min_size=1, max_size=20),
    steps=st.integers(1, 10**6),
    min_devices=st.integers(1, 8),
    max_devices=st.none() | st.integers(8, 64),
    types=st.lists(st.sampled_from(["quick", "slow"]), max_size=2).map(tuple),
    priority=st.floats(0.001, 1e6),
    deadline_s=st.none() | st.floats(1.0, 1e9),
)


@settings(max_examples=40)
@given(submissions)
def test_a_submission_and_a_job_read_back_as_they_were(spec):
    assert Submission.from_json(spec.to_json()) == spec
    job = Job(number=3, id="x-3", spec=spec, submitted_at=1.5, phase=Phase.RUNNING)
    job.held = Held(QUICK[1], ((1, (0, 3)),))
    job.desired = Place(Allocation("slow", 2, 4), (0, 1))
    assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "script"}, "kind is 'script'"),
        ({"name": "a/b"}, "name is 'a/b'"),
        ({"name": ""}, "name is ''"),
        ({"steps": 0}, "steps is 0"),
        ({"steps": True}, "steps is True"),
        ({"min_devices": 4, "max_devices": 2}, "max_devices is 2"),
        ({"priority": float("nan")}, "priority is nan"),
        ({"deadline_s": -1.0}, "deadline_s is -1.0"),
        ({"types": ("",)}, "types is"),
        ({"recipe": ""}, "recipe is ''"),
        ({"kind": "command", "on": "quick:1"}, "command is ''"),
    ],
)
def test_what_is_no_submission_is_said(changes, says):
    with pytest.raises(UsageError, match=says):
        recipe(**changes)
    with pytest.raises(UsageError, match="did you mean 'steps'"):
        Submission.from_json({"kind": "recipe", "name": "x", "step": 4})


def test_measured_times_stand_and_scale_their_type_by_the_geometric_mean():
    one, two, four = QUICK
    slow = Allocation("slow", 1, 1)
    index = {a: IndexedStep(step_time_s=s) for a, s in ((one, 4.0), (two, 2.0), (four, 1.0), (slow, 8.0))}
    assert corrected(index, {}) == {one: 4.0, two: 2.0, four: 1.0, slow: 8.0}
    # Ratios 2 and 8: their geometric mean is 4.
    said = corrected(index, {one: 8.0, two: 16.0, Allocation("quick", 2, 4): 1.0})
    assert said == pytest.approx({one: 8.0, two: 16.0, four: 4.0, slow: 8.0})
    assert index_from_json(index_to_json(index)) == index


def test_allocations_worth_planning_are_powers_of_two_and_whole_nodes():
    three = Cluster.from_tables({"nodes": [{"type": "a100", "count": 3, "devices": 4}, {"type": "t4", "devices": 1}]})

    def texts(**bounds) -> list[str]:
        return [str(a) for a in candidate_allocations(three, **bounds)]

    assert texts() == ["a100-40:1", "a100-40:2", "a100-40:4", "a100-40:2x4", "a100-40:3x4", "t4:1"]
    assert texts(least=2, most=8) == ["a100-40:2", "a100-40:4", "a100-40:2x4"]
    assert texts(types=("t4",)) == ["t4:1"]
    with pytest.raises(UsageError, match="no allocation of at least 16"):
        texts(least=16)
    with pytest.raises(UsageError, match="h100"):
        texts(types=("h100",))


def test_a_ledger_gives_own_devices_first_and_none_twice():
    held = Held(QUICK[1], ((0, (1, 3)),))
    job = Job(number=1, id="a-1", spec=recipe(), submitted_at=1.0, held=held)
    ledger = Ledger(CLUSTER, [job])
    assert ledger.fit(Place(QUICK[2], (0,))) is None
    assert ledger.fit(Place(QUICK[1], (0,))).devices == ((0, (0, 2)),)
    with pytest.raises(ValueError, match="not all free"):
        ledger.take(held)
    ledger.give_back(held)
    grown = ledger.fit(Place(QUICK[2], (0,)), held)
    assert grown.devices == ((0, (1, 3, 0, 2)),)
    assert left_after(grown, QUICK[0], Place(QUICK[0], (0,))).devices == ((0, (1,)),)
    both = Held(Allocation("quick", 2, 4), ((0, (0, 1, 2, 3)), (1, (0, 1, 2, 3))))
    assert left_after(both, QUICK[2], Place(QUICK[2], (1,))).devices == ((1, (0, 1, 2, 3)),)
    assert left_after(both, both.allocation, None) == both


def test_nodes_have_names():
    assert node_names(CLUSTER) == ["quick/0", "quick/1", "slow/0", "slow/1"]
    assert check_node(CLUSTER, "slow/1") == "slow/1"
    for bad in ("slow/2", "slow", "", "slow/-1"):
        with pytest.raises(UsageError, match="no node"):
            check_node(CLUSTER, bad)
