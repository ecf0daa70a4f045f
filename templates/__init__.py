"""The Jinja templates and CUDA headers that kernels are generated from (package data)."""
