"""Write the front page's part of README.md, and its picture, from nbs/index.ipynb with its saved outputs.

    readme.py            write README.md and the picture
    readme.py --check    change nothing, and fail where one of them is not what the notebook gives

What stands in README.md below the second marker is written by hand.
"""
import base64, json, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = "nbs/images/front.png"
BEGIN = "<!-- Made from nbs/index.ipynb by .ci/readme.py, down to the next line like this: edit the notebook. -->\n"
END = "<!-- From here on written by hand. -->\n"

def option(src, name):
    "The text of an option such as `#| fig-cap: \"...\"`, or an empty one"
    m = re.search(rf'^#\| {name}: "(.*)"$', src, re.M)
    return m[1] if m else ""

def output(out, src):
    "An output of the cell `src` as Markdown, and the picture in it, if there is one"
    data = {k: "".join(v) for k, v in out.get("data", {}).items()}
    if "image/png" in data:
        return f"![{option(src, 'fig-alt')}]({PICTURE})\n\n*{option(src, 'fig-cap')}*", base64.b64decode(data["image/png"])
    if "text/markdown" in data: return data["text/markdown"], None
    return "```\n" + ("".join(out.get("text", "")) or data["text/plain"]).rstrip() + "\n```", None

def page(nb):
    "The front page as Markdown, and the bytes of its picture"
    parts, picture = [], b""
    for c in nb["cells"]:
        src = "".join(c["source"])
        if c["cell_type"] == "markdown":
            src = re.sub(r"\]\((\w+\.ipynb)", r"](nbs/\1", src)
            parts.append(re.sub(r"\A(# .*\n\n)> ", r"\1", src))
        elif not src.startswith("#| hide"):
            if "#| echo: false" not in src: parts.append(f"```python\n{src}\n```")
            for o in c["outputs"]:
                said, found = output(o, src)
                parts.append(said)
                picture = found or picture
    return "\n\n".join(parts) + "\n", picture

def made(root=ROOT):
    "What README.md and the picture should be"
    text, picture = page(json.loads((root/"nbs/index.ipynb").read_text(encoding="utf-8")))
    by_hand = (root/"README.md").read_text(encoding="utf-8").partition(END)[2]
    return f"{BEGIN}\n{text}\n{END}{by_hand}", picture

def main(check=False):
    text, picture = made()
    readme, file = ROOT/"README.md", ROOT/PICTURE
    stale = [f.name for f, same in ((readme, readme.read_text(encoding="utf-8") == text),
                                    (file, file.exists() and file.read_bytes() == picture)) if not same]
    if check: sys.exit(f"not what nbs/index.ipynb gives: {', '.join(stale)}; run .ci/readme.py" if stale else 0)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(picture)
    readme.write_text(text, encoding="utf-8")
    print("readme: " + (f"wrote {', '.join(stale)}" if stale else "as it was"))

if __name__ == "__main__": main("--check" in sys.argv[1:])
