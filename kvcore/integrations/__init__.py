"""kvcore's cache inside other libraries: `kvcore.integrations.transformers` and `kvcore.integrations.mlx_lm`.

Each needs its library and is imported by name; importing this package imports neither.
"""
