"""Fields that the schemas do not have: harmless ones pass, others only with a value that asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.server.errors import ApiError, bad_request

# They change nothing about an answer.
IGNORED = frozenset(
    {
        "metadata",
        "num_draft_tokens",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Values beside null that ask for what happens anyway; with any other value the field is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "adapters": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "cache_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "draft_model": ("default_model",),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "frequency_context_size": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "id_slot": (-1,),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora": ([],),
    "min_keep": (0,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n_keep": (0,),
    "n_probs": (0,),
    "parallel_tool_calls": (True, False),
    "post_sampling_probs": (False,),
    "prediction": (),
    "presence_context_size": (),
    "reasoning_format": ("none", "auto"),
    "repeat_last_n": (-1,),
    "repetition_context_size": (),
    "response_format": ({"type": "text"},),
    "return_progress": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "slot_id": (-1,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tfs_z": (1,),
    "timings_per_token": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_n_sigma": (-1,),
    "typ_p": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
}

# Settings of something that another field switches on: without effect unless that field is set (and then refused).
DETAILS = {
    "dry_allowed_length": "dry_multiplier",
    "dry_base": "dry_multiplier",
    "dry_penalty_last_n": "dry_multiplier",
    "dry_sequence_breakers": "dry_multiplier",
    "dynatemp_exponent": "dynatemp_range",
    "mirostat_eta": "mirostat",
    "mirostat_tau": "mirostat",
    "xtc_threshold": "xtc_probability",
}

# How many tokens a penalty looks back: only without the penalty does it not matter.
WINDOWS = {
    "frequency_context_size": ("frequency_penalty", 0),
    "presence_context_size": ("presence_penalty", 0),
    "repeat_last_n": ("repetition_penalty", 1),
    "repetition_context_size": ("repetition_penalty", 1),
}

_INSTEAD = {
    "tools": "tool calls are not supported: describe the tools in a message",
    "functions": "function calls are not supported: describe the functions in a message",
    "response_format": "only text comes out, without a grammar: ask for the format in a message",
    "json_schema": "answers are not constrained: ask for the format in a message",
    "grammar": "answers are not constrained: ask for the format in a message",
    "suffix": "there is no infilling: leave it out",
    "reasoning_effort": "give what the model's template reads in chat_template_kwargs",
    "cache_prompt": "prefixes are always reused, which does not change an answer: leave it out",
    "samplers": "the order is fixed (penalties, temperature, top_k, top_p, min_p): leave it out",
    "n_probs": "ask for logprobs at /v1/completions",
    "adapters": "one set of weights is served: leave it out",
    "draft_model": "there is no speculative decoding: leave it out",
}


def refuse_unsupported(extra: Mapping[str, Any], active: Mapping[str, float]) -> None:
    """ApiError 400 for the first field of ``extra`` that asks for something that is not done here.

    ``active``: the penalties of the request by name, for the fields of `WINDOWS`.
    """
    for name, value in extra.items():
        if value is None or name in IGNORED or name in DETAILS:
            continue
        if any(_same(value, neutral) for neutral in NEUTRAL.get(name, ())):
            continue
        if name in WINDOWS:
            penalty, off = WINDOWS[name]
            if active[penalty] == off:
                continue
            raise bad_request(
                f"{name}: {penalty} looks at all tokens here: leave {name} out", name, "unsupported_value"
            )
        raise _refused(name)


def _refused(name: str) -> ApiError:
    if name in NEUTRAL or name in _INSTEAD:
        return bad_request(
            f"{name}: {_INSTEAD.get(name, 'this value is not supported: leave it out')}", name, "unsupported_value"
        )
    return bad_request(f"{name[:100]}: there is no such field; docs/server.md lists them", name[:100], "unknown_field")


def _same(value: Any, neutral: Any) -> bool:
    """Equal, and not a number where a truth value is meant or the other way round."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
