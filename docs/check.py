"""Regenerate the generated parts of docs/ and follow every relative link; exit 1 and say why if one was wrong.

Run from the repository root: python docs/check.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

CAPABILITIES = Path("docs/capabilities.md")
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"

_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def with_generated(text: str, generated: str) -> str:
    """`text` with `generated` between its two markers. ValueError: they are not there, once each."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in after or END in before + after:
        raise ValueError(f"needs {BEGIN} and, after it, {END}, once each")
    return f"{before}{begin}\n{generated.strip()}\n{end}{after}"


def broken_links(page: Path) -> list[str]:
    """The relative links of a Markdown page that lead to no file, or to no heading of a Markdown file."""
    prose = _CODE.sub("", page.read_text(encoding="utf-8"))
    links = [inline or reference for inline, reference in _LINK.findall(prose)]
    return [link for link in links if not _OUTSIDE.match(link) and not _resolves(page, link)]


def _resolves(page: Path, link: str) -> bool:
    path, _, fragment = unquote(link).partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return False
    return not fragment or target.suffix != ".md" or fragment in _anchors(target)


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in _HEADING.findall(text)}


def main() -> int:
    problems = [
        f"{page}: link to {link} leads nowhere"
        for page in [Path("README.md"), *sorted(Path("docs").rglob("*.md"))]
        for link in broken_links(page)
    ]
    table = subprocess.run(
        [sys.executable, "-m", "kvcore", "doctor", "--markdown"], check=True, capture_output=True, text=True
    ).stdout
    current = CAPABILITIES.read_text(encoding="utf-8")
    fresh = with_generated(current, table)
    if fresh != current:
        CAPABILITIES.write_text(fresh, encoding="utf-8")
        problems.append(f"{CAPABILITIES}: was out of date and is now rewritten; commit it")
    print("\n".join(problems) or "docs are current, and their links resolve", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
