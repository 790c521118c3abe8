"""The engine: many requests on one model, in one batch that they join and leave at any step."""

from kvcore.engine.config import EngineConfig, EngineStats, KvUse, Pages
from kvcore.engine.engine import Engine
from kvcore.engine.types import (
    BudgetError,
    ContextLengthError,
    ErrorCode,
    Failure,
    FinishReason,
    Listener,
    ModeError,
    NotReadyError,
    Output,
    QueueFullError,
    Request,
    TokenLogprob,
    Usage,
)

__all__ = [
    "BudgetError",
    "ContextLengthError",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "ErrorCode",
    "Failure",
    "FinishReason",
    "KvUse",
    "Listener",
    "ModeError",
    "NotReadyError",
    "Output",
    "Pages",
    "QueueFullError",
    "Request",
    "TokenLogprob",
    "Usage",
]
