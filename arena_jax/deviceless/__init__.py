"""Compiling plans for hardware that is not here, with XLA's own CUDA and TPU compilers.

``extras`` says whether the compilers are installed, ``target`` describes a device type to them, ``worker``
compiles in a process of its own, ``client`` starts it, ``store`` keeps what came of it, ``account`` adds a
plan's programs up and ``correction`` puts that into the plan's estimate.
"""
