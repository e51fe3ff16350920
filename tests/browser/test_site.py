"""The built site in a browser: every page, both themes, a phone, search, and six pictures to look at."""
import functools, http.server, json, re, subprocess, sys, threading
from pathlib import Path

import pytest
from chrome import wait_for

READY = "return document.readyState == 'complete' && [...document.images].every(i => i.complete)"

PAGE = r"""
const main = document.querySelector('main'), all = (css, e = main) => [...e.querySelectorAll(css)];
const text = main.cloneNode(true);
all('pre, code, script, style, annotation, .katex', text).forEach(e => e.remove());
return {
  title: document.title, heading: document.querySelector('h1')?.textContent.trim() || '',
  description: document.querySelector('meta[name=description]')?.content || '',
  figures: all('figure:has(img, svg)').length,
  unloaded: all('img').filter(i => !i.naturalWidth).map(i => i.alt || i.src.slice(0, 60)),
  silent: all('img').filter(i => !i.alt).length,
  formulas: all('.math').length,
  raw: all('.math').filter(e => !e.querySelector('.katex')).map(e => e.textContent.slice(0, 60)),
  broken: all('.katex-error').map(e => e.title || e.textContent.slice(0, 60)),
  left: (text.textContent.match(/.{0,20}(\$\$|\\\(|\\\[|\\tag|\{target=|:::).{0,20}/g) || []),
};
"""

# Text that one can hardly see: WCAG's contrast of each element's own text to what lies behind it
FAINT = """
const rgb = s => { const n = (s.match(/[\\d.]+/g) || []).map(Number); return s.startsWith('color(srgb') ? [255*n[0], 255*n[1], 255*n[2], n[3] ?? 1] : [n[0], n[1], n[2], n[3] ?? 1]; };
const over = (a, b) => [0, 1, 2].map(i => a[i]*a[3] + b[i]*(1 - a[3])).concat(1);
const behind = e => { const s = []; for (; e; e = e.parentElement) s.push(rgb(getComputedStyle(e).backgroundColor));
                      return s.reverse().reduce((b, a) => over(a, b), [255, 255, 255, 1]); };
const light = c => { const [r, g, b] = c.map(v => v/255).map(v => v <= .04045 ? v/12.92 : ((v + .055)/1.055)**2.4); return .2126*r + .7152*g + .0722*b; };
const seen = {};
for (const e of document.querySelectorAll('body *')) {
  const text = [...e.childNodes].filter(n => n.nodeType == 3).map(n => n.data.trim()).join(' ').trim();
  if (!text || !e.checkVisibility({opacityProperty: true, visibilityProperty: true}) || e.closest('svg, .katex-mathml, .anchorjs-link')) continue;
  const back = behind(e), front = over(rgb(getComputedStyle(e).color), back);
  const [a, b] = [light(front), light(back)].sort((x, y) => y - x), ratio = (a + .05)/(b + .05);
  if (ratio < arguments[0]) seen[`${e.tagName.toLowerCase()}.${e.className} ${ratio.toFixed(2)}`] ??= text.slice(0, 40);
}
return seen;
"""

# What reaches beyond the right edge, though not inside a box that scrolls by itself
WIDE = """
const inside = e => { for (e = e.parentElement; e && e != document.body; e = e.parentElement)
                        if (['auto', 'scroll'].includes(getComputedStyle(e).overflowX)) return true; };
const under = d => { const tag = d.querySelector('.tag'), parts = [...d.querySelectorAll('.katex-html > .base')].map(b => b.getBoundingClientRect().right);
                     return tag && Math.max(...parts) > tag.lastElementChild.getBoundingClientRect().left + 1; };
return {width: document.documentElement.scrollWidth,
        under: [...document.querySelectorAll('.katex-display')].filter(under).map(d => d.querySelector('annotation').textContent.slice(0, 60)),
        wide: [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > arguments[0] + 1
                && !e.closest('.katex-mathml, svg *') && !inside(e))
              .slice(0, 5).map(e => `${e.tagName.toLowerCase()}.${e.className}: ${e.textContent.trim().slice(0, 50)}`)};
"""
# Is the page dark? null while the code's colours still wait for smalldocs to notice
DARK = """
const [r, g, b] = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number), dark = r + g + b < 384;
return document.documentElement.classList.contains('quarto-dark') == dark ? dark : null;
"""

class Handler(http.server.SimpleHTTPRequestHandler):
    missing = []
    def log_message(self, *a): pass
    def send_error(self, code, *a):
        if self.path != "/favicon.ico": self.missing.append(f"{code} {self.path}")
        self.send_response(204) if self.path == "/favicon.ico" else super().send_error(code, *a)
        if self.path == "/favicon.ico": self.end_headers()

@pytest.fixture(scope="module")
def docs(tree, request):
    "The site, built from the copy"
    if given := request.config.getoption("--site"): return Path(given).resolve()
    katex = (k := request.config.getoption("--katex")) and Path(k).resolve()
    p = subprocess.run([sys.executable, ".ci/site.py", *([katex] if katex else [])], cwd=tree,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert p.returncode == 0, p.stdout
    return tree/"_docs"

@pytest.fixture(scope="module")
def site(docs):
    "Its address"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=docs))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()

@pytest.fixture
def desk(browser):
    browser.size(1280, 900)
    browser.prefers("light")
    yield browser
    browser.js("localStorage.clear()")

def captions(tree):
    "How many figures with a caption each page should show"
    res = {}
    for f in (tree/"nbs").glob("*.ipynb"):
        cells = ["".join(c["source"]) for c in json.loads(f.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
        res[re.sub(r"^\d+\w*?_", "", f.stem)] = sum("#| fig-cap:" in c and "#| hide" not in c for c in cells)
    return res

def test_every_page(docs, site, tree, desk):
    figures, titles, wrong = captions(tree), {}, {}
    pages = sorted(docs.rglob("*.html"))
    assert pages
    for f in pages:
        name = f.relative_to(docs).with_suffix("").as_posix()
        desk.size(1280, 900)
        desk.open(f"{site}/{name}.html", READY)
        p, bad = desk.js(PAGE), []
        if not p["heading"] or not p["title"].startswith(p["heading"].removesuffix("#")): bad.append(f"title {p['title']!r}, heading {p['heading']!r}")
        if p["title"] in titles: bad.append(f"the same title as {titles[p['title']]}")
        titles[p["title"]] = name
        if not p["description"]: bad.append("no description")
        if p["figures"] < figures.get(name, 0): bad.append(f"{p['figures']} figures, the notebook has {figures[name]}")
        if p["unloaded"]: bad.append(f"not loaded: {p['unloaded']}")
        if p["silent"]: bad.append(f"{p['silent']} pictures without an alternative text")
        if p["raw"] or p["broken"]: bad.append(f"of {p['formulas']} formulas not rendered: {p['raw'] + p['broken']}")
        if p["left"]: bad.append(f"markup left in the text: {p['left'][:5]}")
        for theme in ("light", "dark"):
            if theme == "dark": desk.js("document.querySelector('.quarto-color-scheme-toggle').click()")
            wait_for(lambda: desk.js(DARK) == (theme == "dark"), 20, f"the {theme} theme")
            faint = desk.js(FAINT, 4.5)
            if faint: bad.append(f"hardly to be read in {theme}: {faint}")
        for width, phone in ((1280, False), (390, True)):
            desk.size(width, 844, phone)
            w = desk.js(WIDE, width)
            if w["width"] > width or w["wide"]: bad.append(f"{w['width']} px wide in a window of {width}: {w['wide']}")
            if w["under"]: bad.append(f"formulas under their numbers in a window of {width}: {w['under']}")
        desk.js("localStorage.clear()")
        bad += desk.console()
        if bad:
            wrong[name] = bad
            desk.shot(f"failed-{name.replace('/', '-')}")
    assert not wrong, "\n".join(f"{page}: {b}" for page, bad in wrong.items() for b in bad)
    assert not Handler.missing

def test_search_finds_the_ring_buffer(site, desk):
    desk.open(f"{site}/index.html", READY)
    box = desk.driver.find_element("css selector", ".smalldocs-search input")
    box.send_keys("ring buffer")
    found = wait_for(lambda: desk.js("return [...document.querySelectorAll('.search-result')].map(a => a.getAttribute('href'))"),
                     30, "results")
    assert found[0].removeprefix("./").startswith("ring.html"), found
    faint = desk.js(FAINT, 4.5)
    assert not faint, f"hardly to be read: {faint}"
    desk.shot("7-search")
    desk.driver.find_element("css selector", ".search-result[href*='ring.html']").click()
    wait_for(lambda: "ring.html" in desk.driver.current_url and desk.js(READY), 30, "the page that was found")

def test_theme_is_kept_and_follows_the_system(site, desk):
    desk.open(f"{site}/index.html", READY)
    wait_for(lambda: desk.js(DARK) is False, 20, "light")
    desk.driver.find_element("css selector", ".quarto-color-scheme-toggle").click()
    wait_for(lambda: desk.js(DARK), 20, "dark")
    desk.open(f"{site}/ring.html", READY)
    wait_for(lambda: desk.js(DARK), 20, "dark: the next page forgot the choice")
    desk.js("localStorage.clear()")
    desk.prefers("dark")
    desk.open(f"{site}/index.html", READY)
    wait_for(lambda: desk.js(DARK), 20, "dark: a reader whose system is dark gets a light page")

def test_menu_on_a_phone(site, desk):
    desk.size(390, 844, phone=True)
    desk.open(f"{site}/index.html", READY)
    desk.driver.find_element("css selector", ".quarto-btn-toggle").click()
    link = desk.driver.find_element("css selector", "#quarto-sidebar a[href$='ring.html']")
    wait_for(lambda: link.is_displayed() and 0 <= link.rect["x"] < 390, 20, "the menu")
    desk.shot("8-phone-menu")
    link.click()
    wait_for(lambda: "ring.html" in desk.driver.current_url, 30, "the page")

@pytest.mark.parametrize("page", ["ring", "growth"])
def test_a_slider_changes_the_picture(site, desk, page):
    from selenium.webdriver.common.keys import Keys
    desk.open(f"{site}/{page}.html", READY)
    now = lambda: desk.js("""const f = document.querySelector('figure:has([data-steps])'), i = f.querySelector('img');
        return [i.src, i.naturalWidth, f.querySelector('[data-steps] > span').textContent, i.alt,
                f.querySelector('input').getAttribute('aria-valuetext')]""")
    still, slider = now(), desk.driver.find_element("css selector", "figure [data-steps] input[type=range]")
    assert slider.accessible_name == "token" and still[2] == "12 of 12" and len(still[3]) > 100
    seen = []
    for key in (Keys.HOME, Keys.ARROW_RIGHT, Keys.END):
        slider.send_keys(key)
        wait_for(lambda: desk.js(READY), 20, "the picture")
        seen.append(now())
    assert [s[2] for s in seen] == ["1 of 12", "2 of 12", "12 of 12"] and seen[0][4].startswith("Token 1 ")
    assert seen[2][0] == still[0] and len({s[0] for s in seen}) == 3 and {s[1] for s in seen} == {still[1]}
    assert all(s[3] == s[4] for s in seen) and not desk.console()
    for width, theme in ((1280, "light"), (390, "dark")):
        desk.size(width, 844, phone=width < 500)
        desk.prefers(theme)
        desk.open(f"{site}/{page}.html", READY)
        desk.js("document.querySelector('figure:has([data-steps])').scrollIntoView({block: 'center', behavior: 'instant'})")
        desk.shot(f"10-slider-{page}-{theme}")

def test_pictures_to_look_at(docs, site, desk):
    "Six pages in build/screenshots: whoever changes the looks of the site looks at these"
    results = "results" if (docs/"results.html").exists() else "bench"
    for name, page, at, dark, phone in (
            ("1-front", "index", None, False, False), ("2-derivation", "ring", "main .katex-display", False, False),
            ("3-figure", "memory", "main figure", False, False), ("4-results", results, "main figure", False, False),
            ("5-dark", "cache", "main figure", True, False), ("6-phone", "ring", "main .katex-display", False, True)):
        desk.size(*((390, 844) if phone else (1280, 900)), phone=phone)
        desk.prefers("dark" if dark else "light")
        desk.open(f"{site}/{page}.html", READY)
        if at: desk.js("document.querySelector(arguments[0]).scrollIntoView({block: 'center', behavior: 'instant'})", at)
        desk.shot(name)
