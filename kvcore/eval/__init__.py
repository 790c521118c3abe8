"""Fidelity: what a cache mode costs on a model and a text, against the raw model. See docs/fidelity.md."""
