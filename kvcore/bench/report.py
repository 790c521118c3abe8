"""Rows to Markdown, JSON lines and CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """A table of the named columns."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def write(
    folder: Path, name: str, environment: Mapping[str, str], rows: Sequence[Row], columns: Sequence[str]
) -> list[Path]:
    """``name``.md, ``name``.jsonl and ``name``.csv in ``folder``; every JSON line repeats the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}{suffix}" for suffix in (".md", ".jsonl", ".csv")]
    heading = "\n".join(f"- {key}: {value}" for key, value in environment.items())
    paths[0].write_text(f"{heading}\n\n{markdown(rows, columns)}\n", encoding="utf-8")
    paths[1].write_text("".join(json.dumps({**environment, **row}) + "\n" for row in rows), encoding="utf-8")
    with paths[2].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return paths


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
