"""A headless Chromium, driven over its debugging pipe: no driver and no websocket are needed."""

import base64
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars "
    "--remote-debugging-pipe"
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
# Experimental, so that no tag above has it: a control is called otherwise than it reads.
MORE = {"label-content-name-mismatch": {"enabled": True}}


def installed():
    """The path of a Chromium on this machine, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Kept(SimpleHTTPRequestHandler):
    """Sends files in silence, which the browser may keep: a script is compiled once."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def end_headers(self):
        self.send_header("Cache-Control", "max-age=3600")
        super().end_headers()


@contextmanager
def served(folder):
    """Serve a folder on this machine; yield its address."""
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Kept, directory=folder)
    ) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Chromium:
    """A browser that shows one page; `requests` and `errors` keep what it asks for and throws."""

    def __init__(self, executable, profile):
        their_in, our_out = os.pipe()
        our_in, their_out = os.pipe()
        line = f"exec {executable} {FLAGS} --user-data-dir={shlex.quote(str(profile))} about:blank"
        self._process = subprocess.Popen(
            ["bash", "-c", f"{line} 3<&{their_in} 4>&{their_out}"],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._commands = os.fdopen(our_out, "wb", buffering=0)
        self._replies = os.fdopen(our_in, "rb", buffering=0)
        self._buffer = b""
        self._count = 0
        self._session = ""
        self._loaded = False
        self.requests = []
        self.errors = []
        self._target = ""
        self.fresh()

    def fresh(self):
        """Show an empty page of its own instead of the last one."""
        last, self._session = self._target, ""
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        if last:
            self.call("Target.closeTarget", targetId=last)
        attached = self.call(
            "Target.attachToTarget", targetId=self._target, flatten=True
        )
        self._session = attached["sessionId"]
        self.requests.clear()
        self.errors.clear()
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Send one command of the DevTools protocol and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._count:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']['message']}")
                return reply["result"]

    def open(self, url):
        """Load a page and wait until it and its formulas are done."""
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._receive()
        self.run("window.MathJax?.startup?.promise ?? null")

    def run(self, script):
        """Evaluate JavaScript in the page, wait for its promise, return its value."""
        options = {"awaitPromise": True, "returnByValue": True}
        result = self.call("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def resize(self, width, height):
        """Set the size of the page in CSS pixels."""
        size = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def printed(self):
        """Number of sheets of A4 that the page takes in print."""
        options = {"preferCSSPageSize": True, "printBackground": True}
        content = base64.b64decode(self.call("Page.printToPDF", **options)["data"])
        return len(re.findall(rb"/Type\s*/Page\b", content))

    def violations(self):
        """What axe-core finds critical or serious in the page: rule and first place."""
        # For the script it carries.
        package = importlib.util.find_spec("axe_playwright_python")
        self.run(
            f"{Path(package.origin).with_name('axe.min.js').read_text('utf-8')}; null"
        )
        options = {"resultTypes": ["violations"], "runOnly": RULES, "rules": MORE}
        # No style sheet: a page that lies in a file may not ask for one.
        how = json.dumps(options | {"preload": {"assets": ["media"]}})
        found = self.run(f"axe.run(document, {how}).then(all => all.violations)")
        return [
            f"{one['id']} at {one['nodes'][0]['target'][0]}"
            for one in found
            if one["impact"] in ("critical", "serious")
        ]

    def close(self):
        """End the browser."""
        self._commands.close()
        self._replies.close()
        self._process.kill()  # asked to end, it takes seconds
        self._process.wait(timeout=10)

    def _receive(self):
        while b"\0" not in self._buffer:
            chunk = self._replies.read(1 << 20)
            if not chunk:
                raise RuntimeError("Chromium ended")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"])
        elif message.get("method") == "Runtime.consoleAPICalled":
            told = message["params"]
            if told["type"] == "error":
                words = [str(part.get("value", "")) for part in told["args"]]
                self.errors.append({"text": " ".join(words)})
        elif message.get("method") == "Log.entryAdded":
            told = message["params"]["entry"]
            if told["level"] == "error":
                self.errors.append({"text": f"{told['text']} {told.get('url', '')}"})
        elif message.get("method") == "Page.loadEventFired":
            self._loaded = True
        return message
