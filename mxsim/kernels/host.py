"""The kernels' CPU backend."""
