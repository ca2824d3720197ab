"""What `make docs` does for pages that link to files outside of docs/.

They become part of the site.

On a page such a link begins with `../`, as it must in a checkout. On the site the file is in
`source/`.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# The target of a Markdown link or picture, without its anchor, that leaves docs/.
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add every file that a page links to, and the tables that the benchmarks' page links to."""
    linked = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("benchmarks/tables/*.md")}
    for page in files.documentation_pages():
        linked |= set(OUTSIDE.findall(page.content_string))
    for path in sorted(linked):
        files.append(File.generated(config, f"source/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links that leave docs/ point at what `on_files` added."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    return OUTSIDE.sub(r"](source/\1", markdown)
