#!/usr/bin/env python3
"""The pages of `make docs`: complete, in order, without a dead link; and that faults of their sources are told."""
import html
import json
import os
import pathlib
import re
import shutil
import tempfile

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-docs-"))
PAGES = ROOT / "html"
COMMAND = pathlib.Path(os.environ.get("SHOAL_COMMAND", TOP / "build/shoal"))
HEADER = TOP / "include/shoal/shoal.h"


def render(tree=TOP, out=PAGES, env=None):
    if not shutil.which("cmark-gfm"):
        raise Skip("cmark-gfm is not installed")
    return call(tree / "dev/docs.py", out, *([COMMAND] if COMMAND.exists() and tree == TOP else []), env=env)


def manual():
    if not PAGES.exists():
        render()
    return (PAGES / "manual.html").read_text()


def ids():
    return set(re.findall(r' id="(\w+)"', manual()))


def pages_render_without_a_warning():
    code, out, err = render()
    expect(code == 0 and not err and len(out.splitlines()) == 1, code, out, err)
    guides = [path.relative_to(TOP).with_suffix(".html") for path in TOP.glob("docs/**/*.md")]
    for page in ("index.html", "manual.html", "names.html", *guides):
        expect((PAGES / page).is_file(), page)


def every_exported_symbol_has_a_place_and_a_text():
    symbols = re.findall(r"^\s+(shoal_\w+);", (TOP / "src/shoal.map").read_text(), re.M)
    expect(len(symbols) > 30, symbols)
    items = manual().split('<div class="item">')[1:]
    for symbol in symbols:
        own = [item for item in items if f'<b id="{symbol}">' in item]
        expect(len(own) == 1 and "<p>" in own[0].split("<pre>")[0], symbol, own)


def names_are_those_the_compiler_sees():
    if not shutil.which("clang"):
        raise Skip("clang is not installed")
    code, out, err = call("clang", "-x", "c", "-fsyntax-only", "-Xclang", "-ast-dump=json", HEADER)
    expect(code == 0, err)
    seen, todo = set(), [json.loads(out)]
    while todo:
        node = todo.pop()
        todo += node.get("inner", [])
        if node.get("kind") in ("FunctionDecl", "RecordDecl", "EnumDecl", "EnumConstantDecl", "TypedefDecl"):
            seen.add(node.get("name", ""))
    code, out, err = call("clang", "-x", "c", "-dM", "-E", HEADER)
    expect(code == 0, err)
    seen |= set(re.findall(r"^#define (\w+)", out, re.M)) - {"SHOAL_H", "SHOAL_API", "SHOAL_MUST_USE"}
    seen = {name for name in seen if name.lower().startswith("shoal_")}
    found = {name for name in ids() if name.lower().startswith("shoal_")}
    expect(len(seen) > 50 and found == seen, "in one only:", sorted(found ^ seen))


def structs_begin_with_their_macro():
    """Each struct that has struct_bytes has an INIT macro, and it serves C and C++ without a warning."""
    structs = re.findall(r"^struct shoal_(\w+) \{\n\s+size_t struct_bytes;", HEADER.read_text(), re.M)
    expect(len(structs) >= 7, structs)
    lines = [f"    struct shoal_{name} {name} = SHOAL_{name.upper()}_INIT;\n"
             f"    sum += {name}.struct_bytes == sizeof {name};" for name in structs]
    text = "\n".join(["#include <shoal/shoal.h>", "int main(void)", "{", "    int sum = 0;", *lines,
                      f"    return sum - {len(structs)};", "}", ""])
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
    for compiler, standard in (("gcc", "c11"), ("clang", "c11"), ("g++", "c++17"), ("clang++", "c++17")):
        if not shutil.which(compiler):
            continue
        source = ROOT / ("init.c" if standard == "c11" else "init.cpp")
        source.write_text(text)
        code, out, err = call(compiler, f"-std={standard}", *strict, f"-I{TOP}/include", source, "-o", ROOT / "init")
        expect(code == 0 and not err, compiler, err)
        expect(call(ROOT / "init")[0] == 0, compiler, "a macro does not set struct_bytes")


def headers_and_examples_fit_the_columns():
    for path in [HEADER, *TOP.glob("examples/**/*.[ch]"), *TOP.glob("tools/*.[ch]")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            expect(len(line) <= 128, f"{path}:{number} has {len(line)} columns")


def sections_keep_their_order():
    wanted = re.findall(r"^/\* -{4} (\d+\. .*?) -+ \*/", HEADER.read_text(), re.M)
    expect(len(wanted) >= 10 and re.findall(r"<h2[^>]*>(.*?)</h2>", manual()) == wanted, wanted)
    functions = re.findall(r"^SHOAL_API [^;]*?\b(shoal_\w+)\(", HEADER.read_text(), re.M | re.S)
    places = [manual().index(f'<b id="{name}">') for name in functions]
    expect(places == sorted(places), "functions are not in the order of the header")


def no_link_is_dead():
    manual()
    count = 0
    for page in PAGES.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^":]+)"', page.read_text()):
            path, _, place = html.unescape(link).partition("#")
            target = page.parent / path if path else page
            expect(target.is_file(), page, link)
            expect(not place or f' id="{place}"' in target.read_text(), page, link)
            count += 1
    expect(count > 1000, count)


def search_entries():
    text = (PAGES / "search.js").read_text()
    expect(text.startswith("shoalSearch([") and text.endswith("]);\n"), text[:80])
    return json.loads(text[len("shoalSearch("):-len(");\n")])


def commands_settings_and_examples_have_pages():
    manual()
    for source in [path.relative_to(TOP) for path in TOP.glob("examples/*.c")] + ["examples/torch/gpt/train.py"]:
        expect((PAGES / f"{source}.html").is_file(), source)
    expect((PAGES / "examples/torch/gpt/README.html").is_file(), "the README of an example")
    if not COMMAND.exists():
        raise Skip(f"{COMMAND} is not built")
    own, settings = call(COMMAND, "--help")[1], call(COMMAND, "info", "--settings")[1]
    names = re.findall(r"^\s+shoal ([a-z]+)\s{2,}", own, re.M)
    expect(len(names) >= 7, own)
    for name in names:
        page = html.unescape(re.sub(r"<[^>]*>", " ", (PAGES / f"commands/{name}.html").read_text()))
        for option in re.findall(r"^\s+(--[a-z-]+)", call(COMMAND, name, "--help")[1], re.M):
            expect(option in page, f"{option} of shoal {name}")
    page = (PAGES / "commands/settings.html").read_text()
    for name in re.findall(r"^(SHOAL_\w+)", settings, re.M):
        expect(f'<dt id="{name}">' in page, name)


def what_is_read_stands_before_the_list_of_pages():
    """On a phone the list comes below; there are not so many pages in it that none is found."""
    for page in PAGES.rglob("*.html"):
        text = page.read_text()
        expect(text.index('<input type="search"') < text.index("<main>") < text.index('<nav id="pages">'), page)
        links = text[text.index("<nav"):].count("<a ")
        expect(10 < links < 60, page, links)
    lists = (PAGES / "docs/figures/index.html").read_text()
    expect(all(f'href="{path.stem}.html"' in lists for path in TOP.glob("docs/figures/*.md")), "a figure is in no list")


def search_finds_names_and_settings():
    manual()
    places = {}
    for place, name, _, text in search_entries():
        page, _, part = place.partition("#")
        expect((PAGES / page).is_file() and text, place)
        expect(not part or f' id="{part}"' in (PAGES / page).read_text(), place)
        places.setdefault(name, place)
    for name in ("shoal_allreduce", "SHOAL_ERR_TIMEOUT", "How fast", *(["SHOAL_TIMEOUT_MS", "shoal run"] if COMMAND.exists() else [])):
        expect(name in places, name)
    if shutil.which("node"):
        expect(call("node", "--check", TOP / "dev/docs.js")[0] == 0, "dev/docs.js")


def long_lines_are_broken_but_not_those_of_drawings():
    manual()
    expect("<pre class=drawing>" in (PAGES / "docs/architecture.html").read_text(), "the drawing of the architecture")
    hello = (PAGES / "index.html").read_text()
    expect("<pre><code class=\"language-c\">#include" in hello, "C is no drawing")
    expect(re.search(r"^pre \{.*white-space: pre-wrap", (PAGES / "docs.css").read_text(), re.M), "docs.css")


def texts_link_to_names_and_pages():
    errors = (PAGES / "docs/errors.html").read_text()
    expect('<a href="../manual.html#SHOAL_ERR_TIMEOUT"><code>ERR_TIMEOUT</code></a>' in errors, errors)
    expect('<a href="docs/errors.html"><code>docs/errors.md</code></a>' in manual(), "docs/errors.md")
    expect('<a href="#shoal_mem_alloc"><code>shoal_mem_alloc</code></a>' in manual(), "shoal_mem_alloc")


def copy_with(name, path, old, new):
    tree = ROOT / name
    for source in ("dev/docs.py", "dev/docs.css", "dev/docs.js", "dev/man.py", "src/shoal.map", "include/shoal/shoal.h", "README.md", "CHANGELOG.md",
                   "CONTRIBUTING.md"):
        (tree / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TOP / source, tree / source)
    shutil.copytree(TOP / "docs", tree / "docs")
    text = (tree / path).read_text()
    expect(text.count(old) == 1, path, old, text.count(old))
    (tree / path).write_text(text.replace(old, new))
    return tree


FAULTS = (  # what is changed, where; what must be said
    ("include/shoal/shoal.h", "/* What one rank holds:", "struct shoal_bare;\n\n/* What one rank holds:",
     "shoal_bare has no text"),
    ("include/shoal/shoal.h", "Makes a context.", "Makes a context, as shoal_conjure does.", "the text names shoal_conjure"),
    ("include/shoal/shoal.h", "/* What one rank holds:", "/* A union. */\nunion shoal_odd;\n\n/* What one rank holds:",
     "cannot read this declaration"),
    ("src/shoal.map", "        shoal_version;", "        shoal_version;\n        shoal_secretive;",
     "shoal_secretive has no place"),
    ("docs/errors.md", "# Errors", "# Errors\n\n[more](nowhere.md)", "the link to nowhere.html leads nowhere"),
    ("docs/errors.md", "# Errors", "# Errors\n\n[more](style.md#no-such-place)",
     "the link to style.html#no-such-place leads nowhere"),
    ("docs/errors.md", "# Errors", "# Errors\n\n## Twice\n\n## Twice", "#twice is there more than once"),
)


def faults_of_the_sources_are_told():
    for number, (path, old, new, told) in enumerate(FAULTS):
        tree = copy_with(f"fault-{number}", path, old, new)
        code, out, err = render(tree, tree / "html")
        expect(code == 1 and len(out.splitlines()) == 1 and told in out, code, told, out, err)


def a_folder_with_other_things_stays_as_it_is():
    other = ROOT / "other"
    other.mkdir()
    (other / "letter").write_text("dear")
    code, out, err = render(out=other)
    expect(code == 2 and "holds other things" in err and (other / "letter").read_text() == "dear", code, out, err)
    code, out, err = render(out=other / "letter")
    expect(code == 2 and "is no folder" in err and (other / "letter").read_text() == "dear", code, out, err)


def what_is_missing_is_told():
    bin = ROOT / "bin"
    bin.mkdir()
    (bin / "python3").symlink_to(shutil.which("python3"))
    code, out, err = call(TOP / "dev/docs.py", ROOT / "none", env={**os.environ, "PATH": str(bin)})
    expect(code == 2 and "there is no cmark-gfm here; dev/deps.sh docs" in err, code, out, err)


try:
    run_cases([pages_render_without_a_warning, every_exported_symbol_has_a_place_and_a_text, names_are_those_the_compiler_sees,
               structs_begin_with_their_macro, headers_and_examples_fit_the_columns,
               sections_keep_their_order, no_link_is_dead, commands_settings_and_examples_have_pages,
               what_is_read_stands_before_the_list_of_pages, search_finds_names_and_settings,
               long_lines_are_broken_but_not_those_of_drawings, texts_link_to_names_and_pages, faults_of_the_sources_are_told,
               a_folder_with_other_things_stays_as_it_is, what_is_missing_is_told])
finally:
    shutil.rmtree(ROOT, ignore_errors=True)
