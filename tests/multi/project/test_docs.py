#!/usr/bin/env python3
"""The site that `make docs` builds: complete, in order, without dead links. Faults in its sources are reported."""
import html
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[3]
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-docs-"))
PAGES = ROOT / "html/latest"
COMMAND = pathlib.Path(os.environ.get("SHOAL_COMMAND", TOP / "build/shoal"))
PYTHON = COMMAND.parent / "sphinx/bin/python3"
HEADER = TOP / "include/shoal/shoal.h"
HEADERS = sorted(HEADER.parent.glob("*.h"), key=lambda path: path != HEADER)


def render(tree=TOP, out=ROOT, *more):
    if not PYTHON.exists():
        raise Skip(f"no Sphinx at {PYTHON.parent.parent}: `make build/sphinx/made`")
    command = [COMMAND] if COMMAND.exists() and tree == TOP else []
    return call(PYTHON, tree / "docs/sphinx/make.py", "html", out, *command, *more, timeout=900)


def page(name):
    if not PAGES.exists():
        render()
    return (PAGES / name).read_text()


def folder_of(header):
    return "manual" if header == HEADER else header.stem


def sections(header):
    """Returns number, title and page of each section of a header."""
    wanted = re.findall(r"^/\* -{4} (\d+)\. (.*?) -+ \*/", header.read_text(), re.M)
    expect(len(wanted) >= 2, header, wanted)  # data.h has two sections
    return [(number, title, page(f"{folder_of(header)}/" + re.sub(r"\W+", "_", title.lower()).strip("_") + ".html"))
            for number, title in wanted]


def manual(headers=HEADERS):
    return "\n".join(text for header in headers for _, _, text in sections(header))


def plain(text):
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def pages_render_without_a_warning():
    code, out, err = render()
    expect(code == 0 and not err and not out, code, out, err)
    guides = [path.relative_to(TOP).with_suffix(".html") for path in TOP.glob("docs/**/*.md")]
    for name in ("index.html", "manual/index.html", "genindex.html", "docs/pictures/all-reduce-dark.svg", *guides):
        expect((PAGES / name).is_file(), name)
    for name in ("shoal.shoal.library_path", "torch.shoal.torch.empty", "torch.shoal.torch.ddp.DistributedDataParallel", "torch.shoal.torch.outer.DiLoCo",
                 "torch.shoal.torch.sharded.ShardedDataParallel", "torch.shoal.torch.pipeline.Pipeline",
                 "tensorflow.shoal.tensorflow.allreduce", "tensorflow.shoal.tensorflow.keras.wrap", "horovod.shoal.horovod.torch.DistributedOptimizer",
                 "job.shoal.job.PyTorch", "job.shoal.job.TrainingInput",
                 "smdistributed.smdistributed.dataparallel.torch.parallel.distributed.DistributedDataParallel",
                 "torch.shoal.torch.tensor.tensor_parallel", "torch_sagemaker.smdistributed.modelparallel.v2.sagemaker.transform",
                 "smdistributed.smdistributed.modelparallel.torch.save_checkpoint", "smdistributed.smdistributed.modelparallel.torch.step"):
        file, _, name = name.partition(".")
        expect(f'id="{name}"' in page(f"python/{file}.html"), name)
    expect('init_process_group("shoal")' in html.unescape(re.sub(r"<[^>]*>", "", page("python/torch.html"))), "the code of a docstring")
    expect("<code" in page("python/shoal.html").partition("shoal.command_path")[2].partition("</dd>")[0], "code between backticks")
    text = plain(page("python/job.html"))
    expect("entry_point : str" in text and "instance_count : int = 1" in text, "fields of a dataclass")
    version = re.search(r"version: '([\d.]+)'", (TOP / "meson.build").read_text())[1]
    expect(all(f"Shoal {version}" in path.read_text() for path in PAGES.rglob("docs/*.html")), "the version on each page")


def every_public_name_of_python_is_on_a_page():
    sys.path.append(str(TOP / "docs/sphinx"))
    import python_pages
    expect(python_pages.left_out(TOP) == [], python_pages.left_out(TOP))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(TOP / "python", pathlib.Path(folder, "python"))
        with open(f"{folder}/python/shoal/torch/norm.py", "a") as file:
            file.write("\n\ndef planted():\n    pass\n")
        pathlib.Path(folder, "python/shoal/planted.py").write_text("def other(): pass\n")
        expect(python_pages.left_out(pathlib.Path(folder)) == ["shoal.planted.other"], python_pages.left_out(pathlib.Path(folder)))


def every_exported_symbol_has_a_place_and_a_text():
    """A symbol's text is its own, or that of the declarations before it if it also describes this one."""
    symbols = re.findall(r"^\s+(shoal_\w+);", (TOP / "src/shoal.map").read_text(), re.M)
    expect(len(symbols) > 30, symbols)
    texts = [text for header in HEADERS for _, _, text in sections(header)]
    for symbol in symbols:
        own = [text for text in texts if f' id="c.{symbol}"' in text]
        expect(len(own) == 1 and own[0].count(f' id="c.{symbol}"') == 1, symbol, len(own))
        article = own[0][own[0].index("<article"):]
        before, after = article.split(f' id="c.{symbol}"')
        expect("<dd><p>" in re.sub(r">\s+<", "><", after.split("<dl ")[0]) or "<p>" in before, symbol)


def names_are_those_the_compiler_sees():
    if not shutil.which("clang"):
        raise Skip("clang is not installed")
    all_of_them = ROOT / "all.h"
    all_of_them.write_text("".join(f"#include <shoal/{header.name}>\n" for header in HEADERS))
    clang = ["clang", "-x", "c", f"-I{TOP}/include"]
    code, out, err = call(*clang, "-fsyntax-only", "-Xclang", "-ast-dump=json", all_of_them)
    expect(code == 0, err)
    seen, todo = set(), [json.loads(out)]
    while todo:
        node = todo.pop()
        todo += node.get("inner", [])
        if node.get("kind") in ("FunctionDecl", "RecordDecl", "EnumDecl", "EnumConstantDecl", "TypedefDecl"):
            seen.add(node.get("name", ""))
    code, out, err = call(*clang, "-dM", "-E", all_of_them)
    expect(code == 0, err)
    above = "".join(header.read_text().partition("/* ---- 1.")[0] for header in HEADERS)  # guards and attributes
    seen |= set(re.findall(r"^#define (\w+)", out, re.M)) - set(re.findall(r"#define (\w+)", above))
    seen = {name for name in seen if name.lower().startswith("shoal_")}
    found = {name.split(".")[-1] for name in re.findall(r' id="c\.([\w.]+)"', manual())}
    found = {name for name in found if name.lower().startswith("shoal_")}
    expect(len(seen) > 50 and found == seen, "in one only:", sorted(found ^ seen))


def structs_begin_with_their_macro():
    """Each struct with struct_bytes has an INIT macro, which compiles as C and C++ without a warning."""
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
    for path in [*HEADERS, *TOP.glob("examples/**/*.[ch]"), *TOP.glob("tools/**/*.[ch]")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            expect(len(line) <= 128, f"{path}:{number} has {len(line)} columns")


def sections_keep_their_order():
    for header in HEADERS:
        entries = re.findall(r'toctree-l1"><a [^>]*>([^<]*)</a>', page(f"{folder_of(header)}/index.html").partition("<article")[2])
        expect(list(map(html.unescape, entries)) == [f"{number}. {title}" for number, title, _ in sections(header)], header, entries)
        for number, title, text in sections(header):
            own = header.read_text().partition(f"---- {number}. ")[2].partition("\n/* ---- ")[0]
            functions = re.findall(r"^SHOAL_(?:API|CALL) [^;]*?\b(shoal_\w+)\(", own, re.M | re.S)
            places = [text.index(f' id="c.{name}"') for name in functions]
            expect(places == sorted(places), f"functions of {title} are not in the order of {header}")


def members_have_their_own_texts():
    text = plain(manual([HEADER]))
    for told in ("size_t bytes ¶ of the larger operand; if it is in parts, of all parts, rounded down to equal ones",
                 "ERR_TIMEOUT", "enumerator SHOAL_OK = 0 ¶ success", "enumerator SHOAL_FLOAT64 = 1 ¶ bytes: 8",
                 "a *_post call returns when the operation is done, or after this time: short operations are then as fast as blocking calls, and long ones continue."):
        expect(told in text, told)


def no_link_is_dead():
    page("index.html")
    count, texts = 0, {path: path.read_text() for path in PAGES.rglob("*.html")}
    for path, text in texts.items():
        for link in re.findall(r'(?:href|src)="([^":]+)"', text):
            name, _, place = html.unescape(link).partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            expect(target.is_file(), path, link)
            expect(not place or target.suffix != ".html" or f' id="{place}"' in texts[target], path, link)
            count += 1
    expect(count > 1000, count)


def commands_settings_and_examples_have_pages():
    for source in [path.relative_to(TOP) for path in TOP.glob("examples/*.c")] + ["examples/torch/gpt/train.py"]:
        wanted = plain(html.escape((TOP / source).read_text(), False))
        expect(wanted.replace(" ", "") in plain(page(f"{source}.html")).replace(" ", ""), source, "its text is not there")
    expect("<h1>" in page("examples/torch/gpt/README.html"), "the README of an example")
    if not COMMAND.exists():
        raise Skip(f"{COMMAND} is not built")
    own, settings = call(COMMAND, "--help")[1], call(COMMAND, "info", "--settings")[1]
    names = re.findall(r"^\s+shoal ([a-z]+(?: [a-z]+)?)\s{2,}", own, re.M)
    expect(len(names) >= 7, own)
    for name in names:
        text = plain(page(f"commands/shoal-{name.replace(' ', '-')}.html"))
        for option in re.findall(r"^\s+(--[a-z-]+)", call(COMMAND, *name.split(), "--help")[1], re.M):
            expect(option in text, f"{option} of shoal {name}")
    for name, meaning in re.findall(r"^(SHOAL_\w+).*\n\s+(.*)", settings, re.M):
        text = page("commands/settings.html")
        expect(f' id="envvar-{name}"' in text and " ".join(meaning.split())[:40] in plain(text), name, meaning)


def lists_hold_all_pages_and_the_list_of_each_page_is_short():
    for folder in ("docs/decisions", "docs/figures"):
        text = page(f"{folder}/index.html").partition("<article")[2]
        expect(all(f'href="{path.stem}.html"' in text for path in TOP.glob(f"{folder}/*.md")), folder)
    text = page("examples/index.html").partition("<article")[2]
    for path in TOP.glob("examples/**/*.[ch]"):
        expect(f'href="{path.relative_to(TOP / "examples")}.html"' in text, path)
    links = page("index.html").partition('<div class="sidebar-tree">')[2].partition("</aside>")[0].count("<a ")
    expect(10 < links < 150, links)  # pages of the docs, of commands and of headers, but no figures and no decisions


def pictures_follow_the_switch_of_colors():
    """A page has each picture for light and for dark colors, and Furo shows one of them."""
    for name, count in (("index.html", 2), ("docs/glance.html", 4)):
        shown = re.findall(r'class="only-dark" src="[^"]*-dark.svg" alt="[^"]+"><img class="only-light" src="[^"]*-light.svg"',
                           page(name))
        expect(len(shown) == count and "<picture>" not in page(name), name, shown)


def pictures_have_a_page_and_a_description():
    pages = {path: path.read_text() for path in TOP.glob("docs/*.md")}
    drawings = list((TOP / "docs/pictures").glob("*.txt"))
    expect(len(drawings) >= 8, drawings)
    for path in drawings:
        pages_with = [name for name, text in pages.items() if f'"pictures/{path.stem}-light.svg"' in text]
        expect(len(pages_with) == 1, f"{path} is a picture of {len(pages_with)} pages", pages_with)
    drawn = [path.with_name(f"{path.stem}-dark.svg") for path in drawings]
    for path in [*(TOP / "docs/pictures").glob("glance-*.svg"), *drawn]:
        text = path.read_text()
        expect(re.search(r"<title[^>]*>.{20,}</title>\n<desc[^>]*>.{20,}</desc>", text), path, "it has no title or description")
        expect("<script" not in text, path)


def every_record_has_a_table_and_a_plot():
    texts = "".join(page(f"docs/figures/{path.name}") for path in (PAGES / "docs/figures").glob("*.html") if path.name != "index.html")
    suites = [path.stem.removeprefix("bench-") for path in TOP.glob("docs/figures/bench-*.jsonl")]
    expect(len(suites) > 35 and texts.count("<table") >= len(suites), len(suites), texts.count("<table"))
    for suite in suites:
        expect(f'alt="{suite}"' in texts and list((PAGES / "_images").glob(f"{suite}*.svg")), suite)


def pages_fit_a_phone():
    """On a narrow screen the lists become drawers outside it, opened by buttons, and long lines of code scroll."""
    text = page("docs/errors.html")
    expect('name="viewport" content="width=device-width' in text, "no viewport")
    expect(all(f'id="__{drawer}"' in text for drawer in ("navigation", "toc")) and "sidebar-drawer" in text, "no drawers")
    style = (PAGES / "_static/styles/furo.css").read_text()
    narrow = [rules.partition("@media")[0] for rules in style.split("@media(max-width:63em)")[1:]]
    expect(any(re.search(r"\.sidebar-drawer\{[^}]*left:-", rules) for rules in narrow), "the list of pages stays beside the content")
    expect(re.search(r"\bpre\{[^}]*overflow:auto", style), "long lines run off blocks of code")


def versions_link_to_each_other():
    """A released version has a folder of its own, which stays as it is. Pages of all versions link to each other."""
    page("index.html")
    site = PAGES.parent
    (site / "0.0.9/docs").mkdir(parents=True)
    for name in ("objects.inv", "index.html", "docs/errors.html"):
        (site / "0.0.9" / name).write_text("old")
    version = re.search(r"version: '([\d.]+)'", (TOP / "meson.build").read_text())[1]
    expect(render(TOP, ROOT, "--release") == (0, "", ""), "the released version is not made")
    code, out, err = render(TOP, ROOT, "--release")
    expect(code == 2 and "stay as they are" in err, code, out, err)
    listed = json.loads((site / "versions.json").read_text())
    expect([one["folder"] for one in listed] == ["latest", version, "0.0.9"], listed)
    expect(listed[2]["pages"] == ["docs/errors.html", "index.html"] and len(listed[0]["pages"]) > 100, listed[2])
    expect("url=latest/index.html" in (site / "index.html").read_text() and (site / "0.0.9/index.html").read_text() == "old")
    for folder, told in (("latest", f"Version {version}, latest"), (version, f"Version {version}")):
        for name in ("index.html", "docs/errors.html"):
            expect(f"<summary>{told}</summary>" in (site / folder / name).read_text(), folder, name)
    links_of_versions(site / version, "docs/errors.html", [f"{one}/docs/errors.html" for one in ("latest", version, "0.0.9")])
    links_of_versions(PAGES, "docs/glance.html", ["latest/docs/glance.html", f"{version}/docs/glance.html", "0.0.9/index.html"])


def links_of_versions(folder, name, wanted):
    """Opens a page as a file in a browser, and compares the links that its script has made."""
    if not shutil.which("chromium"):
        raise Skip("no chromium opens the pages")
    browser = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={ROOT}/browser")
    code, out, err = call(*browser, "--dump-dom", f"file://{folder / name}", timeout=120)
    links = re.findall(r'<a href="([^"]*)"', out.partition('class="versions"')[2].partition("</details>")[0])
    targets = [((folder / name).parent / link).resolve() for link in links]
    expect(targets == [folder.parent / one for one in wanted], code, links, err)


def search_finds_names_and_settings():
    page("index.html")
    index = json.loads((PAGES / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    objects = {entry[-1] if isinstance(entry, list) else entry for entries in index["objects"].values() for entry in entries}
    for name in ("shoal_allreduce", "SHOAL_ERR_TIMEOUT", *(["SHOAL_TIMEOUT_MS"] if COMMAND.exists() else [])):
        expect(name in objects, name, sorted(objects)[:50])
    titles = set(index["alltitles"])
    expect("How fast" in titles and (not COMMAND.exists() or "shoal run" in titles), titles)
    expect("docs/figures/two" in index["docnames"] and not any("8 B with a peer 20 ms late" in title for title in titles),
           "tables of figures are not searched")


def texts_link_to_names_and_pages():
    errors = page("docs/errors.html")
    expect(re.search(r'href="\.\./manual/version_and_status\.html#c\.shoal_status\.SHOAL_ERR_TIMEOUT"[^>]*><code[^>]*>(<span[^>]*>)?ERR_TIMEOUT<', errors),
           "ERR_TIMEOUT")
    version = page("manual/version_and_status.html").partition("<article")[2]
    expect(re.search(r'href="\.\./docs/errors\.html"[^>]*><span[^>]*>docs/errors.md<', version), "docs/errors.md")
    expect(re.search(r'href="shared_memory\.html#c\.shoal_mem_alloc"', page("manual/collectives.html").partition("<article")[2]), "shoal_mem_alloc")


FAULTS = (  # file, old text, new text, expected message
    ("include/shoal/shoal.h", "/* A context holds", "struct shoal_bare;\n\n/* A context holds", "shoal_bare has no text"),
    ("include/shoal/shoal.h", "Makes a context.", "Makes a context, as shoal_conjure does.", "c:func reference target not found: shoal_conjure"),
    ("include/shoal/shoal.h", "SHOAL_API const char *shoal_version(void);", "SHOAL_API const char *shoal_version(none);", "shoal.h:62: a parameter list without types"),
    ("src/shoal.map", "        shoal_version;", "        shoal_version;\n        shoal_secretive;", "shoal_secretive has no place"),
    ("docs/errors.md", "# Errors", "# Errors\n\n[more](nowhere.md)", "nowhere"),
    ("docs/style.md", "# Style", "# Style\n\n[more](errors.md#no-such-place)", "no-such-place"),
)
NEEDED = ("docs/sphinx/make.py", "docs/sphinx/conf.py", "docs/sphinx/rest.py", "docs/sphinx/header_pages.py", "docs/sphinx/command_pages.py", "docs/sphinx/python_pages.py",
          "docs/sphinx/shoal.css", "docs/sphinx/selector.js", "docs/sphinx/templates/versions.html", "docs/errors.md", "docs/style.md", "bench/bench_report.py", "bench/bench_record.py", "src/shoal.map",
          "examples/01_hello.c", "README.md", "docs/pictures/all-reduce-light.svg", "CHANGELOG.md", "CONTRIBUTING.md", "meson.build")


def faults_of_the_sources_are_told():
    tree = ROOT / "faults"
    for source in (*NEEDED, *(path.relative_to(TOP) for path in HEADERS)):
        (tree / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TOP / source, tree / source)
    shutil.copytree(TOP / "python", tree / "python")
    for path, old, new, _ in FAULTS:
        text = (tree / path).read_text()
        expect(text.count(old) == 1, path, old, text.count(old))
        (tree / path).write_text(text.replace(old, new))
    code, out, err = render(tree, tree)
    for *_, told in FAULTS:
        expect(code == 1 and told in err, code, told, out, err)


def a_folder_with_other_things_stays_as_it_is():
    other = ROOT / "other"
    (other / "html").mkdir(parents=True)
    (other / "html/letter").write_text("dear")
    code, out, err = render(out=other)
    expect(code == 2 and "holds other things" in err and (other / "html/letter").read_text() == "dear", code, out, err)
    code, out, err = render(out=other / "html/letter")
    expect(code == 2 and "is no folder" in err and (other / "html/letter").read_text() == "dear", code, out, err)


def what_is_missing_is_told():
    """A Python without the packages that pip installs."""
    code, out, err = call(sys.executable, "-I", "-S", TOP / "docs/sphinx/make.py", "html", ROOT / "none")
    expect(code == 2 and "no hawkmoth here: `make docs` puts it at build/sphinx" in err, code, out, err)


try:
    run_cases([pages_render_without_a_warning, every_public_name_of_python_is_on_a_page, every_exported_symbol_has_a_place_and_a_text, names_are_those_the_compiler_sees,
               structs_begin_with_their_macro, headers_and_examples_fit_the_columns, sections_keep_their_order, members_have_their_own_texts,
               no_link_is_dead, commands_settings_and_examples_have_pages, lists_hold_all_pages_and_the_list_of_each_page_is_short,
               every_record_has_a_table_and_a_plot, pictures_follow_the_switch_of_colors,
               pictures_have_a_page_and_a_description, versions_link_to_each_other, pages_fit_a_phone, search_finds_names_and_settings, texts_link_to_names_and_pages,
               faults_of_the_sources_are_told, a_folder_with_other_things_stays_as_it_is, what_is_missing_is_told])
finally:
    shutil.rmtree(ROOT, ignore_errors=True)
