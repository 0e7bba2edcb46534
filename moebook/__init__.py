"""moebook: four papers on fine-tuning Mixture-of-Experts language models, run and checked."""

__version__ = "0.1.0"
