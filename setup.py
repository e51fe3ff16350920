"Packaging: everything is read from settings.ini, so that it is said once."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters=["="])
ini.read(here / "settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
readme = here / "README.md"
lib = cfg["lib_path"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    license="Apache-2.0",
    url=cfg["git_url"],
    keywords=cfg["keywords"].split(),
    packages=find_packages(include=[lib, lib + ".*"]),
    package_data={lib: ["checkpoints/*", "py.typed"]},  # without this line the wheel lacks them
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={"dev": cfg["dev_requirements"].split()},
    entry_points={
        # nbdev finds the symbol index of an installed package by this entry: it makes the links in the docs
        "nbdev": [f"{lib}={lib}._modidx:d"],
        "console_scripts": [f"gptoss-lite={lib}.cli:main"],
    },
    zip_safe=False,
)
