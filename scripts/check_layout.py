"""Whether the documents still match the tree, and the tree its own rules. Part of `make check`.

Documents fall behind silently; this makes them fall behind loudly.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "tuiwork")
PICTURE = ROOT / "docs" / "architecture.md"
MOST_LINES = 400

_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
_NAMED_FILE = re.compile(
    r"\b(?:engine|tuiwork|tests|profiles|scripts|docs|requirements)/[\w./-]*\w\.\w+"
)


def modules() -> list[Path]:
    """Every Python and C module of the packages, from the root."""
    return sorted(
        path.relative_to(ROOT)
        for package in PACKAGES
        for ending in ("py", "c", "h")
        for path in (ROOT / package).rglob(f"*.{ending}")
        if path.name != "__init__.py"
    )


def documents() -> list[Path]:
    """Every document that a person reads."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("tests/**/*.md")])


def long_modules() -> Iterator[str]:
    """Modules that should be split."""
    for path in modules():
        count = len((ROOT / path).read_text().splitlines())
        if count > MOST_LINES:
            yield f"{path}: {count} lines; split it below {MOST_LINES}"


def unpictured_modules() -> Iterator[str]:
    """Modules that the picture of the architecture leaves out."""
    if not PICTURE.exists():
        yield f"{PICTURE.relative_to(ROOT)}: is missing; it names every module"
        return
    words = set(re.findall(r"[\w./-]+\.(?:py|c|h)\b", PICTURE.read_text()))
    for path in modules():
        if not {str(path), path.name, str(Path(*path.parts[1:]))} & words:
            yield f"{PICTURE.relative_to(ROOT)}: leaves out {path}"


def lost_references() -> Iterator[str]:
    """Links and file names in documents that lead nowhere."""
    for document in documents():
        text = document.read_text()
        for target in _LINK.findall(text):
            if "://" not in target and not (document.parent / target).exists():
                yield f"{document.relative_to(ROOT)}: links to {target}, which is not there"
        for name in sorted(set(_NAMED_FILE.findall(text))):
            if not (ROOT / name).exists():
                yield f"{document.relative_to(ROOT)}: names {name}, which is not there"


def main() -> int:
    """Print every problem; exit status 1 if there is one."""
    problems = [*long_modules(), *unpictured_modules(), *lost_references()]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{len(modules())} modules and {len(documents())} documents match")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
