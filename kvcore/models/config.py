"""What a llama checkpoint says about itself, read from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcore.errors import ModelError
from kvcore.models.fields import Fields, quoted
from kvcore.models.rope import RopeConfig, rope_from_gguf, rope_from_hf, rope_to_hf

__all__ = ["COMPUTE_DTYPES", "LlamaConfig", "RopeConfig"]

COMPUTE_DTYPES = ("float32", "float16", "bfloat16")
# Model types that are this llama function, and the class that config.json names. They differ in sliding windows only.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "ministral": "MinistralForCausalLM"}
SUPPORTED = f"supported: {', '.join(ARCHITECTURES)}"
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shapes and constants of a llama model. ``dtype`` is the one that the checkpoint was made for.

    ``layer_windows``: the newest rows that a query of each layer sees, its own included; None for a layer that sees
    all. Empty where no layer slides.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    layer_windows: tuple[int | None, ...] = ()

    @property
    def common_window(self) -> int | None:
        """The widest window of all layers, where each of them slides: rows beyond it are of no use any more."""
        widths = [width for width in self.layer_windows if width is not None]
        widest = max(widths, default=self.max_position)
        return widest if len(widths) == self.num_layers and widest < self.max_position else None

    @classmethod
    def from_hf(cls, config: Mapping[str, object], where: str) -> LlamaConfig:
        """Read a config.json. ModelError, naming ``where``, for what is missing, wrong or unsupported."""
        config = _flat(config, where)
        _refuse_hf(config, where)
        fields = Fields(config, where)
        fields.require(
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "rms_norm_eps",
            "max_position_embeddings",
        )
        heads = fields.count("num_attention_heads")
        hidden = fields.count("hidden_size")
        bos = fields.token_ids("bos_token_id")
        return _consistent(
            cls(
                vocab_size=fields.count("vocab_size"),
                hidden_size=hidden,
                intermediate_size=fields.count("intermediate_size"),
                num_layers=fields.count("num_hidden_layers"),
                num_heads=heads,
                num_kv_heads=fields.count("num_key_value_heads", heads),
                head_dim=_head_dim(fields, "head_dim", hidden, heads),
                rms_norm_eps=fields.number("rms_norm_eps"),
                max_position=fields.count("max_position_embeddings"),
                rope=rope_from_hf(config, where),
                tie_embeddings=fields.flag("tie_word_embeddings", False),
                attention_bias=fields.flag("attention_bias", False),
                mlp_bias=fields.flag("mlp_bias", False),
                bos_token_id=bos[0] if bos else None,
                eos_token_ids=fields.token_ids("eos_token_id"),
                dtype=_dtype(fields),
                layer_windows=_layer_windows(fields),
            ),
            where,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], where: str) -> LlamaConfig:
        """Read GGUF metadata. What only the tensors tell (tied embeddings, biases, dtype, frequency factors) is
        left at its default. Raises ModelError, naming ``where``, for anything missing, wrong or unsupported."""
        fields = Fields(metadata, where)
        architecture = fields.text("general.architecture")
        if architecture != "llama":
            raise ModelError(f"{where}: architecture {quoted(architecture)} is not supported ({SUPPORTED})")
        _refuse_gguf(fields)
        tokens = fields.get("tokenizer.ggml.tokens")
        heads = fields.count("llama.attention.head_count")
        hidden = fields.count("llama.embedding_length")
        bos = fields.token_ids("tokenizer.ggml.bos_token_id")
        return _consistent(
            cls(
                vocab_size=fields.count("llama.vocab_size", len(tokens) if isinstance(tokens, list) else None),
                hidden_size=hidden,
                intermediate_size=fields.count("llama.feed_forward_length"),
                num_layers=fields.count("llama.block_count"),
                num_heads=heads,
                num_kv_heads=fields.count("llama.attention.head_count_kv", heads),
                head_dim=_head_dim(fields, "llama.attention.key_length", hidden, heads),
                rms_norm_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
                max_position=fields.count("llama.context_length"),
                rope=rope_from_gguf(metadata, where),
                tie_embeddings=False,
                attention_bias=False,
                mlp_bias=False,
                bos_token_id=bos[0] if bos else None,
                eos_token_ids=_gguf_eos(fields),
                dtype="float16",
            ),
            where,
        )

    def to_hf(self) -> dict[str, object]:
        """The config.json of this model, readable by transformers and mlx-lm."""
        eos = self.eos_token_ids
        sliding = _windows_to_hf(self.layer_windows)
        model_type = str(sliding.get("model_type", "llama"))
        return {
            "architectures": [ARCHITECTURES[model_type]],
            "model_type": model_type,
            **sliding,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position,
            **rope_to_hf(self.rope, self.head_dim),
            "tie_word_embeddings": self.tie_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "torch_dtype": self.dtype,
        }


def _flat(config: Mapping[str, object], where: str) -> Mapping[str, object]:
    """Settings nested in ``text_config`` (wrapper configs), laid over the outer ones."""
    inner = Fields(config, where).block("text_config")
    return {**config, **inner} if inner else config


def _refuse_hf(config: Mapping[str, object], where: str) -> None:
    fields = Fields(config, where)
    model_type = fields.text("model_type")
    if model_type not in ARCHITECTURES:
        raise ModelError(f"{where}: model type {quoted(model_type)} is not supported ({SUPPORTED})")
    wanted = ARCHITECTURES[model_type]
    architectures = config.get("architectures") or [wanted]
    if not isinstance(architectures, list) or wanted not in architectures:
        raise ModelError(f"{where}: architecture {quoted(architectures)} is not supported (supported: {wanted})")
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{where}: hidden_act {quoted(activation)} is not supported (supported: silu)")


def _layer_windows(fields: Fields) -> tuple[int | None, ...]:
    """Which layers slide, as transformers reads it: ``layer_types`` names each; else those from ``max_window_layers``
    on do, and all where that is absent. ``use_sliding_window`` false switches it off."""
    layers = fields.count("num_hidden_layers")
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers or {*kinds} - {SLIDING, FULL}):
        raise fields.refuse("layer_types", f"a list of {layers} words, each {SLIDING} or {FULL}")
    if not fields.flag("use_sliding_window", True):
        return ()
    if fields.get("sliding_window") is None:
        if isinstance(kinds, list) and SLIDING in kinds:
            raise ModelError(f"{fields.where}: layer_types has {SLIDING}, but there is no sliding_window")
        return ()
    width = fields.count("sliding_window")
    first = fields.whole("max_window_layers", 0)
    slides = [kind == SLIDING for kind in kinds] if isinstance(kinds, list) else [i >= first for i in range(layers)]
    return tuple(width if each else None for each in slides) if any(slides) else ()


def _windows_to_hf(windows: tuple[int | None, ...]) -> dict[str, object]:
    """The keys of config.json that `_layer_windows` reads, and the model type of transformers that has them."""
    if not windows:
        return {}
    width = next(each for each in windows if each is not None)
    if None not in windows:
        return {"model_type": "mistral", "sliding_window": width}
    kinds = [FULL if each is None else SLIDING for each in windows]
    return {"model_type": "ministral", "sliding_window": width, "layer_types": kinds}


def _refuse_gguf(fields: Fields) -> None:
    for key, what in (
        ("llama.expert_count", "a mixture of experts"),
        ("llama.attention.sliding_window", "a sliding window"),
    ):
        if fields.get(key) not in (None, 0):
            raise ModelError(f"{fields.where}: {what} ({key} {quoted(fields.get(key))}) is not supported")
    heads = fields.count("llama.attention.head_count")
    key_length = _head_dim(fields, "llama.attention.key_length", fields.count("llama.embedding_length"), heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.count(key, key_length) != key_length:
            raise ModelError(
                f"{fields.where}: {key} {fields.get(key)} other than head size {key_length} is not supported"
            )


def _head_dim(fields: Fields, key: str, hidden: int, heads: int) -> int:
    if fields.get(key) is not None:
        return fields.count(key)
    if hidden % heads:
        raise ModelError(
            f"{fields.where}: {key} is missing, and hidden size {hidden} is not divisible by {heads} heads"
        )
    return hidden // heads


def _gguf_eos(fields: Fields) -> tuple[int, ...]:
    """The end of text, and where files name them the end of a turn and of a message."""
    names = ("eos", "eot", "eom")
    ids = [i for name in names for i in fields.token_ids(f"tokenizer.ggml.{name}_token_id")]
    return tuple(dict.fromkeys(ids))


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(key, "float32").removeprefix("torch.")
    if dtype not in COMPUTE_DTYPES:
        raise ModelError(
            f"{fields.where}: {key} {quoted(dtype)} is not supported (supported: {', '.join(COMPUTE_DTYPES)})"
        )
    return dtype


def _consistent(config: LlamaConfig, where: str) -> LlamaConfig:
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{where}: {config.num_heads} attention heads are not divisible by {config.num_kv_heads} key/value heads"
        )
    if config.head_dim % 2:
        raise ModelError(f"{where}: head_dim {config.head_dim} is odd; RoPE rotates pairs of dimensions")
    return config
