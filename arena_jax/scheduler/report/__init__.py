"""Reports of simulations as self-contained HTML."""

from arena_jax.scheduler.report.page import render as render
from arena_jax.scheduler.report.page import write_report as write_report
