"""From a model's configuration to the CUDA sources of its kernels: pure Python, no torch, no CUDA."""
