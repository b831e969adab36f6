"""The documentation site as it is built: every page and name is there, no link is broken, and a browser can use it."""

import contextlib
import functools
import html.parser
import http.server
import importlib
import pathlib
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator

import pytest

from tests.browser import TEXT, Browser, why_no_browser

pytestmark = pytest.mark.chaos

ROOT = pathlib.Path(__file__).parents[2]
PHONE = 390
"""Pixels of a phone's width."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    built = tmp_path_factory.mktemp("docs")
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "site.py", f"--out={built}"],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert "No issues found" in made.stdout + made.stderr
    return built / "site"


class Page(html.parser.HTMLParser):
    """What a page links to, and where it can be linked to."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.update(value for name, value in attrs if name in {"id", "name"} and value)
        self.links += [value for name in ("href", "src") if (value := found.get(name))]


def test_public_names_are_on_pages(site: pathlib.Path) -> None:
    """Every public name has a place in the reference."""
    for page, face in {
        "harness": "harness",
        "runtime": "runtime",
        "lowlevel": "runtime.lowlevel",
    }.items():
        ids = Page(site / "reference" / f"{page}.html").ids
        assert [
            name for name in importlib.import_module(face).__all__ if f"{face}.{name}" not in ids
        ] == []


def test_site_has_no_broken_link(site: pathlib.Path) -> None:
    """No link of the site is broken."""
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 20
    assert list(_broken(pages)) == []


def _broken(pages: dict[pathlib.Path, Page]) -> Iterator[str]:
    for path, page in pages.items():
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            anchor = urllib.parse.unquote(url.fragment)
            if not target.exists():
                yield f"{path.name}: {link} is not there"
            elif anchor and target in pages and anchor not in pages[target].ids:
                yield f"{path.name}: {link} has no such place"


def open_search(browser: Browser, address: str) -> None:
    """Opens the home page, and its field for a search."""
    browser.open(f"{address}/index.html")
    browser.wait("return document.querySelector('.md-search__button') !== null")
    browser.run("document.querySelector('.md-search__button').click()")
    browser.wait("return document.activeElement !== document.body")


@pytest.mark.nightly
@pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())
def test_site_works_on_a_phone(site: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The site can be searched and fits a phone."""
    with served(site) as address, Browser(tmp_path) as browser:
        open_search(browser, address)
        browser.type("partitioned")
        browser.wait(f"return /[1-9][0-9]* results/.test((() => {{ {TEXT} }})())")
        browser.resize(PHONE, 800)
        for page in sorted(site.rglob("*.html")):
            browser.open(f"{address}/{page.relative_to(site)}")
            width = browser.run("return document.documentElement.scrollWidth")
            assert width <= PHONE, f"{page.name} is {width} pixels wide"


WORDS = {
    "recommender": "tables",
    "embedding": "tables",
    "resume": "checkpoints",
    "safetensors": "checkpoints",
    "learning rate": "optimizers",
    "clip": "optimizers",
    "mask": "optimizers",
    "moving average": "optimizers",
    "kill": "guarantees",
    "GPU": "gpu",
    "CUDA": "gpu",
    "docker": "gpu",
    "slurm": "slurm",
    "kubernetes": "kubernetes",
    "ray": "ray",
    "batch norm": "models",
    "dropout": "models",
    "flax": "models",
    "keras": "models",
    "dataset": "data",
    "DataLoader": "data",
    "sharding": "data",
    "early stopping": "supervisor",
    "reinforcement learning": "reinforcement",
    "actor": "reinforcement",
    "A3C": "reinforcement",
    "torchrun": "moving",
    "DDP": "moving",
    "ParameterServerStrategy": "moving",
    "TensorBoard": "monitoring",
    "wandb": "monitoring",
    "prometheus": "monitoring",
    "exit code": "launch",
    "ctrl-c": "launch",
    "elastic": "launch",
    "preemption": "endings",
    "backup": "backups",
    "certificate": "security",
    "queue": "sync",
}
"""Words that people type into the search, with the page that comes first."""
FIRST_RESULT = """
const found = [];
const walk = (node) => {
  if (node.shadowRoot) walk(node.shadowRoot);
  for (const child of node.children || []) {
    if (child.getAttribute('role') === 'option') found.push(child.href);
    walk(child);
  }
};
walk(document.body);
return found.length ? new URL(found[0]).pathname : 'none';
"""


@pytest.mark.nightly
@pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser())
def test_search_finds_the_page(site: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A word that people type finds the page about it first."""
    with served(site) as address, Browser(tmp_path) as browser:
        open_search(browser, address)
        for word, page in WORDS.items():
            # No page has the first word, so no result of the word before is left.
            for typed, first in (("qqqq", "none"), (word, f"/{page}.html")):
                browser.type(f"\ue009a\ue000{typed}")
                browser.wait(f"return (() => {{ {FIRST_RESULT} }})() === {first!r}")


@contextlib.contextmanager
def served(folder: pathlib.Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=folder)
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
