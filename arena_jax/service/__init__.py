"""The cluster service: a queue of jobs, and the scheduler's policies running them for real. ``docs/service.md``.

Above the scheduler and the grid; imports no jax. What trains runs in processes of its own.
"""
