"""The documentation site in ``build/docs/site``: ``make docs``.

Its pages are those of this folder, README, CHANGELOG and CONTRIBUTING, the tutorials, and a
reference of all public names, made of their docstrings. Neither building the site nor reading it
needs a network.
"""

import argparse
import importlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
FACES = {"harness": "harness", "runtime": "runtime", "lowlevel": "runtime.lowlevel"}
"""The modules whose names are public, by the name of their page."""
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "docs/tutorials": "tutorials/01_servers_and_sessions.md",
    "docs/notebooks": "notebooks/01_a_cluster_in_a_notebook.md",
}
"""Files and folders of the repository that are pages under another name."""
UNSOUGHT = ("CHANGELOG", "findings", "reference/lowlevel", "tf1_names")
"""Beginnings of the addresses of pages that the search leaves out."""
NOT_GUIDES = ("messages.md", "findings.md", "glossary.md", "testing.md", "tf1")
"""Beginnings of the names of pages that explain no name of the reference."""
_BUTTONS = re.compile(r"^\[.*\)$", re.MULTILINE)
_LINK = re.compile(r"(\[[^\]]*\])\((?!https?:|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def main() -> int:
    """Makes the site; returns the exit code, which is 1 when there is a warning."""
    parser = argparse.ArgumentParser(description="Makes the documentation site.")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=ROOT / "build" / "docs",
        help="folder for it (default: %(default)s)",
    )
    out = parser.parse_args().out.resolve()
    pages = out / "pages"
    for made in (pages, out / "site"):
        shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "images", pages / "images")
    config = (ROOT / "docs" / "site.toml").read_text(encoding="utf-8").replace("@ROOT@", str(ROOT))
    (out / "zensical.toml").write_text(config, encoding="utf-8")
    for name, text in texts():
        page = pages / name
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")
    for image in (ROOT / "benchmarks" / "results").glob("*.png"):
        shutil.copy(image, pages / "images")
    if problems := _off_the_map(pages, config):
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    zensical = pathlib.Path(sys.executable).with_name("zensical")
    built = subprocess.run([zensical, "build", "--strict", f"--config-file={out}/zensical.toml"])
    if not built.returncode:
        _forget(out / "site" / "search.json")
        print(f"To read it: python -m http.server --bind=127.0.0.1 --directory={out}/site")
    return built.returncode


def _forget(index: pathlib.Path) -> None:
    """Takes pages out of the search that would hide the page for a user's word."""
    found = json.loads(index.read_text(encoding="utf-8"))
    found["items"] = [item for item in found["items"] if not item["location"].startswith(UNSOUGHT)]
    index.write_text(json.dumps(found), encoding="utf-8")


def texts() -> Iterator[tuple[str, str]]:
    """Every page: its path below the site, and its Markdown."""
    for path in sorted(ROOT.glob("docs/*.md")):
        yield path.name, _relinked(path.read_text(encoding="utf-8"), "docs")
    for name, page in PAGES.items():
        if name.endswith(".md"):
            text = _relinked((ROOT / name).read_text(encoding="utf-8"), ".")
            # A line of nothing but links is a row of buttons on the first page.
            yield page, _BUTTONS.sub(_as_buttons, text) if page == "index.md" else text
    for path in sorted(ROOT.glob("docs/*/*.ipynb")):
        yield f"{path.parent.name}/{path.stem}.md", notebook(path.read_text(encoding="utf-8"))
    for page, module in FACES.items():
        yield f"reference/{page}.md", reference(module)


def reference(face: str) -> str:
    """The page of a module's public names, under the rooms that they live in.

    Args:
        face: name of the module; its public names are in ``__all__``.
    """
    module = importlib.import_module(face)
    rooms: dict[str, list[str]] = {}
    for name in module.__all__:
        value = getattr(module, name)
        home = str(getattr(value, "__module__", None) or getattr(value, "__name__", face)).split(
            "."
        )
        rooms.setdefault(".".join(home[:2]) if home[0] in FACES else face, []).append(name)
    lines = [f"# {face}", "", str(module.__doc__).replace("``", "`"), ""]
    for room, names in sorted(rooms.items()):
        about = (importlib.import_module(room).__doc__ or "").partition("\n")[0].replace("``", "`")
        lines += [f"## {room}", "", about, ""]
        for name in sorted(names):
            lines += [f"::: {face}.{name}", ""]
            if guide := _guide("rt" if face == "runtime" else face, name):
                title = (ROOT / "docs" / guide).read_text(encoding="utf-8").partition("\n")[0]
                lines += [f"Used in [{title.removeprefix('# ')}](../{guide}).", ""]
    return "\n".join(lines)


def _guide(face: str, name: str) -> str:
    """Returns the page that names a public name most often; empty if no page does."""
    whole = re.compile(rf"\b{re.escape(face)}\.{name}\b")
    counts = {
        page.name: len(whole.findall(page.read_text(encoding="utf-8")))
        for page in sorted(ROOT.glob("docs/*.md"))
        if not page.name.startswith(NOT_GUIDES)
    }
    page = max(counts, key=lambda page: counts[page])
    return page if counts[page] else ""


def _as_buttons(row: re.Match[str]) -> str:
    return re.sub(r"(?<=\))(?= |$)", "{ .md-button }", row[0])


def notebook(text: str) -> str:
    """A Jupyter notebook as Markdown: its texts, its code, and what the code printed.

    Args:
        text: the notebook's file, nbformat 4.
    """
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if image := "".join(data.get("image/png", "")).replace("\n", ""):
                parts.append(f"![what the cell draws](data:image/png;base64,{image})")
            elif printed := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
                parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"


def _relinked(text: str, folder: str) -> str:
    """Points links of a page of the repository to pages of the site; a file that is no page is named only."""

    def target(link: re.Match[str]) -> str:
        words, path, anchor = link.groups(default="")
        file = (ROOT / folder / path).resolve()
        if not file.exists():
            raise SystemExit(f"site: {folder}/: {link[0]} leads nowhere")
        page = PAGES.get(file.relative_to(ROOT).as_posix())
        if page is None and file.parent == ROOT / "docs":
            page = file.name
        if page is None and file.suffix in (".png", ".svg"):
            page = f"images/{file.name}"
        return words[1:-1] if page is None else f"{words}({page}{anchor})"

    return _LINK.sub(target, text)


def _off_the_map(pages: pathlib.Path, config: str) -> list[str]:
    """The pages that the navigation does not list."""
    names = [page.relative_to(pages).as_posix() for page in sorted(pages.rglob("*.md"))]
    return [
        f"site: docs/site.toml lists no page {name}" for name in names if f'"{name}"' not in config
    ]


if __name__ == "__main__":
    sys.exit(main())
