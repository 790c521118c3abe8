"""Triton kernels. Importing a module here imports triton; `kvcore.backends.cuda.native` and `pool` need only torch."""
