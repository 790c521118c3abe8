"""Caches of prompts in files, in canonical form: what one backend writes, any other reads."""

from kvcore.promptcache.file import PromptCache, check_target, read_prompt_cache, write_prompt_cache
from kvcore.promptcache.fingerprint import Fingerprint
from kvcore.promptcache.identity import Identity

__all__ = ["Fingerprint", "Identity", "PromptCache", "check_target", "read_prompt_cache", "write_prompt_cache"]
