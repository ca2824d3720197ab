"""Hooks of `make docs`: add the files outside docs/ that pages link to, below source/.

A link that leaves docs/ begins with `../` in a checkout. On the site the file is in `source/`.
The benchmarks' notes and tables are pages there, and their links into docs/ lead back to the site.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# The target of a Markdown link or picture, without its anchor, that leaves docs/.
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")
# The same in a page below benchmarks/.
RELATIVE = re.compile(r"\]\(((?:\.\./|tables/|notes/)[^)#]+)")


def _targets(path: Path) -> set[str]:
    """Return what a page of the benchmarks links to outside docs/, as paths from the root."""
    targets = {(path.parent / link).resolve() for link in RELATIVE.findall(path.read_text())}
    names = {target.relative_to(ROOT).as_posix() for target in targets}
    return {name for name in names if not name.startswith("docs/")}


def on_files(files: Files, config: Any) -> Files:
    """Add every file that a page links to, and the benchmarks' notes, tables and their links."""
    pages = [*ROOT.glob("benchmarks/notes/*.md"), *ROOT.glob("benchmarks/*/tables/*.md")]
    linked = {path.relative_to(ROOT).as_posix() for path in pages}
    for path in ROOT.glob("benchmarks/notes/*.md"):
        linked |= _targets(path)
    for page in files.documentation_pages():
        linked |= set(OUTSIDE.findall(page.content_string))
    for path in sorted(linked):
        files.append(File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links that leave docs/ point at what `on_files` added, and links into docs/ back."""
    if page.file.src_uri.startswith("source/"):
        return markdown.replace("](../../docs/", "](../../../")
    return OUTSIDE.sub(r"](source/\1", markdown)
