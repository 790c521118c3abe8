"""The same setting on other engines, for those who move on."""

from __future__ import annotations

from kvcore.export.vllm import VllmCommand, VllmSettings, vllm_command, vllm_options

__all__ = ["VllmCommand", "VllmSettings", "vllm_command", "vllm_options"]
