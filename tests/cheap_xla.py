"""XLA flags under which programs that run a few times only compile soonest. Imports no jax."""

from importlib.metadata import version

XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jaxlib").startswith("0.10."):  # later ones end the process at a flag they do not know
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
