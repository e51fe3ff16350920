"""Headless Chromium, driven by selenium."""
import os, shutil, socket, time
from pathlib import Path

import pytest

SHOTS = Path(__file__).resolve().parents[2]/"build"/"screenshots"

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]

def wait_for(ask, seconds, what, every=0.3):
    "Ask until the answer is true, and return it"
    end = time.monotonic() + seconds
    while not (answer := ask()):
        if time.monotonic() > end: pytest.fail(f"after {seconds} s still waiting for {what}")
        time.sleep(every)
    return answer


class Browser:
    "Headless Chromium that reaches nothing outside this machine"
    def __init__(self, profile):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
        path = lambda *names: next((p for n in names if (p := shutil.which(n))), None)
        o = webdriver.ChromeOptions()
        o.binary_location = path("chromium", "chromium-browser", "google-chrome", "chrome") or ""
        driver = path("chromedriver", os.path.join(os.environ.get("CHROMEWEBDRIVER", "."), "chromedriver"))
        for a in ("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
                  "disable-dev-shm-usage", "disable-background-networking", "disable-component-update",
                  "force-color-profile=srgb", f"user-data-dir={profile}", "window-size=1280,900",
                  "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"): o.add_argument(f"--{a}")
        o.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=o, service=Service(driver) if driver else None)  # None: selenium looks for them
        self.driver.set_page_load_timeout(120)
        self.driver.set_script_timeout(120)

    def open(self, url, ready="return document.readyState == 'complete'"):
        self.console()  # what the page before said is not this one's
        self.driver.get(url)
        wait_for(lambda: self.js(ready), 120, f"{url} to load")

    def js(self, code, *args): return self.driver.execute_script(code, *args)

    def size(self, width, height, phone=False):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", dict(
            width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone))

    def prefers(self, scheme):
        "The colours that the reader's system asks for, `light` or `dark`; no transitions, or we look too early"
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=[
            dict(name="prefers-color-scheme", value=scheme), dict(name="prefers-reduced-motion", value="reduce")]))

    def console(self):
        "The errors on the console since the last call, extensions of the page's own making included"
        return [e["message"] for e in self.driver.get_log("browser") if e["level"] == "SEVERE"]

    def shot(self, name):
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(SHOTS/f"{name}.png"))

    def quit(self): self.driver.quit()
