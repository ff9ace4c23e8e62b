#!/usr/bin/env python3
"""Tests of the developer's commands, dev/test.py and the Makefile: everything that happens before a test runs."""
import argparse
import importlib.util
import json
import lzma
import os
import pathlib
import re
import shutil
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[3]
sys.path.append(str(TOP / "dev"))  # its programs import modules from the same folder


def dev_test(top):
    """Returns dev/test.py as a module that builds under another folder."""
    spec = importlib.util.spec_from_file_location("dev_test", TOP / "dev/test.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TOP = pathlib.Path(top)
    module.BUILDS = {"plain": ("build", "cc", [])}
    module.NEEDED = {"shoal-test-dependency": "libshoal-test-dev"}
    return module


def a_dependency_that_comes_later_is_found():
    """`make demo` configures build/ without the packages that tests need; `make test` installs them."""
    if not shutil.which("meson") or not shutil.which("pkg-config"):
        raise Skip("no meson, or no pkg-config")
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "meson.build").write_text(
            "project('later', 'c')\ndependency('shoal-test-dependency', required: false)\n")
        packages = pathlib.Path(folder) / "packages"
        packages.mkdir()
        os.environ["PKG_CONFIG_PATH"] = str(packages)
        dev = dev_test(folder)
        expect(dev.configure("plain") == {"shoal-test-dependency"}, "not missing at first")
        expect(dev.is_incomplete("plain"), "a build without the tests' dependency counts as one")
        (packages / "shoal-test-dependency.pc").write_text("Name: later\nDescription: none\nVersion: 1\n")
        expect(not dev.is_incomplete("plain"), "not found once it is there")


def other_options_reach_a_build_that_is_there():
    if not shutil.which("meson"):
        raise Skip("no meson")
    with tempfile.TemporaryDirectory() as folder:
        top, dev = pathlib.Path(folder), dev_test(folder)
        (top / "meson.build").write_text("project('options', 'c', default_options: ['werror=true'])\nexecutable('a', 'a.c')\n")
        (top / "a.c").touch()
        dev.NEEDED = {}
        for options, flags in ((["-Doptimization=0"], {"-O0", "-Werror"}),
                               (["-Doptimization=1", "-Db_sanitize=address,undefined", "-Dc_args=-g1", "-Dwerror=false"],
                                {"-O1", "-fsanitize=address,undefined", "-g1"})):
            dev.BUILDS = {"plain": ("build", "cc", options)}
            dev.configure("plain")
            command = json.loads((top / "build/compile_commands.json").read_text())[0]["command"].split()
            asked = {word for word in command if re.match("-O|-fsan|-g1|-Werror", word)}
            expect(asked == flags, options, asked)
        written = (top / "build/build.ninja").stat().st_mtime_ns
        dev.configure("plain")
        expect((top / "build/build.ninja").stat().st_mtime_ns == written, "configured anew with the same options")


def dev_check(top):
    """Returns dev/check.py as a module, for the sources under another folder."""
    spec = importlib.util.spec_from_file_location("dev_check", TOP / "dev/check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TOP = pathlib.Path(top)
    return module


def check_found(rule, files, **tables):
    """Returns what one check finds in files, which are passed as texts by path. `tables` replaces tables of the check."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = pathlib.Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        check = dev_check(folder)
        for name, table in tables.items():
            setattr(check, name, table)
        getattr(check, rule)()
        return check.found


def names_found(**headers):
    """Returns what the check of names finds in headers, each passed as module__file=text."""
    return check_found("check_names", {f"src/{name.replace('__', '/')}.h": text for name, text in headers.items()})


def two_files_of_one_name_are_found():
    files = dict.fromkeys(("include/shoal/a.h", "src/first/b.h", "tests/b.c", "tools/c.c", "third_party/x/c.c", "bench/b.py", "dev/b.py"), "")
    expect(check_found("check_files", files) == [])
    for one, other in (("src/first/b.h", "src/second/b.h"), ("include/shoal/a.h", "src/first/a.h"), ("tools/c.c", "python/x/c.c"),
                       ("tests/b.c", "bench/b.c"), ("tools/c.c", "examples/x/c.c")):
        found = check_found("check_files", {**files, other: ""})
        expect(len(found) == 1 and one in found[0] and other in found[0], other, found)


def a_name_that_two_modules_share_is_found():
    own = "/* struct shoal_two { is another's */\nstruct shoal_one {\n    int shoal_two_x;\n};\nint shoal_one_get(struct shoal_two *two);\n"
    expect(names_found(first__a=own, second__b="int shoal_two_get(void);\n", first__c="void shoal_one_put(int one);\n") == [])
    for text in ("struct shoal_one_more {\n    int x;\n};\n", "static inline int shoal_one_more(\n    int x)\n{\n    return x;\n}\n",
                 "enum shoal_one_kind { SHOAL_TWO_A };\n", "#define SHOAL_ONE_MORE 1\n", "enum { SHOAL_TWO_A = 1, SHOAL_ONE_B };\n",
                 "SHOAL_MUST_USE enum shoal_status shoal_one_more(int x,\n    int y);\n"):
        found = names_found(first__a=own, second__b="\n" + text)
        expect(len(found) == 1 and found[0].lower().startswith("src/second/b.h:2: names: shoal_one_") and "first" in found[0], text, found)


def a_static_name_of_two_files_is_found():
    one, inline = "static int take(int x)\n{\n    return x;\n}\n", "static inline int take(void)\n{\n    return 0;\n}\n"
    files = {"src/a/one.c": "/* static int put(int x)\n{ */\n" + one, "src/a/two.c": "static int put(int x)\n{\n    return take(x);\n}\n" + inline}
    expect(check_found("check_statics", files) == [])
    found = check_found("check_statics", {**files, "src/b/three.c": "static void take(\n    int y)\n{\n}\n"})
    expect(len(found) == 1 and found[0].startswith("src/b/three.c:1: statics: take is a static function of one.c"), found)


def files_that_call_each_other_are_found():
    up = "int low(void);\nint high(void)\n{\n    return low();\n}\n"
    files = {"src/a/high.c": up, "src/a/low.c": "/* high() */\nint low(void)\n{\n    return puts(\"high()\");\n}\n",
             "src/b/other.c": "int high(void);\nint other(void)\n{\n    return high();\n}\n"}
    circles = importlib.import_module("circles")
    kept = circles.KNOWN
    try:
        circles.KNOWN = {}
        expect(check_found("check_circles", files) == [])
        around = {**files, "src/a/low.c": "int low(void)\n{\n    return middle();\n}\n",
                  "src/a/middle.c": "int middle(void)\n{\n    return high();\n}\n"}
        found = check_found("check_circles", around)
        expect([line.split(":")[0] for line in found] == ["src/a/high.c", "src/a/low.c", "src/a/middle.c"], found)
        circles.KNOWN = {"src/a": {"high", "low", "middle"}}
        expect(check_found("check_circles", around) == [])
        found = check_found("check_circles", files)
        expect(len(found) == 3 and all("remove it from KNOWN" in line for line in found), found)
    finally:
        circles.KNOWN = kept


def a_picture_of_floors_that_differs_from_the_code_is_found():
    files = {"src/a/high.c": "int low(void);\nint high(void)\n{\n    return low();\n}\n", "src/a/low.c": "int low(void)\n{\n    return 0;\n}\n",
             "src/a/other.c": "int other(void)\n{\n    return 0;\n}\n"}

    def faults(*lines):
        picture = "".join(f" {line}\n" for line in ("floors of src/a", *lines))
        return check_found("check_circles", {**files, "docs/architecture.md": f"```text\n{picture}```\n"})

    expect(faults("high        what it does", "low, other  what they do") == [])
    expect(faults("other, high", "low") == [])
    for lines in (["low, other", "high"], ["other", "high, low"]):
        found = faults(*lines)
        expect(len(found) == 1 and "high.c calls low.c, which is not below it" in found[0], lines, found)
    found = faults("high, more", "low")
    expect(len(found) == 2 and "have more.c, which is not there" in found[0] and "lack other.c, which is there" in found[1], found)


def a_command_that_includes_another_is_found():
    files = {"tools/a/a.c": '#include "tool.h"\n#include "b/b.h"\n', "tools/b/b.h": "", "tools/tool.h": ""}
    expect(check_found("check_commands", files, COMMANDS={"a": {"b"}, "b": set()}) == [])
    found = check_found("check_commands", files, COMMANDS={"a": set(), "b": set()})
    expect(len(found) == 1 and found[0].startswith("tools/a/a.c:2: commands: "), found)
    found = check_found("check_commands", {**files, "tools/tool.h": '#include "b/b.h"\n'}, COMMANDS={"a": {"b"}, "b": set()})
    expect(len(found) == 1 and found[0].startswith("tools/tool.h:1: commands: "), found)
    expect(check_found("check_public", files) == [])


def a_function_that_is_too_long_is_found():
    def function(lines):
        return "#define X \\\n    1\n\n/* What it does. */\nstatic int f(int a,\n             int b)\n{\n" + "    a++;\n" * (lines - 4) + "}\n"

    for path in ("src/base/a.c", "tools/a.h", "tests/unit/a.c", "bench/a.c", "examples/x/a.c", "python/x/a.c"):
        expect(check_found("check_lengths", {path: function(44) + "\n" + function(44)}) == [])
        found = check_found("check_lengths", {path: "\n" + function(45)})
        expect(len(found) == 1 and found[0].startswith(f"{path}:6: lengths: this function has 45 lines"), found)


def a_part_that_others_see_into_is_found():
    table = {"fusion_flow": ["fusion/flow.c"], "shoal_wait": ["engine/wait.h", "engine/wait.c"]}
    whole = "struct %s {\n    int x;\n};\n"
    files = {"src/fusion/flow.c": whole % "fusion_flow", "src/fusion/flow.h": "struct fusion_flow;\nstruct fusion_flow *flow(void);\n",
             "src/engine/wait.h": whole % "shoal_wait", "src/engine/wait.c": '#include "engine/wait.h"\n'}
    expect(check_found("check_opaque", files, OPAQUE=table) == [])
    for path, text in (("src/fusion/out.c", '#include "fusion/flow.c"\n'), ("src/fusion/flow.h", whole % "fusion_flow"),
                       ("src/engine/run.c", '#include "engine/wait.h"\n')):
        found = check_found("check_opaque", {**files, path: text}, OPAQUE=table)
        expect(len(found) == 1 and found[0].startswith(f"{path}:1: parts: struct "), path, found)
    found = check_found("check_opaque", {**files, "src/fusion/flow.c": ""}, OPAQUE=table)
    expect(len(found) == 1 and "there is no struct fusion_flow" in found[0], found)


def a_single_header_may_be_seen():
    files = {"src/base/assert.h": "", "src/base/log.h": "", "src/fusion/a.c": '#include "base/assert.h"\n'}
    tables = {"ALLOWED": {"base": set(), "fusion": set()}, "ALSO": {"fusion": {"base/assert.h"}}}
    expect(check_found("check_dependencies", files, **tables) == [])
    found = check_found("check_dependencies", {**files, "src/fusion/b.c": '#include "base/log.h"\n'}, **tables)
    expect(len(found) == 1 and found[0].startswith("src/fusion/b.c:1: dependencies: fusion may not see base"), found)
    found = check_found("check_dependencies", {**files, "src/fusion/a.c": ""}, **tables)
    expect(len(found) == 1 and "nothing in fusion includes base/assert.h: take it out of the table" in found[0], found)


def make_in_a_fresh_checkout(target):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("Makefile", "docs/sphinx/requirements.txt"):
            (pathlib.Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / name, pathlib.Path(folder) / name)
        code, out, err = call("make", "-n", "-C", folder, target)
        expect(code == 0, out, err)
        return out


def the_demo_for_torch_installs_no_deepspeed():
    if not shutil.which("make"):
        raise Skip("no make")
    told = make_in_a_fresh_checkout("demo-torch")
    expect("torch==" in told and "deepspeed" not in told.lower(), told)
    for target in ("test-all", "test-rest", "bench-torch"):
        told = make_in_a_fresh_checkout(target)
        expect("torch==" in told and "deepspeed==" in told, told)
    told = make_in_a_fresh_checkout("test")
    expect("torch==" in told and "deepspeed" not in told.lower() and "sdk2" not in told, told)


def tables_plots_and_the_chart_are_the_records():
    with tempfile.TemporaryDirectory() as folder:
        top = pathlib.Path(folder)
        for name in ("docs/how-fast.md", "docs/glance.md", "dev/readme.py", "dev/plots.py", "dev/svg.py", "dev/written.py",
                     "bench/bench_report.py", "bench/bench_record.py",
                     *(path.relative_to(TOP) for pattern in ("docs/figures/*.jsonl", "docs/pictures/*.svg") for path in TOP.glob(pattern))):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / name, top / name)
        readme, check = top / "docs/how-fast.md", (top / "dev/readme.py", "--check")
        expect(call(*check) == (0, "", ""), "it differs from docs/figures", *call(*check))
        text = readme.read_text()
        wrong = text.replace("| 8 B |", "| 8 B | 0.01 us |", 1)
        readme.write_text(wrong)
        line = wrong[:wrong.index("| 8 B |")].count("\n") + 1
        code, out, _ = call(*check)
        expect(code == 1 and out.startswith(f"docs/how-fast.md:{line}: "), "a wrong figure is not told", code, out)
        expect(call(top / "dev/readme.py")[0] == 0 and readme.read_text() == text, "it is not written again as it was")
        chart = top / "docs/pictures/all-reduce-dark.svg"
        drawn = chart.read_text()
        chart.write_text(drawn.replace("Gloo 48.7 ms", "Gloo 0.1 ms"))
        code, out, _ = call(*check)
        expect(code == 1 and re.match(r"docs/pictures/all-reduce-dark.svg:\d+: it differs", out), "a wrong bar is not told", code, out)
        chart.write_text(drawn)
        records = top / "docs/figures/bench-ends.jsonl"
        records.write_text(records.read_text().replace('"value": 4.51', '"value": 0.01'))
        told = call(*check)[1]
        expect(re.search(r"^docs/pictures/glance-failures-light.svg:\d+: it differs", told, re.M), "a plot of another record is not told", told)
        readme.write_text(text.replace("<!-- end -->", "", 1))
        code, out, _ = call(*check)
        expect(code == 1 and "dev/readme.py" in out, "a block without an end is not told", code, out)


def plots_of_predictions_are_their_records():
    sys.path.append(str(TOP / "bench"))
    import bench_sim_plot
    for name in ("allreduce", "gpu-pcie", "gpu-pcie-peers", "gpu-p4d", "gpu-p4d-staged", "step"):
        rows = [json.loads(line) for line in (TOP / f"docs/figures/sim-{name}.jsonl").read_text().splitlines()]
        drawn = bench_sim_plot.plot(rows)
        expect((TOP / f"docs/figures/sim-{name}.svg").read_text() == drawn, f"run bench/bench_sim.py {name}")
        root = xml.etree.ElementTree.fromstring(drawn)
        dots = root.findall("{http://www.w3.org/2000/svg}circle")
        expect(len(dots) == len(rows), "each row has a dot", name)
        expect(all(70 <= float(dot.get("cx")) <= 730 and 50 <= float(dot.get("cy")) <= 360 for dot in dots),
               "a dot is outside", name)
    one = bench_sim_plot.plot([dict(rows[0], profile="a<b & c")])
    expect("a&lt;b &amp; c, backward 120 ms" in one and xml.etree.ElementTree.fromstring(one) is not None, one)


def tests_are_found_by_the_names_they_use():
    tested = importlib.import_module("tested")
    kept = tested.TOP, tested.PAGE
    files = {"src/link/link.h": "int shoal_link_open(void);\n", "src/base/log.c": "static int shoal_log_x(void)\n{\n}\n",
             "src/link/link.c": "int shoal_link_open(void)\n{\n    return 0;\n}\n", "src/device/cpu/sum.h": "", "tools/top/top.h": "",
             "tests/unit/opens.h": "#include \"link/link.h\"\n", "tests/unit/deep/test_header.c": "#include \"opens.h\"\n",
             "tests/multi/test_calls.py": "lib.shoal_link_open()\ncall(SHOAL, \"top\")\n", "docs/tested-by.md": "",
             "tests/multi/test_none.c": "shoal_log_x();\n",
             "tests/job/test_page.py": "from shoal.job import (document,\n    watching)\nimport shoal.torch\n"}
    with tempfile.TemporaryDirectory() as folder:
        tested.TOP, tested.PAGE = pathlib.Path(folder), pathlib.Path(folder) / "docs/tested-by.md"
        try:
            for name, text in files.items():
                (tested.TOP / name).parent.mkdir(parents=True, exist_ok=True)
                (tested.TOP / name).write_text(text)
            page = tested.page()
            for module, cells in (("src/link", "`unit/test_header`, `multi/test_calls`"), ("src/base", "none names it: tests of its users"),
                                  ("src/device/cpu", "none names it: tests of its users"), ("tools/top", "`multi/test_calls`"),
                                  ("python/shoal/job/document", "`job/test_page`"), ("python/shoal/job/watching", "`job/test_page`"),
                                  ("python/shoal/torch", "`job/test_page`"), ("python/shoal/job/sdk", "none names it: tests of its users")):
                expect(f"| `{module}` | {cells} |" in page, module, page)
            expect(len(tested.differences()) == 1, "an empty page is current")
            tested.PAGE.write_text(page)
            expect(tested.differences() == [])
            (tested.TOP / "tests/unit/test_new.c").write_text("#include \"link/link.h\"\n")
            ((path, line, text),) = tested.differences()
            expect("`src/link`" in page.splitlines()[line - 1] and "run dev/tested.py" in text, line, text)
        finally:
            tested.TOP, tested.PAGE = kept


def drawings_are_their_descriptions():
    with tempfile.TemporaryDirectory() as folder:
        top = pathlib.Path(folder)
        for name in ("dev/drawings.py", "dev/svg.py", "dev/written.py", "docs/pictures/trace.txt", "docs/pictures/trace-dark.svg",
                     "docs/pictures/trace-light.svg"):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / name, top / name)
        described, check = top / "docs/pictures/trace.txt", (top / "dev/drawings.py", "--check")
        text = described.read_text()
        expect(call(*check) == (0, "", ""), "it differs from its description", *call(*check))
        described.write_text(text.replace('"waits for rank 2"', '"waits for rank 3"'))
        code, out, _ = call(*check)
        expect(code == 1 and "docs/pictures/trace-dark.svg:1: it differs" in out, "another description is not told", code, out)
        for wrong in ("bax a 1 1 1 1 text", "box a 1 1 1 text", "line nowhere:s 1 1"):
            described.write_text(f"{text}{wrong}\n")
            code, out, err = call(*check)
            expect(code == 1 and "docs/pictures/trace.txt: " in out and not err, "a mistake is not told", wrong, out, err)


def dev_versions():
    """Returns dev/versions.py and dev/version_records.py as modules."""
    return importlib.import_module("versions"), importlib.import_module("version_records")


def rows_of_versions_that_ran_with_other_sources_are_told():
    versions, records = dev_versions()
    with tempfile.TemporaryDirectory() as folder:
        top = pathlib.Path(folder)
        for name, text in (("docs/python.md", "<!-- dev/versions.py -->\n<!-- end -->\n"), ("docs/tensorflow.md", "<!-- dev/versions.py -->\n<!-- end -->\n"),
                           ("shim/a.py", "a = 1\n"), ("shim/b/c.h", "int a;\n"), ("shim/page.md", "")):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(text)
        row = versions.Row("old", "3.9", [], (["tests/a.py", "2"], ["tests/b.py"]), ("shim",), "docs/python.md")
        expect(records.outdated([row], top) == [("old", "a.py 2", "never ran"), ("old", "b.py", "never ran")], records.outdated([row], top))
        for program, failed in (("a.py 2", 0), ("b.py", 1)):
            records.keep({"row": "old", "program": program, "page": row.page, "versions": "torch 2.4", "date": "2026-11-05",
                          "counts": {"c++": [7, failed, 3]}, "failed": ["one"] * failed, "ended": True, "folders": row.sources,
                          "sources": records.fingerprint(row.sources, top)}, top)
        expect(records.outdated([row], top) == [] and records.differences(top) == [], records.outdated([row], top))
        page = (top / "docs/python.md").read_text()
        expect("| torch 2.4 | `b.py` | 7 / 1 / 3 | - | 5 November 2026 |" in page, page)
        expect(records.failing(top) == [("old", "b.py", "failed: one")], records.failing(top))
        (top / "shim/page.md").write_text("no source")
        expect(records.outdated([row], top) == [], "a page counts as a source")
        for name, text in (("shim/b/c.h", "int b;\n"), ("shim/new.cpp", "")):
            (top / name).write_text(text)
            expect([program for _, program, _ in records.outdated([row], top)] == ["a.py 2", "b.py"], name)
        expect([told[:2] for told in records.differences(top)] == [("docs/python.md", 5)], "a table of older sources is not told", records.differences(top))
        records.write_tables(top)
        page = (top / "docs/python.md").read_text()
        expect("| torch 2.4 | `b.py` | 7 / 1 / 3 | - | 5 November 2026, with older sources |" in page, page)
        (top / "docs/python.md").write_text(page.replace("7 / 1 / 3", "8 / 0 / 3"))
        expect([told[:2] for told in records.differences(top)] == [("docs/python.md", 6)], records.differences(top))
        (top / "docs/tensorflow.md").write_text("no table")
        expect([told[0] for told in records.differences(top)] == ["docs/python.md", "docs/tensorflow.md"], records.differences(top))


# Programs with three cases. Each maps to the lines that it prints, the code that ends it, its row's counts, and words in
# the last failure.
PASSES, FAILS, SKIPS = "ok 1 - c++ 2 ranks a", "not ok 2 - c++ 2 ranks b", "ok 3 - python 2 ranks a # SKIP no"
PROGRAMS = {"whole.py": ([PASSES, FAILS, SKIPS], "raise SystemExit(1)", "| 1 / 1 / 0 | 0 / 0 / 1 |", []),
            "died.py": ([PASSES], "raise SystemExit('died')", "| 1 / 0 / 0, did not end | -, did not end |", ["exit code 1", "died"]),
            "died_after_a_failure.py": ([PASSES, FAILS], "import os; os.kill(os.getpid(), 9)", "| 1 / 1 / 0, did not end | -, did not end |", ["exit code -9"]),
            "left.py": ([PASSES], "", "| 1 / 0 / 0, did not end | -, did not end |", ["exit code 0"]),
            "hung.py": ([PASSES], "import time; time.sleep(60)", "| 1 / 0 / 0, did not end | -, did not end |", ["no end within 5 s"])}


def a_program_that_dies_is_not_written_as_passed():
    versions, records = dev_versions()
    with tempfile.TemporaryDirectory() as folder:
        top = versions.TOP = pathlib.Path(folder)
        (top / "build/versions").mkdir(parents=True)
        (top / "docs").mkdir()
        for page in records.PAGES:
            (top / page).write_text("<!-- dev/versions.py -->\n<!-- end -->\n")
        for name, (lines, ending, cells, words) in PROGRAMS.items():
            (top / name).write_text(f"print('1..3', *{lines}, sep='\\n', flush=True)\n{ending}\n")
            versions.LIMIT_S = 5 if name == "hung.py" else 60
            counts, failed, ended = versions.test(sys.executable, versions.Row(name, "3.9", [], (), (), ""), [name])
            expect(failed[:lines.count(FAILS)] == ["c++ 2 ranks b"] * lines.count(FAILS), name, failed)
            expect(ended == (not words) and all(word in failed[-1] for word in words), name, failed)
            records.keep({"row": name, "program": name, "page": "docs/python.md", "versions": "torch 2.4", "date": "2026-11-05", "counts": counts,
                          "failed": failed, "ended": ended, "folders": [], "sources": records.fingerprint([], top)}, top)
            page = (top / "docs/python.md").read_text()
            expect(f"| torch 2.4 | `{name}` {cells} 5 November 2026 |" in page, page)


def rows_of_versions_ran_with_the_sources_of_today():
    """CI does not fetch gigabytes: it reports rows of `make test-versions` that ran with older sources."""
    versions, records = dev_versions()
    names = {name for name, _, _ in records.outdated(versions.ROWS)}
    expect(set(row for row, _ in records.read()) <= {row.name for row in versions.ROWS}, "a record is of no row")
    if names:
        raise Skip(f"to be run again: dev/versions.py --discard {' '.join(row.name for row in versions.ROWS if row.name in names)}")


def code_for_gpus_of_another_source_is_found():
    with tempfile.TemporaryDirectory() as folder:
        top = pathlib.Path(folder)
        sources = (*TOP.glob("src/device/cuda/**/*"), *TOP.glob("src/kernels/*"))
        for name in ("dev/ptx.py", *(path.relative_to(TOP) for path in sources if path.suffix in (".h", ".xz"))):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / name, top / name)
        source, code, check = (top / "src/device/cuda/kernels" / name for name in ("gpu_kernel_body.h", "kernels.ptx.xz", "../../../../dev/ptx.py"))
        expect(call(check, "--check") == (0, "", ""), "the code is not that of its source", *call(check, "--check"))
        text, made = source.read_text(), lzma.decompress(code.read_bytes()).decode()
        source.write_text("/* What the source says is no other code. */\n" + text.replace("{\n", "{\n\n"))
        expect(call(check, "--check") == (0, "", ""), "a comment counts", *call(check, "--check"))
        source.write_text(text.replace("0x1.8p+23f", "0x1.8p+22f"))
        status, out, _ = call(check, "--check")
        expect(status == 1 and out.startswith("src/device/cuda/kernels/kernels.ptx.xz:1: ") and "run dev/ptx.py" in out, out)
        source.write_text(text)
        for wrong in ("add.f32", "fma.rn.f32", "mul.rn.ftz.f32", "div.approx.f32", "mad.rn.f32"):
            code.write_bytes(lzma.compress(made.replace("add.rn.f32", wrong, 1).encode()))
            line = made[:made.index("add.rn.f32")].count("\n") + 1
            status, out, _ = call(check, "--check")
            expect(status == 1 and out.startswith(f"src/device/cuda/kernels/kernels.ptx.xz:{line}: ") and wrong in out, wrong, out)


def dev_ptx():
    sys.path.insert(0, str(TOP / "dev"))
    return importlib.import_module("ptx")


def code_for_gpus_is_what_clang_compiles():
    ptx = dev_ptx()
    compiler = next(filter(None, map(shutil.which, ptx.COMPILERS)), None)
    if not compiler:
        raise Skip("no clang 14 or newer")
    compiled, committed = ptx.compile_ptx(compiler), ptx.committed()
    expect(not list(ptx.differences(compiled)), *ptx.differences(compiled))
    heads = [text.splitlines()[0] for text in (compiled, committed)]
    if heads[0] != heads[1]:
        raise Skip(f"clang compiles it, but another version than that of the code in the tree: {heads}")
    differing = [both for both in zip(compiled.splitlines(), committed.splitlines()) if both[0] != both[1]]
    expect(compiled == committed, "clang compiles the source to other code, first at", *differing[:1])


def release_in(pattern, text):
    return tuple(map(int, re.search(pattern + r" (\d+)\.(\d+)", text).groups()))


def written_registers(page):
    """Reads the table of docs/gpu.md. Returns a dictionary by device; each value maps a kernel to its number of registers."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines())
    return {device: {row[0]: int(row[i]) for row in rows} for i, device in enumerate(head) if i}


def code_for_gpus_is_assembled_into_the_registers_that_are_written():
    """Assembles for the oldest and the newest device. ptx.registers ends the program if a kernel needs local memory."""
    ptx = dev_ptx()
    ptxas = ptx.find_ptxas()
    if not ptxas:
        raise Skip("no ptxas, which comes with the CUDA toolkit")
    page = ptx.PAGE.read_text()
    release, written_by = release_in("release", call(ptxas, "--version")[1]), release_in("by ptxas", page)
    if release < written_by:
        raise Skip(f"ptxas {release} is older than the one of docs/gpu.md, {written_by}, and may know no sm_{ptx.DEVICES[-1]}")
    written = written_registers(ptx.BLOCK.search(page)[0].split("-->\n")[1].split("<!--")[0])
    expect(list(written) == [f"sm_{device}" for device in ptx.DEVICES], list(written))
    for device in (ptx.DEVICES[0], ptx.DEVICES[-1]):
        used = ptx.most_registers(ptxas, device)
        expect(len(used) > 10, "ptxas was not understood", used)
        if release == written_by:
            expect(used == written[f"sm_{device}"], f"sm_{device}: run dev/ptx.py", used, written[f"sm_{device}"])


def tests_of_python_wait_for_what_is_installed():
    """The other builds and their tests do not wait. The command ends after it has reported them."""
    with tempfile.TemporaryDirectory() as folder:
        dev, order = dev_test(folder), []
        dev.BUILDS = dict.fromkeys(("plain", "python", "asan"), ("build", "cc", []))
        dev.why_impossible = dev.why_configured_again = lambda name: None
        dev.build = lambda name, is_beside: (order.append(f"build {name}") or True, 0, 0)
        dev.tests_of = lambda name, pattern: [{"name": "one", "priority": 0, "is_parallel": False, "suite": ["unit"], "timeout": 1}]
        dev.run_timed = lambda test, directory: (0, "ok 1 - case", 0, 0)

        def report(name, test, result, options, total):
            order.append(f"test {name}")
            if {"test plain", "test asan"} <= set(order):
                (pathlib.Path(folder) / "go").touch()
        dev.report = report
        install = "for i in $(seq 3000); do [ -e go ] && exec touch installed; sleep 0.02; done"
        total = dev.Count()
        dev.Plan(argparse.Namespace(builds=[], part=None, k="", install=install), total).run()
        expect((pathlib.Path(folder) / "installed").exists() and order[-2:] == ["build python", "test python"] and len(order) == 6, order)
        order.clear()
        dev.Plan(argparse.Namespace(builds=["python"], part=None, k="", install="false"), total).run()
        expect(order == ["build python", "test python"], order)
        order.clear()
        dev.why_configured_again = lambda name: "ninja explain: the interpreter is newer"
        dev.Plan(argparse.Namespace(builds=["plain", "python"], part=None, k="", install=None), total).run()
        expect(order == ["build plain", "test plain"] and total.failures == ["FAILED build python"], order, total.failures)


def most_at_once(idle_cores, patience_s):
    """Returns how many of four tests ran at the same time. Each test waits until all four run, or for patience_s."""
    dev, running, counts, changed = dev_test(TOP), set(), [], threading.Condition()
    dev.why_impossible, dev.build, dev.report = lambda name: None, lambda name, is_beside: (True, 0, 0), lambda *_: None
    dev.tests_of = lambda name, pattern: [{"name": str(number), "priority": 0, "is_parallel": True, "suite": ["unit"], "timeout": 1}
                                          for number in range(4)]
    dev.idle_cores = lambda seconds: time.sleep(0.01) or idle_cores

    def run_timed(test, directory):
        with changed:
            running.add(test["name"])
            counts.append(len(running))
            changed.notify_all()
            changed.wait_for(lambda: max(counts) == 4, patience_s)
            running.discard(test["name"])
        return 0, "ok 1 - case", 0, 0
    dev.run_timed = run_timed
    dev.Plan(argparse.Namespace(builds=[], part=None, k="", install=None), dev.Count()).run()
    expect(len(counts) == 4, counts)
    return max(counts)


def more_lanes_take_tests_while_cores_are_idle():
    expect(most_at_once(0.1, patience_s=0.2) <= 2, "more lanes although no core is idle")
    expect(most_at_once(1.5, patience_s=60) == 4, "too few lanes")


def a_recording_is_a_picture_of_its_lines():
    """Each line appears when it came. Waiting is cut to two seconds, but not after the kill, which is what the picture shows."""
    recording = importlib.import_module("recording")
    lines = recording.shortened([(0, "$ shoal run", "command"), (30, "0| loss <1>", "text"), (31, "$ kill -9 7", "command"), (35, "7 was killed", "cause")])
    expect([at for at, _, _ in lines] == [0, 2, 3, 7], lines)
    for scheme in recording.COLORS:
        texts = [one for one in xml.etree.ElementTree.fromstring(recording.svg(lines, scheme)).iter() if one.tag.endswith("text")]
        expect([one.text for one in texts] == ["$ shoal run", "0| loss <1>", "$ kill -9 7", "7 was killed"], texts)
        expect([one.get("style") for one in texts] == [f"animation-delay: {at:.2f}s" for at in (0, 2, 3, 7)], scheme)
        picture = (TOP / f"docs/pictures/killed-{scheme}.svg").read_text()
        expect(picture.count("was") >= 3 and "killed by signal 9 (Killed)" in picture, "the picture of the README names the killed rank")


def each_test_is_in_one_part():
    dev = dev_test(TOP)
    for name, suites, wanted in (("plain", ["hosts"], "main"), ("plain", ["docs"], "rest"), ("plain", ["layouts", "waits"], "rest"),
                                 ("python", ["python", "main"], "main"), ("python", ["python"], "rest"), ("asan", ["unit"], "rest"),
                                 ("asan", ["unit", "main"], "rest")):
        test = {"suite": [f"shoal:{suite}" for suite in suites]}
        found = [part for part in ("main", "rest") if dev.is_in_part(name, test, part)]
        expect(found == [wanted] and dev.is_in_part(name, test, None), name, suites, found)


def what_a_run_waits_for_never_has_idle_priority():
    """Builds and installations get a smaller share of the CPU than tests, but still a share when others keep it busy."""
    probe = "import os; print(os.sched_getscheduler(0) == os.SCHED_OTHER, 0 < os.nice(0) - int(os.environ['BEFORE']) <= 5)"
    out = call(*dev_test(TOP).STEPPING_BACK, sys.executable, "-c", probe, env={**os.environ, "BEFORE": str(os.nice(0))})[1]
    expect(out == "True True\n", out)


def environments_are_made_of_the_machines_python_if_it_is_the_same():
    from interpreter import OF_MACHINE, interpreter
    if not os.access(OF_MACHINE, os.X_OK):
        raise Skip(f"there is no {OF_MACHINE}")
    path = os.environ["PATH"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            python3 = pathlib.Path(folder, "python3")
            for text, wanted in ((f'exec {OF_MACHINE} "$@"', OF_MACHINE), ('echo "(2, 7)"', "python3")):
                python3.write_text(f"#!/bin/sh\n{text}\n")
                python3.chmod(0o755)
                os.environ["PATH"] = f"{folder}:{path}"
                expect(interpreter() == wanted, text, interpreter())
    finally:
        os.environ["PATH"] = path


def openblas_is_told_of_a_processor_that_it_knows():
    program = TOP / "build/examples/fashion_mnist"
    if not program.exists():
        raise Skip("no OpenBLAS, or no plain build")
    flags = set(pathlib.Path("/proc/cpuinfo").read_text().split())
    bare = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    is_unknown = "Core: Prescott" in "".join(call(program, "--help", env={**bare, "OPENBLAS_VERBOSE": "2"})[1:])
    wanted = next((core for flag, core in (("avx512bw", "SkylakeX"), ("avx2", "Haswell")) if is_unknown and flag in flags), "")
    out = call(TOP / "dev/openblas.sh", "sh", "-c", "echo core=$OPENBLAS_CORETYPE", env=bare)[1]
    expect(out.endswith(f"core={wanted}\n") and ("is told" in out) == bool(wanted), wanted, out)
    out = call(TOP / "dev/openblas.sh", "sh", "-c", "echo core=$OPENBLAS_CORETYPE", env={**bare, "OPENBLAS_CORETYPE": "Zen"})[1]
    expect(out == "core=Zen\n", out)


if __name__ == "__main__":
    run_cases([openblas_is_told_of_a_processor_that_it_knows, environments_are_made_of_the_machines_python_if_it_is_the_same,
               what_a_run_waits_for_never_has_idle_priority, each_test_is_in_one_part, a_recording_is_a_picture_of_its_lines,
               more_lanes_take_tests_while_cores_are_idle, tests_of_python_wait_for_what_is_installed,
               tables_plots_and_the_chart_are_the_records, plots_of_predictions_are_their_records, tests_are_found_by_the_names_they_use,
               drawings_are_their_descriptions, rows_of_versions_that_ran_with_other_sources_are_told,
               a_program_that_dies_is_not_written_as_passed, rows_of_versions_ran_with_the_sources_of_today, code_for_gpus_of_another_source_is_found,
               code_for_gpus_is_what_clang_compiles, code_for_gpus_is_assembled_into_the_registers_that_are_written,
               a_name_that_two_modules_share_is_found,
               two_files_of_one_name_are_found, a_static_name_of_two_files_is_found, a_part_that_others_see_into_is_found,
               a_single_header_may_be_seen, files_that_call_each_other_are_found,
               a_command_that_includes_another_is_found, a_function_that_is_too_long_is_found,
               a_dependency_that_comes_later_is_found, other_options_reach_a_build_that_is_there, the_demo_for_torch_installs_no_deepspeed])
