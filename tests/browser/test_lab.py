"""JupyterLab as a reader meets it: open a notebook, Run All Cells, wait, save, and look at what the file then holds."""
import json, os, subprocess, sys, urllib.request
from pathlib import Path

import pytest
from chrome import free_port, wait_for

LIMIT = 900  # seconds a notebook may take

# The notebook in front: how far its cells are. `run` is the count in a cell's prompt, None before it has run.
CELLS = """
const nb = window.jupyterapp.shell.currentWidget.content;
return nb.widgets.filter(c => c.model.type == 'code' && c.model.sharedModel.getSource().trim()).map(c => ({
  run: c.model.executionCount, error: c.model.outputs.toJSON().some(o => o.output_type == 'error')}));
"""
IDLE = "return window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status == 'idle'"

# What a reader sees: pictures that did not load, formulas that MathJax could not read, a dialog in the way
SEEN = """
const nb = document.querySelector('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook');
return {pictures: [...nb.querySelectorAll('.jp-OutputArea img')].map(i => i.complete && i.naturalWidth > 0),
        sliders: nb.querySelectorAll('.jp-OutputArea [data-steps] input').length,
        maths: nb.querySelectorAll('mjx-container').length,
        broken: [...nb.querySelectorAll('mjx-merror, [data-mjx-error]')].map(e => e.textContent),
        dialog: document.querySelector('.jp-Dialog')?.textContent || ''};
"""

@pytest.fixture(scope="module")
def lab(tree, tmp_path_factory):
    "JupyterLab on the copy, with settings of its own: nobody's hooks, extensions or open tabs"
    home, port = tmp_path_factory.mktemp("jupyter"), free_port()
    (home/"settings").mkdir()
    (home/"settings"/"overrides.json").write_text(json.dumps({
        "@jupyterlab/apputils-extension:notification": dict(fetchNews="false", checkForUpdates=False),
        "@jupyterlab/notebook-extension:tracker": dict(windowingMode="none")}))  # the page holds every cell
    env = {k: v for k, v in os.environ.items() if k not in ("IN_TEST", "MPLBACKEND")}
    env.update(PATH=f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}", PYTHONPATH=str(tree),
               HF_HUB_OFFLINE="1", JUPYTER_CONFIG_DIR=str(home/"config"), JUPYTER_DATA_DIR=str(home/"data"),
               JUPYTER_RUNTIME_DIR=str(home/"run"), IPYTHONDIR=str(home/"ipython"))
    cmd = [sys.executable, "-m", "jupyter", "lab", "nbs", "--no-browser", "--allow-root", "--expose-app-in-browser",
           "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=",
           f"--LabApp.app_settings_dir={home/'settings'}", f"--LabApp.workspaces_dir={home/'workspaces'}"]
    url = f"http://127.0.0.1:{port}"
    def up():
        if p.poll() is not None: pytest.fail(f"JupyterLab ended with {p.returncode}:\n{log.read_text()}")
        try: return urllib.request.urlopen(url + "/api/status", timeout=5)
        except OSError: return False
    log = home/"log"
    with log.open("w") as out: p = subprocess.Popen(cmd, cwd=tree, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_for(up, 180, "JupyterLab to start", every=1)
        yield url
    finally:
        p.terminate()  # the kernels end with the server
        try: p.wait(30)
        except subprocess.TimeoutExpired: p.kill()

def pictures(cell): return [k for o in cell["outputs"] for k in o.get("data", {}) if k.startswith("image/")]

def problems(before, after):
    "What is wrong with a notebook that was run from top to bottom, given what it held before"
    res, last = [], 0
    for i, (b, a) in enumerate(zip(before["cells"], after["cells"], strict=True)):
        if a["cell_type"] != "code" or not "".join(a["source"]).strip(): continue
        where = f"cell {i}: " + "".join(a["source"]).strip().splitlines()[0]
        n = a["execution_count"]
        if n is None: res.append(f"not run: {where}")
        elif n != last + 1: res.append(f"run as number {n}, after {last}: {where}")
        last = n or last
        for o in a["outputs"]:
            if o["output_type"] == "error": res.append(f"{o['ename']}: {o['evalue']}: {where}")
        if len(pictures(a)) < len(pictures(b)): res.append(f"{len(pictures(a))} figures, saved were {len(pictures(b))}: {where}")
        if "#| fig-cap:" in "".join(a["source"]) and not pictures(a): res.append(f"a caption and no figure: {where}")
    return res

def run_all(browser):
    "The menu, as a reader uses it"
    from selenium.webdriver.common.by import By
    find = lambda css, text: next(e for e in browser.driver.find_elements(By.CSS_SELECTOR, css) if e.text.strip() == text)
    find(".lm-MenuBar-itemLabel", "Run").click()
    find(".lm-Menu-itemLabel", "Run All Cells").click()

def test_run_all(notebook, lab, tree, browser):
    file = tree/"nbs"/f"{notebook}.ipynb"
    before = json.loads(file.read_text(encoding="utf-8"))
    browser.open(f"{lab}/lab/tree/{notebook}.ipynb?reset",
                 "return !!window.jupyterapp?.shell?.currentWidget?.content?.widgets?.length")
    wait_for(lambda: browser.js(IDLE), 180, "the kernel")
    run_all(browser)
    def done():
        cells = browser.js(CELLS)
        return any(c["error"] for c in cells) or all(c["run"] for c in cells)
    try: wait_for(lambda: done() and browser.js(IDLE), LIMIT, "the last cell", every=1)
    finally:
        browser.js("return window.jupyterapp.commands.execute('docmanager:save')")
        seen = browser.js(SEEN)
        browser.js("return window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")  # one kernel at a time
    after = json.loads(file.read_text(encoding="utf-8"))
    browser.js("document.querySelector('.jp-OutputArea img')?.scrollIntoView({block: 'center'})")
    if seen["pictures"]: browser.shot("9-jupyterlab")  # the last notebook with a figure
    wrong = problems(before, after)
    assert not wrong, "\n".join(wrong)
    drawn = sum(len(pictures(c)) for c in after["cells"] if c["cell_type"] == "code")
    assert seen["pictures"].count(True) >= drawn and all(seen["pictures"]), f"{drawn} figures, on the page: {seen['pictures']}"
    steps = sum("\nshow_steps(" in "".join(c["source"]) for c in after["cells"] if c["cell_type"] == "code")
    assert seen["sliders"] == steps, f"{seen['sliders']} sliders, the notebook makes {steps}"
    has_maths = any(c["cell_type"] == "markdown" and "$$" in "".join(c["source"]) for c in after["cells"])
    assert seen["maths"] or not has_maths, "MathJax rendered no formula"
    assert not seen["broken"], f"MathJax could not read {seen['broken']}"
    assert not seen["dialog"], f"a dialog is in the way: {seen['dialog']}"
