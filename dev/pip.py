#!/usr/bin/env python3
"""pip.py FOLDER WORD ...: does the same as `pip install WORD ...` in the virtual environment FOLDER, and makes the
environment if it does not exist.

It uses uv, which takes a twentieth of pip's CPU time. uv is in a separate environment, build/uv, together with a pip that
takes over if uv is unavailable or fails. Neither compiles modules: Python compiles them when they are imported.
"""
import ast
import fcntl
import os
import pathlib
import subprocess
import sys

from interpreter import interpreter

TOOLS = pathlib.Path(__file__).resolve().parents[1] / "build/uv"
PIP = [TOOLS / "bin/python3", "-m", "pip", "--disable-pip-version-check"]
# uv does not read pip's configuration: pip's setting -> uv's variable.
SAME = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS", "cert": "SSL_CERT_FILE", "constraint": "UV_CONSTRAINT",
        "default-timeout": "UV_HTTP_TIMEOUT"}


def tools_make():
    """Makes the environment with pip and, if pip can install it, uv. Remakes a half-made one; one process at a time does so."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    with open(TOOLS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (TOOLS / "made").exists():
            subprocess.run(["python3", "-m", "venv", "--clear", TOOLS], check=True)
            subprocess.run([*PIP, "install", "--quiet", "--no-compile", "uv"])
            (TOOLS / "made").touch()


def pip_settings():
    told = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
    pairs = (line.split("=", 1) for line in told.splitlines())
    return {name.rpartition(".")[2]: ast.literal_eval(value) for name, value in pairs}


def uv_environment():
    """Makes uv behave like pip: it installs the newest version of any index, and keeps nothing outside the checkout."""
    variables = {SAME[name]: " ".join(value.split()) for name, value in pip_settings().items() if name in SAME}
    if "UV_FIND_LINKS" in variables:
        variables["UV_FIND_LINKS"] = variables["UV_FIND_LINKS"].replace(" ", ",")
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_CACHE_DIR": str(TOOLS / "cache"), **variables, **os.environ}


def install(python, words):
    """Returns an exit code."""
    if (TOOLS / "bin/uv").exists():
        done = subprocess.run([TOOLS / "bin/uv", "pip", "install", "--quiet", "--python", python, *words], env=uv_environment())
        if done.returncode == 0:
            return 0
        print("uv cannot: pip tries", file=sys.stderr)
    return subprocess.run([*PIP, "--python", python, "install", "--quiet", "--no-compile", *words]).returncode


def environment_make(folder):
    """Makes an environment that rarely collects garbage. Programs that import much and end soon, as tests do, would spend a
    fifth of their import time on it."""
    subprocess.run([interpreter(), "-m", "venv", "--without-pip", folder], check=True)
    for site in folder.glob("lib/python3*/site-packages"):
        (site / "rarely_collect.pth").write_text("import atexit, gc; gc.set_threshold(100000, 50, 100); atexit.register(gc.freeze)\n")


def main(folder, *words):
    tools_make()
    folder = pathlib.Path(folder).resolve()
    python = folder / "bin/python3"
    if not python.exists():
        environment_make(folder)
    return install(python, words)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
