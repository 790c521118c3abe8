"""Checkpoints: GGUF, MLX-quantized safetensors and Hugging Face safetensors, opened the same way."""

from __future__ import annotations

from kvcore.weights.checkpoint import Checkpoint, FolderTokenizer, GgufTokenizer, open_checkpoint
from kvcore.weights.source import ModelSource, resolve_model
from kvcore.weights.types import AffineWeight, DenseWeight, Weight

__all__ = [
    "AffineWeight",
    "Checkpoint",
    "DenseWeight",
    "FolderTokenizer",
    "GgufTokenizer",
    "ModelSource",
    "Weight",
    "open_checkpoint",
    "resolve_model",
]
