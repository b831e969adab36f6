"""What is uploaded to a package index, in ``build/dist/out``: ``make dist URL=https://github.com/NAME/bellwether``.

The wheel and the source archive of this checkout. On an index the README stands by itself, so its
links to files of the repository become addresses below ``URL``, at the tag of the version, and the
project's addresses go into the metadata.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
_BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # which they change
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""


def main() -> int:
    """Builds both archives; returns the exit code."""
    parser = argparse.ArgumentParser(description="Builds what is uploaded to a package index.")
    parser.add_argument(
        "--url",
        required=True,
        help="address of the repository, as GitHub, Codeberg or GitLab has it",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=ROOT / "build" / "dist",
        help="folder for it (default: %(default)s)",
    )
    options = parser.parse_args()
    url = options.url.rstrip("/")
    source, out = options.out.resolve() / "source", options.out.resolve() / "out"
    for made in (source, out):
        shutil.rmtree(made, ignore_errors=True)
    out.mkdir(parents=True)
    listing = [
        "git",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "-z",
        "harness",
        "runtime",
        ":(glob)*",
    ]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    project = source / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    tag = f"v{tomllib.loads(text)['project']['version']}"
    project.write_text(text.replace("\n[project.scripts]\n", urls(url, tag)), encoding="utf-8")
    readme = source / "README.md"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), url, tag), encoding="utf-8")
    built = subprocess.run(
        [sys.executable, "-c", _BUILD, str(out)], cwd=source, stdout=subprocess.DEVNULL
    )
    if not built.returncode:
        print(*sorted(out.iterdir()), sep="\n")
    return built.returncode


def urls(url: str, tag: str) -> str:
    """The table of the project's addresses, and the heading that it stands before."""
    found = {
        "Homepage": url,
        "Documentation": f"{url}/blob/{tag}/README.md",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
        "Source": url,
        "Issues": f"{url}/issues",
    }
    return "\n".join(
        [
            "",
            "[project.urls]",
            *(f'{name} = "{to}"' for name, to in found.items()),
            "",
            "[project.scripts]",
            "",
        ]
    )


def absolute(text: str, url: str, tag: str) -> str:
    """A page of the repository's root with addresses in place of its links to files.

    Raises:
        SystemExit: a link leads nowhere; names it.
    """

    def target(link: re.Match[str]) -> str:
        image, words, path, anchor = link.groups(default="")
        found = ROOT / path
        if not found.exists():
            raise SystemExit(f"dist: README.md: {link[0]} leads nowhere")
        kind = "raw" if image else "tree" if found.is_dir() else "blob"
        return f"{image}{words}({url}/{kind}/{tag}/{path}{anchor})"

    return _LINK.sub(target, text)


if __name__ == "__main__":
    sys.exit(main())
