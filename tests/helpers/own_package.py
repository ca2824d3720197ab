"""A third-party package, installed in a folder, that adds a method."""

import re
from pathlib import Path

from tests.helpers.settings import ROOT


def install(folder: Path, name: str, files: dict[str, str], entries: str) -> None:
    """Install a package as pip does: its modules, and the metadata beside them.

    Args:
        folder: a folder on Python's path.
        files: the package's modules.
        entries: the lines of its group `osfl.methods`.
    """
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for file, text in files.items():
        (package / file).write_text(text)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    title = name.replace("_", "-")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[osfl.methods]\n{entries}\n")


def install_styled(folder: Path) -> None:
    """Install the package of docs/adding-a-method.md."""
    page = (ROOT / "docs" / "adding-a-method.md").read_text()
    _, server, declaration, client = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    files = {"method.py": declaration, "client.py": client, "server.py": server}
    install(folder, "styled_prompts", files, "styled = styled_prompts.method")
