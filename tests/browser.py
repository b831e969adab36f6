"""A headless Chromium for tests, driven over the WebDriver protocol by chromedriver: no library needed."""

import base64
import json
import pathlib
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
]


def why_no_browser() -> str:
    """Why there is no browser here, or an empty string."""
    missing = [
        name
        for name, path in (
            ("chromium", _chromium()),
            ("chromedriver", shutil.which("chromedriver")),
        )
        if path is None
    ]
    return (
        f"{' and '.join(missing)} not installed: apt-get install chromium chromium-driver"
        if missing
        else ""
    )


def _chromium() -> str | None:
    return (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )


class Browser:
    """One browser with one page. A context manager."""

    def __init__(self, profile: pathlib.Path) -> None:
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._driver.stdout is not None
        port = None
        for line in self._driver.stdout:
            found = re.search(r"on port (\d+)", line)
            if found and "successfully" in line:
                port = found.group(1)
                break
        assert port is not None, "chromedriver did not start"
        self._base = f"http://127.0.0.1:{port}"
        options = {"binary": _chromium(), "args": [*CHROMIUM_FLAGS, f"--user-data-dir={profile}"]}
        wanted = {
            "capabilities": {
                "alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}
            }
        }
        try:
            self._base += f"/session/{self._ask('POST', '/session', wanted)['sessionId']}"
        except BaseException:
            self._driver.kill()
            self._driver.wait()
            raise

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + path, data, {"Content-Type": "application/json"}, method=method
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read().decode()[:500]}") from None

    def open(self, url: str) -> None:
        """Goes to a page."""
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """Runs JavaScript in the page and gives what it returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def resize(self, width: int, height: int) -> None:
        """Shows pages at this width and height, in CSS pixels, as a phone does."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        body = {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        self._ask("POST", "/goog/cdp/execute", body)

    def type(self, keys: str) -> None:
        """Types into what has the focus; ``"\ue009"`` holds Control down until ``"\ue000"``."""
        element = self._ask("GET", "/element/active")
        self._ask("POST", f"/element/{next(iter(element.values()))}/value", {"text": keys})

    def text(self) -> str:
        """All text of the page, that inside of web components included."""
        return str(self.run(TEXT))

    def click(self, label: str) -> bool:
        """Clicks the innermost element whose text is ``label``; false when there is none."""
        return bool(self.run(_CLICK.replace("LABEL", json.dumps(label))))

    def wait(self, script: str, seconds: float = 30.0) -> Any:
        """Waits until JavaScript returns something true, and gives it."""
        deadline = time.monotonic() + seconds
        while True:
            value = self.run(script)
            if value:
                return value
            assert time.monotonic() < deadline, (
                f"not within {seconds} s: {script}\npage: {self.text()[:2000]}"
            )
            time.sleep(0.1)

    def wait_text(self, text: str, seconds: float = 30.0) -> None:
        """Waits until the page shows ``text``."""
        self.wait(f"return (() => {{ {TEXT} }})().includes({json.dumps(text)})", seconds)

    def screenshot(self, path: pathlib.Path) -> bytes:
        """A PNG of the page."""
        data = base64.b64decode(self._ask("GET", "/screenshot"))
        path.write_bytes(data)
        return data

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait()
            assert self._driver.stdout is not None
            self._driver.stdout.close()


TEXT = """
const out = [];
const walk = (node) => {
  if (node.nodeType === Node.TEXT_NODE) { if (node.textContent.trim()) out.push(node.textContent.trim()); return; }
  if (node.nodeName === 'STYLE' || node.nodeName === 'SCRIPT') return;
  if (node.shadowRoot) node.shadowRoot.childNodes.forEach(walk);
  node.childNodes.forEach(walk);
};
walk(document.body);
return out.join(' ');
"""
_CLICK = """
let found = null;
const walk = (node) => {
  if (node.shadowRoot) node.shadowRoot.childNodes.forEach(walk);
  node.childNodes.forEach(walk);
  if (!found && node.nodeType === Node.ELEMENT_NODE && node.textContent.trim() === LABEL) found = node;
};
walk(document.body);
if (found) found.click();
return found !== null;
"""
