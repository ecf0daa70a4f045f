"""FuTransformer: generated Hopper kernels for Llama-style models, a different quantisation for each phase."""
