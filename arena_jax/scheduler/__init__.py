"""The elastic, heterogeneity-aware scheduler as a library: policies and an honest simulator.

Needs no jax. ``docs/scheduler.md`` states the model, ``docs/policies.md`` each policy's equation.
The hook between a scheduler and a running job lives in :mod:`arena_jax.grid` and is exported here too.
"""

from arena_jax.grid import Pause as Pause
from arena_jax.grid import Request as Request
from arena_jax.grid import SchedulerHook as SchedulerHook
from arena_jax.grid import StepReport as StepReport
from arena_jax.grid import Stop as Stop
from arena_jax.scheduler.bounds import interval_bound_s as interval_bound_s
from arena_jax.scheduler.bounds import isolated_bound_s as isolated_bound_s
from arena_jax.scheduler.cluster import Cluster as Cluster
from arena_jax.scheduler.cluster import Columns as Columns
from arena_jax.scheduler.cluster import NodeGroup as NodeGroup
from arena_jax.scheduler.costs import RestartCosts as RestartCosts
from arena_jax.scheduler.jobs import JobSpec as JobSpec
from arena_jax.scheduler.jobs import Workload as Workload
from arena_jax.scheduler.metrics import summary as summary
from arena_jax.scheduler.policies import POLICIES as POLICIES
from arena_jax.scheduler.policies import make_policy as make_policy
from arena_jax.scheduler.policy import Decision as Decision
from arena_jax.scheduler.policy import Jobs as Jobs
from arena_jax.scheduler.policy import Policy as Policy
from arena_jax.scheduler.policy import View as View
from arena_jax.scheduler.profiles import IndexProfile as IndexProfile
from arena_jax.scheduler.profiles import Profile as Profile
from arena_jax.scheduler.profiles import ProfileSet as ProfileSet
from arena_jax.scheduler.profiles import TableProfile as TableProfile
from arena_jax.scheduler.report import write_report as write_report
from arena_jax.scheduler.simulator import NodeEvent as NodeEvent
from arena_jax.scheduler.simulator import Result as Result
from arena_jax.scheduler.simulator import Settings as Settings
from arena_jax.scheduler.simulator import Simulator as Simulator
from arena_jax.scheduler.study import Scenario as Scenario
from arena_jax.scheduler.study import simulate as simulate
from arena_jax.scheduler.study import simulate_all as simulate_all
from arena_jax.scheduler.tables import load_profiles as load_profiles
from arena_jax.scheduler.traces import load_trace as load_trace
