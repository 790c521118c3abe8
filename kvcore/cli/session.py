"""What `generate` and `chat` share: from options to a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

from kvcore.cli.options import (
    BackendOptions,
    CommonOptions,
    LifeOptions,
    ModelOption,
    ModeOptions,
    ParallelOptions,
    SamplingOptions,
    TextOptions,
    WindowOptions,
)
from kvcore.cli.sizes import parse_size
from kvcore.cli.terminal import note, progress_bar
from kvcore.errors import InputError
from kvcore.layout import Cap, WindowPolicy
from kvcore.loading import load
from kvcore.modes import MODES, Mode, mode_from_bits, mode_from_codecs, resolve_mode
from kvcore.runtime import Model
from kvcore.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """The mode that the options mean, and the words that chose it."""

    mode: Mode
    requested: str


@dataclass(frozen=True, slots=True)
class Settings:
    """All options of a command that generates."""

    model: ModelOption
    mode: ModeOptions
    sampling: SamplingOptions
    text: TextOptions
    backend: BackendOptions
    window: WindowOptions
    life: LifeOptions
    common: CommonOptions
    parallel: ParallelOptions = field(default_factory=ParallelOptions)

    def cap(self) -> Cap | None:
        """The cap that the options mean. InputError where they contradict each other."""
        life = self.life
        if life.context_shift not in ("on", "off"):
            raise InputError(f"--context-shift {life.context_shift}: choose on or off")
        return None if life.max_kv_size is None else Cap(life.max_kv_size, life.keep)

    def budget(self) -> int | None:
        """Bytes of --kv-cache-budget. InputError where that is no size."""
        return budget_bytes(self.life.kv_cache_budget)

    def check_life(self) -> None:
        """InputError where the options of a cache's life cannot be met: before a model is loaded."""
        self.cap()
        self.budget()
        path, ranks = self.life.prompt_cache, self.parallel.tensor_parallel
        if path is not None and ranks > 1:
            raise InputError(
                f"--prompt-cache with --tensor-parallel {ranks}: a file has the rows of all KV heads, a rank those of "
                "its own; leave one of the two out"
            )
        if path is not None and not Path(path).expanduser().is_file():
            raise InputError(f"--prompt-cache {path}: there is no such file; make one with kvcore cache-prompt")

    @property
    def shifts(self) -> bool:
        return self.life.context_shift == "on"

    def sampling_params(self) -> SamplingParams:
        o = self.sampling
        return SamplingParams(
            max_tokens=o.max_tokens,
            temperature=o.temp,
            top_p=o.top_p,
            top_k=o.top_k,
            min_p=o.min_p,
            repetition_penalty=o.repetition_penalty,
            seed=o.seed,
            stop=tuple(o.stop),
        )

    def ignored(self, mode: Mode) -> list[str]:
        """Settings that have no effect beside the others."""
        sampling, window = SamplingOptions(), WindowOptions()
        changed = [f"--{f.name.replace('_', '-')}" for f in fields(window) if _differs(f.name, self.window, window)]
        said = []
        if changed and not mode.quantized:
            said.append(f"{', '.join(changed)}: no effect in mode {mode.name}, where every row stays raw")
        life = self.life
        if life.max_kv_size is None and (life.keep != LifeOptions().keep or not self.shifts):
            said.append("--keep, --context-shift: no effect without --max-kv-size")
        drawn = [
            f"--{name.replace('_', '-')}"
            for name in ("top_p", "top_k", "min_p", "seed")
            if _differs(name, self.sampling, sampling)
        ]
        if drawn and self.sampling.temp == 0:
            said.append(f"{', '.join(drawn)}: no effect at temperature 0, which takes the likeliest token")
        return said


def budget_bytes(given: str | None) -> int | None:
    return None if given is None else parse_size("--kv-cache-budget", given, example="512MiB or 2G")


def _differs(name: str, given: object, default: object) -> bool:
    return bool(getattr(given, name) != getattr(default, name))


def choose_mode(options: ModeOptions, notice: Callable[[str], None] = note) -> ModeChoice:
    """The mode that the options agree on. InputError where they do not, naming both."""
    chosen: dict[str, ModeChoice] = {}
    if options.kv_cache_mode is not None:
        name = options.kv_cache_mode
        chosen[f"--kv-cache-mode {name}"] = ModeChoice(resolve_mode(name, notice), name)
    if options.cache_type_k is not None or options.cache_type_v is not None:
        k, v = options.cache_type_k, options.cache_type_v
        words = [f"--cache-type-{part} {word}" for part, word in (("k", k), ("v", v)) if word is not None]
        mode = mode_from_codecs(k, v)
        chosen[" ".join(words)] = ModeChoice(mode, "/".join(mode.pair))
    if options.kv_bits is not None:
        mode = mode_from_bits(options.kv_bits)
        chosen[f"--kv-bits {options.kv_bits}"] = ModeChoice(mode, f"kv-bits {options.kv_bits}")
    if len({choice.mode.name for choice in chosen.values()}) > 1:
        meanings = " but ".join(f"{words} means {choice.mode.name}" for words, choice in chosen.items())
        raise InputError(f"{meanings}: give one of them")
    return next(iter(chosen.values()), ModeChoice(MODES["fp16"], "fp16"))


def window_policy(options: WindowOptions) -> WindowPolicy:
    return WindowPolicy(
        sink_tokens=options.sink_tokens,
        recent_tokens=options.recent_tokens,
        page_size=options.page_size,
        boundary_layers=options.boundary_layers,
    )


def load_model(settings: Settings, mode: Mode) -> Model:
    """Load with a progress bar; what there is to say about the model goes to stderr."""
    template = _template_text(settings.text.chat_template)
    window = window_policy(settings.window)
    with progress_bar("loading") as progress:
        model = load(
            settings.model.model,
            backend=settings.backend.backend,
            device=settings.backend.device,
            kv_cache_mode=mode,
            kv_cache_budget=settings.budget(),
            dtype=settings.backend.dtype,
            kernels=settings.backend.kernels,
            window=window,
            chat_template=template,
            progress=progress,
            notify=note,
            tensor_parallel=settings.parallel.tensor_parallel,
        )
    for notice in model.notices:
        note(notice)
    if mode.quantized and 2 * window.boundary_layers >= model.config.num_layers:
        note(
            f"--boundary-layers {window.boundary_layers} keeps all {model.config.num_layers} layers raw: "
            f"nothing of mode {mode.name} remains"
        )
    return model


def note_cap(settings: Settings, mode: Mode) -> None:
    """Say where a cap leaves nothing to quantize."""
    cap, window = settings.cap(), window_policy(settings.window)
    if cap is not None and settings.shifts and mode.quantized and cap.never_folds(window):
        whole = window.sink_tokens + window.recent_tokens + window.page_size
        note(
            f"--max-kv-size {cap.tokens} is below {whole} (sink, recent and page tokens): rows of mode {mode.name} "
            "stay raw while tokens come one by one"
        )


def uses_template(model: Model, raw: bool) -> bool:
    """Whether prompts go through a chat template; says so where the model has none.

    ModelError where the template is broken.
    """
    template = None if raw else model.tokenizer.chat_template
    if template is not None:
        template.compile()
    elif not raw:
        note(f"{model.name} has no chat template: the prompt is used as it is (--chat-template FILE gives one)")
    return template is not None


def _template_text(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--chat-template {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--chat-template {path}: not UTF-8 at byte {error.start}") from error
