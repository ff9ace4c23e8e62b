#!/usr/bin/env python3
"""Makes the site, or the manual pages, with Sphinx. `make docs` runs it with the Python of build/sphinx.

  docs/sphinx/make.py html OUT [COMMAND]    the site at OUT/html/latest; without COMMAND it lacks the command's pages
  docs/sphinx/make.py html OUT COMMAND --release    the site of a released version at OUT/html/VERSION, which stays as it is
  docs/sphinx/make.py man OUT COMMAND       manual pages: OUT/man1 from COMMAND, OUT/man3 from the headers

OUT/html has a folder for each version, versions.json, which lists them, and index.html, which leads to the latest.

Sphinx reads pages below one folder. This program makes that folder anew below OUT/html-work or OUT/man-work. It contains copies
of the pages that people write (docs/, README.md and others), and generated pages: the manual from the public headers
(header_pages.py), pages of the commands from their help texts (command_pages.py), examples with their source, tables and plots
of docs/figures. Any error causes exit code 1: a warning of Sphinx, such as a dead link, or a declaration without a text."""
import json
import os
import pathlib
import re
import shutil
import sys

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parent.parent
sys.path[:0] = [str(HERE), str(TOP / "bench")]

import command_pages  # noqa: E402
import python_pages  # noqa: E402
import rest  # noqa: E402

HEADERS = "include/shoal/*.h"
WRITTEN = ("CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "docs/decisions/*.md", "docs/figures/*.md", "examples/**/README.md",
           "python/smdistributed/README.md")
PICTURES = "docs/pictures"
PLOTS = ("docs/figures/*.svg",)
NOTEBOOKS = "examples/notebooks/*.ipynb"
SHOWN = ("examples/*.c", "examples/**/*.[ch]", "examples/**/*.py")
# Pages of docs/ in reading order. Each page is in one of these lists.
START = ["docs/quick-start", "docs/coming-from", "docs/model-parallel", "docs/launching", "docs/glance", "docs/how-fast", "docs/support",
         "docs/not-planned"]
GUIDES = ["docs/python", "docs/tensorflow", "docs/horovod", "python/smdistributed/README", "docs/torch-sagemaker", "docs/jobs", "docs/gradients", "docs/shards", "docs/checkpoints", "docs/pipelines", "docs/which-parallelism", "docs/make-it-fit", "docs/advice", "docs/batch-size", "docs/outer", "docs/gpu", "docs/threads", "docs/adapters", "docs/shrink",
          "docs/errors", "docs/trace", "docs/performance"]
CONTRIBUTORS = ["docs/architecture", "docs/algorithms", "docs/link", "docs/glossary", "docs/style", "docs/testing", "docs/tested-by", "docs/releasing"]
FIGURES = {"hosts": "Between hosts", "torch-hosts": "From PyTorch, between hosts", "torch": "From PyTorch",
           "launch": "Starting and ending a job", "": "One host"}
LATEST = 1 << 30  # in the order of versions
FRONT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Shoal</title><meta http-equiv="refresh" content="0; url=latest/index.html">
<a href="latest/index.html">The latest version of this manual</a></html>
"""


class Source:
    """The folder that Sphinx reads."""

    def __init__(self, folder):
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = folder
        folder.mkdir(parents=True)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def copy(self, path):
        self.write(path.relative_to(TOP), shown(path.read_text()))


def shown(text):
    """Returns a page whose pictures follow the site's switch of colors. A <picture> follows the browser's setting instead."""
    images = r'<img class="only-dark" src="\1" alt="\3"><img class="only-light" src="\2" alt="\3">'
    return re.sub(r'<picture>\s*<source [^>]*srcset="([^"]*)">\s*<img src="([^"]*)" alt="([^"]*)">\s*</picture>',
                  f'<div class="picture">{images}</div>', text)


def found(*patterns):
    return list(dict.fromkeys(path for pattern in patterns for path in sorted(TOP.glob(pattern))))


def name_of(path):
    return path.relative_to(TOP).as_posix().removesuffix(".md")


# ---- Generated pages --------------------------------------------------------------------------------------------------------

def example_page(path):
    name = path.relative_to(TOP).as_posix()
    return "\n".join([*rest.heading(name, "="), f".. literalinclude:: {path.name}", f"   :language: {'python' if path.suffix == '.py' else 'c'}", ""])


def notebook_page(path):
    """Returns the cells of a notebook as a page: its texts, and its programs as blocks."""
    cells = json.loads(path.read_text())["cells"]
    forms = {"markdown": "{}", "code": "```python\n{}\n```"}
    return "\n\n".join(forms[cell["cell_type"]].format("".join(cell["source"])) for cell in cells) + "\n"


def figures_pages(source):
    """Writes a page for each family of suites, with tables and plots made from the records."""
    import bench_report
    folder, names = TOP / "docs/figures", {title: [] for title in FIGURES.values()}
    for path in sorted(folder.glob("bench-*.jsonl")):
        suite = path.stem.removeprefix("bench-")
        names[next(title for prefix, title in FIGURES.items() if f"{suite}-".startswith(f"{prefix}-") or not prefix)].append(suite)
    for prefix, title in FIGURES.items():
        out = ["---", "nosearch: true", "---", f"# {title}", ""]
        for suite in names[title]:
            record = bench_report.record_read(folder, suite)
            source.write(f"docs/figures/plots/{suite}.svg", bench_report.plot(record))
            out += [re.sub("^### ", "## ", bench_report.markdown(record)), f"![{suite}](plots/{suite}.svg)", ""]
        source.write(f"docs/figures/{prefix or 'two'}.md", "\n".join(out))
    return [f"{prefix or 'two'}" for prefix in reversed(FIGURES)]


def list_page(source, name, title, entries):
    """Lists pages that are too many for the list on every page. The list is not a tree, because a tree would also take time."""
    source.write(f"{name}.rst", "\n".join([*rest.heading(title, "="), *(f"- :doc:`{entry}`" for entry in entries), ""]))


def index_page(commands, manuals, pythons):
    """Returns README.md with the list of pages in a reader's order: first steps, reference, internals."""
    examples = [path.relative_to(TOP).as_posix() for path in found("examples/*.c", "examples/fashion_mnist/fashion_mnist.c")]
    examples += [*map(name_of, found("examples/**/README.md", NOTEBOOKS)), "examples/index"]
    groups = {"Start": START, "Guides": GUIDES, "Examples": examples,
              "C manual": [*manuals, "genindex"], "Python manual": pythons, "Commands": [f"commands/{name}" for name in commands],
              "For contributors": [*CONTRIBUTORS, "docs/decisions/index", "docs/figures/index", "CHANGELOG", "CONTRIBUTING"]}
    missing = {name_of(path) for path in found("docs/*.md")} - {*START, *GUIDES, *CONTRIBUTORS}
    if missing:
        raise command_pages.Wrong(f"docs/sphinx/make.py: in which list is {', '.join(sorted(missing))}?")
    out = [shown((TOP / "README.md").read_text())]
    for caption, names in groups.items():
        out += ["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""] if names else []
    return "\n".join(out)


# ---- The whole --------------------------------------------------------------------------------------------------------------

def commands_write(source, command):
    pages, settings, manuals = command_pages.pages_of(command) if command else ({}, set(), [])
    for name, text in pages.items():
        source.write(f"commands/{name}.rst", text)
    return list(pages), settings, [(f"commands/{page}", name, summary, "", "1") for page, name, summary in manuals]


def header_write(source, out, settings, has_pages):
    """Returns (roles of names, manual pages, their aliases, errors)."""
    import header_pages
    headers = sorted(found(HEADERS), key=lambda path: path.stem != "shoal")  # shoal.h first
    pages, roles, manuals, wrong = header_pages.pages_of(headers, out, settings, has_pages)
    for name, text in pages.items():
        source.write(f"{name}.rst", text)
    listed = set(re.findall(r"^\s+(shoal_\w+);", (TOP / "src/shoal.map").read_text(), re.M))
    wrong += [f"src/shoal.map: {name} has no place in the manual: declare it in a public header"
              for name in sorted(listed - {name for name, role in roles.items() if role == "func"})]
    aliases = {function: name for _, name, _, functions in manuals for function in functions}
    return roles, [(page, name, summary, "", "3") for page, name, summary, _ in manuals], aliases, wrong


def site_write(source, commands, manuals):
    for path in found(*WRITTEN, *PLOTS, *SHOWN):
        source.copy(path)
    for path in found(*SHOWN):
        source.write(f"{path.relative_to(TOP).as_posix()}.rst", example_page(path))
    for path in found(NOTEBOOKS):
        source.write(f"{path.relative_to(TOP).as_posix()}.md", notebook_page(path))
    list_page(source, "examples/index", "All files", [f"/{path.relative_to(TOP).as_posix()}" for path in found(*SHOWN)])
    list_page(source, "docs/decisions/index", "Decisions", [path.stem for path in found("docs/decisions/*.md")])
    list_page(source, "docs/figures/index", "Figures", [*figures_pages(source), *(path.stem for path in found("docs/figures/*.md"))])
    pythons = python_pages.pages_of(TOP) if (TOP / "python").exists() else {}
    for name, text in pythons.items():
        source.write(f"{name}.rst", text)
    source.write("index.md", index_page(commands, manuals, list(pythons)))


def aliases_write(folder, aliases):
    """Writes a page for each function that refers to its section's page, in the way of manual pages."""
    for function, name in aliases.items():
        (folder / f"{function}.3").write_text(f".so man3/{name}.3\n")


def sphinx(kind, work, out):
    from sphinx.cmd.build import main
    os.environ["SHOAL_PAGES"] = str(work / "pages.json")
    return main(["-q", "-W", "--keep-going", "-n", "-b", kind, "-c", str(HERE), "-d", str(work / "doctrees"), str(work / "source"),
                 str(out)])


def make(kind, out, command, folder):
    work, made = out / f"{kind}-work", out / "html" / folder if kind == "html" else out
    shutil.rmtree(work, ignore_errors=True)
    source = Source(work / "source")
    commands, settings, manuals = commands_write(source, command)
    roles, more, aliases, wrong = header_write(source, work, settings, kind == "html")
    if kind == "html":
        site_write(source, commands, [page for page, *_ in more if page.endswith("/index")])
    else:
        list_page(source, "index", "Shoal", [page for page, *_ in (*manuals, *more)])
    (work / "pages.json").write_text(json.dumps({"roles": roles, "manuals": manuals + more, "folder": folder}))
    for old in (made,) if kind == "html" else (out / "man1", out / "man3"):
        shutil.rmtree(old, ignore_errors=True)
    code = sphinx(kind, work, made)
    if kind == "html":  # pages name them in HTML of their own, because they differ between light and dark pages
        shutil.copytree(TOP / PICTURES, made / PICTURES, dirs_exist_ok=True)
        versions_write(out / "html")
    if kind == "man":
        aliases_write(out / "man3", aliases)
    print("".join(f"{line}\n" for line in wrong), end="", file=sys.stderr)
    return 1 if code or wrong else 0


def version():
    return re.search(r"version: '([\d.]+)'", (TOP / "meson.build").read_text())[1]


def versions_of(site):
    """Returns what a page needs to link to the same page of each version: the folder, its title, its pages. Newest first."""
    folders = [path.parent for path in site.glob("*/objects.inv")]
    folders.sort(key=lambda path: [int(word) for word in re.findall(r"\d+", path.name)] or [LATEST], reverse=True)
    return [{"folder": path.name, "title": path.name,
             "pages": sorted(page.relative_to(path).as_posix() for page in path.rglob("*.html"))} for path in folders]


def versions_write(site):
    """Lists the versions twice: as JSON for programs, and as a script for pages, which may not read JSON when they are opened
    as files."""
    text = json.dumps(versions_of(site))
    (site / "versions.json").write_text(text + "\n")
    (site / "versions.js").write_text(f"window.shoalVersions = {text};\n")
    (site / "index.html").write_text(FRONT)


def former_remove(site):
    """Removes a site of the former layout, which had one version and no folder for it."""
    if (site / "objects.inv").exists():
        shutil.rmtree(site)


def why_not(kind, out, folder):
    """Returns the obstacle, or None."""
    if out.exists() and not out.is_dir():
        return f"{out} is no folder"
    site = out / "html"
    if kind == "html" and site.exists() and not any((site / name).exists() for name in ("versions.json", "objects.inv")):
        return f"{site} holds other things than this site: name another folder, or empty it"
    if kind == "html" and folder != "latest" and (site / folder).exists():
        return f"{site / folder} is there, and the pages of a released version stay as they are: remove it to make it again"
    return None


def main():
    words = [word for word in sys.argv[1:] if word != "--release"]
    folder = version() if "--release" in sys.argv[1:] else "latest"
    if len(words) not in (2, 3) or words[0] not in ("html", "man") or (words[0] == "man" and len(words) < 3):
        print(__doc__)
        return 0 if words == ["--help"] else 2
    out = pathlib.Path(words[1]).resolve()
    why = why_not(words[0], out, folder)
    if why:
        print(f"make.py: {why}", file=sys.stderr)
        return 2
    former_remove(out / "html")
    try:
        return make(words[0], out, words[2] if len(words) == 3 else None, folder)
    except command_pages.Wrong as wrong:
        why, code = str(wrong), 1
    except ModuleNotFoundError as missing:
        why, code = f"no {missing.name} here: `make docs` puts it at build/sphinx, and runs this by the Python there", 2
    print(f"make.py: {why}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
