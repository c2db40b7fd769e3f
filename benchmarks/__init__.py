"""Measurements of gpuops beside its peers: ``python -m benchmarks [NAMES] [--quick]``."""
