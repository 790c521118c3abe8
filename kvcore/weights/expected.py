"""Which tensors a llama has, and what to say when a checkpoint has others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcore.errors import ModelError
from kvcore.models.config import LlamaConfig
from kvcore.models.fields import quoted

Shapes = Mapping[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
HARMLESS = "rotary_emb.inv_freq"  # older checkpoints store this table; it follows from the config
SHOWN = 3


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every parameter; a tied model has no lm_head.weight."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {
        "q_proj": (q_width, hidden),
        "k_proj": (kv_width, hidden),
        "v_proj": (kv_width, hidden),
        "o_proj": (hidden, q_width),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    linear = [(f"self_attn.{name}", shape, config.attention_bias) for name, shape in attention.items()]
    linear += [(f"mlp.{name}", shape, config.mlp_bias) for name, shape in mlp.items()]

    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{norm}.weight"] = (hidden,)
        for name, shape, has_bias in linear:
            shapes[f"{at}.{name}.weight"] = shape
            if has_bias:
                shapes[f"{at}.{name}.bias"] = shape[:1]
    shapes[NORM] = (hidden,)
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def check_layer_count(num_layers: int, num_tensors: int, where: str) -> None:
    """ModelError for more layers than tensors, before anybody lists the names of a billion layers."""
    if num_layers > num_tensors:
        raise ModelError(f"{where}: {num_layers} layers are declared, but there are only {num_tensors} tensors")


def check_shapes(found: Shapes, config: LlamaConfig, where: str) -> None:
    """ModelError naming tensors that are missing, superfluous or of the wrong shape (the first few)."""
    expected = parameter_shapes(config)
    missing = [name for name in expected if name not in found]
    ignored = {HEAD} if config.tie_embeddings else set()
    superfluous = [
        quoted(name)[1:-1]
        for name in found
        if name not in expected and name not in ignored and not name.endswith(HARMLESS)
    ]
    wrong = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    problems = [
        _listed(what, names)
        for what, names in (("missing", missing), ("wrong shape", wrong), ("superfluous", superfluous))
        if names
    ]
    if missing == [HEAD]:
        problems.append("without it the embeddings must be tied (tie_word_embeddings true in config.json)")
    if problems:
        raise ModelError(f"{where}: {'; '.join(problems)}")


def _listed(what: str, names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{what}: {', '.join(names[:SHOWN])}{rest}"
