"""Libraries that reach the GPU without PyTorch: other_frameworks.py jax|cupy."""

import sys

if sys.argv[1] == "jax":
    import jax

    if jax.default_backend() != "gpu":
        raise RuntimeError(f"JAX uses {jax.devices()}")
    print(jax.numpy.ones((1024, 1024)).sum())
else:
    import cupy

    x = cupy.zeros((1024, 1024), dtype=cupy.float32)
    print((x + 1).shape)
