"""The ops on an NVIDIA GPU: one module an op, imported by `moebook.kernels.dispatch` to run it."""
