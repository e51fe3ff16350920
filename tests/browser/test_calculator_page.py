"""The calculator in a browser: what it shows is what the library says, and its address brings it back."""
import functools, http.server, json, re, threading
from pathlib import Path

import pytest

from gptoss_lite.config import gptoss_502m
from gptoss_lite.memory import kv_cache_bytes, kv_reduction
from gptoss_lite.roofline import A100, H200, tokens_per_second

NB = Path(__file__).resolve().parents[2]/"nbs/calculator.ipynb"

class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *a): pass

@pytest.fixture(scope="module")
def page(tmp_path_factory):
    "The address of a page that holds nothing but the notebook's saved output"
    cells = json.loads(NB.read_text(encoding="utf-8"))["cells"]
    html = next("".join(o["data"]["text/html"]) for c in cells if c["cell_type"] == "code" for o in c["outputs"] if "text/html" in o.get("data", {}))
    folder = tmp_path_factory.mktemp("page")
    (folder/"index.html").write_text(f"<!doctype html><html lang=en><meta charset=utf-8><link rel=icon href=data:,><title>c</title><body>{html}", encoding="utf-8")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/index.html"
    server.shutdown()

def nbytes(text):
    "Bytes that a text names, such as 1.126 GiB"
    number, unit = re.search(r"([\d.]+) (B|[KMGT]iB)\b", text).groups()
    return float(number) * 1024**"BKMGT".index(unit[0])

four_digits = functools.partial(pytest.approx, rel=5e-4)

SHOWN = "return document.querySelector('.kvc-sum').textContent"
FACTS = "return document.querySelector('.kvc ul').textContent"

@pytest.mark.parametrize("T", [1, 127, 129, 4096, 131_072, 3_000_000])
@pytest.mark.parametrize("card, hardware", [("a100", A100), ("h200", H200)])
def test_it_shows_what_the_library_says(browser, page, T, card, hardware):
    cfg = gptoss_502m()
    browser.open(f"{page}?T={T}&card={card}", "return !!document.querySelector('.kvc-sum')")
    shown, facts = browser.js(SHOWN), browser.js(FACTS)
    assert f"{T:,} tokens" in shown and nbytes(shown) == four_digits(kv_cache_bytes(cfg, T))
    if kv_reduction(cfg, T) > 1: assert f"{kv_reduction(cfg, T):.2f} times less" in shown
    speed = float(re.search(r"([\d,.]+) tokens/s", facts)[1].replace(",", ""))
    assert speed == pytest.approx(tokens_per_second(cfg, T, hardware), rel=5e-3)
    rows = browser.js("return [...document.querySelectorAll('.kvc tbody tr')].map(r => r.lastElementChild.textContent)")
    windowed, all_ = kv_cache_bytes(cfg.replace(layer_types=["windowed"]*cfg.n_layers), T)//2, kv_cache_bytes(cfg, T)
    assert [nbytes(r) for r in rows] == four_digits([windowed, all_ - windowed, all_, kv_cache_bytes(cfg, T, full=True)])
    assert not browser.console()

def test_what_is_typed_stands_in_the_address_and_comes_back(browser, page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select
    find = lambda name: browser.driver.find_element(By.ID, f"kvc-{name}")
    browser.open(page)
    Select(find("model")).select_by_value("gemma-3-27b")
    for name, value in (("T", "50000"), ("batch", "3"), ("memory", "24")):
        find(name).clear()
        find(name).send_keys(value)
    address, shown = browser.driver.current_url, browser.js(SHOWN)
    assert all(s in address for s in ("model=gemma-3-27b", "T=50000", "batch=3", "card=own", "memory=24"))
    assert find("layers").get_attribute("value") == "62"
    browser.open(address)
    assert browser.js(SHOWN) == shown and browser.driver.current_url == address
    find("batch").clear()
    find("batch").send_keys("0")
    assert find("batch").get_attribute("aria-invalid") == "true" and find("batch-wrong").text
    assert browser.driver.current_url == address, "an impossible value changes nothing"
    find("slider").send_keys(Keys.ARROW_RIGHT)
    assert browser.driver.current_url != address, "the keyboard moves the slider"
    assert find("T").get_attribute("value") != "50000"
    unnamed = browser.js("return [...document.querySelectorAll('.kvc :is(input, select)')].filter(e => !e.labels.length && !e.ariaLabel).map(e => e.id)")
    assert unnamed == [] and not browser.console()
