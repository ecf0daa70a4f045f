"""From a CUDA source to a cubin in the cache: tool chain, fingerprint, compilation, manifest."""
