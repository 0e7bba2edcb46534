"""moebook: four papers on fine-tuning Mixture-of-Experts language models, run and checked."""

import logging

__version__ = "0.1.0"

# bitsandbytes warns on import that the package `kernels` is absent, through which it would run code
# from the hub. It shall be absent; other messages of that logger pass.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in str(record.msg)
)
