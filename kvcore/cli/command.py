"""From a function that takes groups of options to a command, so that each option is declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

import typer

# Ways to say one thing: a flag overrules the other ways too where they come from the environment.
ALTERNATIVES = frozenset({"kv_cache_mode", "cache_type_k", "cache_type_v", "kv_bits"})


def add_command(app: typer.Typer, name: str, function: Callable[..., None]) -> None:
    """Register ``function``, whose parameters are frozen dataclasses with `typer.Option` annotations."""
    groups = get_type_hints(function)
    del groups["return"]

    def invoke(ctx: typer.Context, **values: Any) -> None:
        if values["debug"]:
            ctx.obj["debug"] = True
        _drop_overruled(ctx, values)
        made = {
            parameter: group(**{field.name: values[field.name] for field in fields(group)})
            for parameter, group in groups.items()
        }
        try:
            function(**made)
        except KeyboardInterrupt as error:
            typer.echo("kvcore: interrupted", err=True)
            raise typer.Exit(130) from error

    parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for group in groups.values():
        parameters += _parameters(group)
    _present(invoke, function, parameters)
    app.command(name)(invoke)


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=_default(field), annotation=hints[field.name]
        )
        for field in fields(group)
    ]


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _present(invoke: Callable[..., None], function: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    """Give ``invoke`` the flat signature that typer reads, and the function's name and text."""
    invoke.__name__, invoke.__doc__ = function.__name__, function.__doc__
    invoke.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def _drop_overruled(ctx: typer.Context, values: dict[str, Any]) -> None:
    sources = {name: ctx.get_parameter_source(name) for name in ALTERNATIVES & values.keys()}
    named = {name: source.name for name, source in sources.items() if source is not None}
    if "COMMANDLINE" in named.values():
        values |= {name: None for name, source in named.items() if source == "ENVIRONMENT"}
