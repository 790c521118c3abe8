"""Benchmarks. Every row carries its device, versions, commit, effective mode and kernels."""
