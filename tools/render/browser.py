"""用 DevTools 协议驱动无头 Chromium，只靠标准库。

Drive a headless Chromium over the DevTools protocol with the standard library only.
"""
from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

FLAGS = ("--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
         "--disable-sync --disable-dev-shm-usage --hide-scrollbars --force-color-profile=srgb --remote-debugging-pipe").split()
INSTALL = "没有找到 Chromium。安装：apt-get install -y chromium（Debian/Ubuntu），或把 chromium/google-chrome 放进 PATH。"


def find_chromium() -> str:
    """PATH 里的 Chromium 或 Chrome；没有就说怎么装。 A Chromium or Chrome on PATH, or how to install one."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if path := shutil.which(name):
            return path
    raise FileNotFoundError(INSTALL)


class Page:
    """一个标签页；`events` 收着浏览器报告的一切。 One tab; `events` keeps all that the browser reports."""

    def __init__(self, to_browser: int, from_browser: int):
        self.out, self.inp, self.buffer, self.serial, self.events, self.session = to_browser, from_browser, b"", 0, [], None

    def _read(self) -> dict:
        while b"\0" not in self.buffer:
            if not select.select([self.inp], [], [], 60)[0]:
                raise TimeoutError("Chromium 60 s 没有答复")
            chunk = os.read(self.inp, 1 << 16)
            if not chunk:
                raise RuntimeError("Chromium 已退出")
            self.buffer += chunk
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def send(self, method: str, **params) -> dict:
        """发一条命令，等它的答复。 Send one command, wait for its answer."""
        self.serial += 1
        message = {"id": self.serial, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data):]
        while True:
            reply = self._read()
            if reply.get("id") == self.serial:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]
            self.events.append(reply)

    def js(self, expression: str):
        """求值；Promise 等到完成。 Evaluate; promises are awaited."""
        result = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description", str(result)))
        return result["result"].get("value")

    def size(self, width: int, height: int = 900, mobile: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def scheme(self, name: str) -> None:
        """系统的明暗偏好。 The system's colour preference."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, url: str, ready: str = "document.readyState === 'complete'", timeout: float = 60) -> None:
        """打开地址，等 ready 成立。 Open an address and wait until `ready` holds."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.wait(f"location.href !== 'about:blank' && document.documentElement && {ready}", timeout)

    def wait(self, condition: str, timeout: float = 30) -> None:
        end = time.time() + timeout
        while not self.js(f"!!({condition})"):
            if time.time() > end:
                raise TimeoutError(condition)
            time.sleep(0.05)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38}.get(key, ord(key[0]))
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, full: bool = False) -> None:
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        Path(path).write_bytes(base64.b64decode(data["data"]))


@contextlib.contextmanager
def browser():
    """开一个断网的无头浏览器，用完连同它的档案一起删掉。

    A headless browser with the network cut, gone with its profile afterwards.
    """
    profile = tempfile.mkdtemp(prefix="book-chromium-")
    (child_in, to_browser), (from_browser, child_out) = os.pipe(), os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (child_in, child_out)]
    process = subprocess.Popen([find_chromium(), *FLAGS, f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "about:blank"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(3, 4),
                               preexec_fn=lambda: (os.dup2(high[0], 3), os.dup2(high[1], 4)))
    for fd in (child_in, child_out, *high):
        os.close(fd)
    try:
        page = Page(to_browser, from_browser)
        target = next(t for t in page.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        page.session = page.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{domain}.enable")
        page.send("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
        yield page
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        os.close(to_browser), os.close(from_browser)
        shutil.rmtree(profile, ignore_errors=True)
