"""What the browser tests share: a copy of the tree, headless Chromium, and pictures in build/screenshots.

`make browser-test` installs what they need and runs them; plain `pytest tests` leaves this folder out.
"""
import re, sys
from pathlib import Path

import pytest
from chrome import SHOTS, Browser

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT/".ci"))
from checks import sources  # noqa: E402

def pytest_addoption(parser):
    parser.addoption("--nb", default="", help="notebooks to run in JupyterLab, such as '04_ring 06_cache'; all without it")
    parser.addoption("--site", help="the folder of a built site; one is built without it")
    parser.addoption("--katex", help="the npm package katex, unpacked: the pages show formulas without a network")

def pytest_generate_tests(metafunc):
    if "notebook" not in metafunc.fixturenames: return
    known = sorted(f.stem for f in (ROOT/"nbs").glob("*.ipynb") if f.name[0] not in "._")
    asked = [Path(n).stem for n in metafunc.config.getoption("--nb").split()]
    for n in asked:
        if n not in known: raise pytest.UsageError(f"there is no nbs/{n}.ipynb")
    metafunc.parametrize("notebook", asked or known)

@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    "A copy of what git holds or would hold: what the notebooks and the site write stays out of the working tree"
    to = tmp_path_factory.mktemp("copy")/"tree"
    sources(to)
    return to

@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    b = Browser(tmp_path_factory.mktemp("profile"))
    yield b
    b.quit()

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    "A picture of the page as it was when a test failed"
    report = yield
    b = getattr(item, "funcargs", {}).get("browser")
    if report.when == "call" and report.failed and b:
        name = "failed-" + re.sub(r"[^\w.-]+", "-", item.name).strip("-")
        try:
            b.shot(name)
            report.sections.append(("screenshot", str(SHOTS/f"{name}.png")))
        except Exception as e: report.sections.append(("screenshot", f"none: {e}"))
    return report

def pytest_sessionstart(session):
    for f in SHOTS.glob("failed-*.png"): f.unlink()
