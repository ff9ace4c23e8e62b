#!/usr/bin/env python3
"""Checks that need no build. Prints file, line, rule and a remedy for each finding. Exit code 1 if there are any.

  dependencies  a module includes only modules below it (see the picture in docs/architecture.md)
  circles   no files of one folder call each other in a circle, except those that dev/circles.py lists; pictures of floors in
            docs/architecture.md agree with the code
  contracts other modules include a module's contract headers only, and these include no header of the module's own files
  parts     fields of a part of the engine or of the gradient engine are named in that part's files only
  names     no two C files have one name (third_party keeps its own); what modules call shoal_WORD_... (functions, types, enumerators, macros)
            begins with a WORD that only they use
  statics   no two C files of src have static functions of the same name, so that a backtrace is unambiguous
  lengths   no function is longer than LINES_MAX, from its first line to its brace
  settings  src/comm/settings.c collects the settings that modules declare
  logs      SHOAL_LOG accepts the names that log lines begin with
  public    tools and examples see only the public header; tools also see the headers of ALSO_FOR_TOOLS
  commands  a command of tools/ sees what all commands share, and the folders that COMMANDS lists
  symbols   src/shoal.map lists exactly what the headers in include/shoal declare, and what a built library exports
  headers   each header compiles alone, as C11 and (the public ones) as C++17
  python    code that users install or run as an example is Python 3.9
  native    Python's declarations match the headers (dev/native.py)
  version   files that repeat the version agree with meson.build (dev/version.py)
  ptx       the code for GPUs matches its source (dev/ptx.py)
  figures   the tables of docs/how-fast.md, the plots of docs/glance.md and the chart of README.md match docs/figures;
            pictures match their descriptions (dev/drawings.py)
  tested    docs/tested-by.md is current (dev/tested.py)
  prose     lines of prose in the pages fit 120 columns and those of code 84, the README 120 lines; the decisions that they
            cite exist
  words     getenv, printf to stdout, abort and exit stay in their modules; memory order is written at each atomic of shared memory;
            lines fit 128 columns
"""
import ast
import pathlib
import re
import shutil
import subprocess
import sys

import circles
import drawings
import native
import ptx
import readme
import tested
import version
import version_records

TOP = pathlib.Path(__file__).resolve().parent.parent
# The edges that exist. An edge that is listed but not used is also reported.
ALLOWED = {
    "base": set(),
    "observe": {"base"},
    "plan": {"base"},
    "topology": {"base"},
    "memory": {"base", "topology"},
    "kernels": {"base"},
    "device": {"base", "kernels"},
    "link": {"base"},
    "store": {"base", "link"},
    "bootstrap": {"base", "link", "store"},
    "membership": {"base", "topology", "link", "bootstrap"},
    "transport": {"base", "memory"},
    "transport/shm": {"base", "topology", "memory", "link", "bootstrap", "membership", "transport"},
    "transport/fabric": {"base", "observe", "topology", "memory", "link", "membership", "transport"},
    "transport/hosts": {"base", "membership", "transport/shm", "transport/fabric"},
    "collective": {"base", "plan", "transport"},
    "helpers": {"base", "topology"},
    "operand": {"base", "plan", "memory", "device", "transport"},
    "engine": {"base", "observe", "plan", "topology", "kernels", "transport", "collective", "helpers", "operand"},
    "comm": {"base", "observe", "topology", "kernels", "device", "memory", "link", "bootstrap", "transport/shm", "transport/fabric", "transport/hosts",
             "collective", "helpers", "operand", "engine"},
    "predict": {"base", "device", "collective", "comm"},
    "inspect": {"base", "topology", "kernels", "device", "link", "bootstrap", "transport/shm", "transport/fabric", "collective", "helpers", "comm"},
    "fusion": set(),
    "fusion/layout": {"fusion"},
    "fusion/codec": {"fusion"},
    "fusion/optimizer": {"fusion", "fusion/codec"},
    "fusion/scaling": {"fusion"},
    "fusion/checkpoint": {"fusion", "fusion/layout"},
    "fusion/reducer": {"fusion/layout", "fusion/codec", "fusion/optimizer", "fusion/checkpoint"},
    "fusion/shards": {"fusion/layout", "fusion/codec", "fusion/optimizer", "fusion/checkpoint"},
    "fusion/outer": {"fusion/layout", "fusion/codec", "fusion/reducer"},
    "data": set(),
    "placement": set(),
    "pipeline/schedule": set(),
    "pipeline/run": set(),
    "pipeline/partition": set(),
}
ROOMS = {"transport", "fusion", "pipeline"}  # their folders count as modules
# Single headers of modules that a module does not see otherwise.
ALSO = {"fusion": {"base/struct_bytes.h"},
        "fusion/layout": {"base/assert.h", "base/floats.h"},
        "fusion/codec": {"base/floats.h", "base/isa.h"},
        "fusion/optimizer": {"base/floats.h"},
        "fusion/scaling": {"base/floats.h"},
        "fusion/reducer": {"base/assert.h", "base/floats.h", "comm/packers.h", "device/gpu_packer.h"},
        "fusion/outer": {"base/assert.h", "base/floats.h"},
        "fusion/shards": {"base/assert.h", "base/floats.h"},
        "data": {"base/struct_bytes.h"},
        "placement": {"base/struct_bytes.h"},
        "pipeline/schedule": {"base/struct_bytes.h"},
        "pipeline/run": {"base/assert.h", "base/struct_bytes.h"},
        "pipeline/partition": {"base/json_text.h", "base/struct_bytes.h"}}
# The folders of tools/ and the other folders that each one includes.
COMMANDS = {
    "advise": {"sim", "step"},
    "bench": {"sim", "step"},
    "doctor": set(),
    "explain": {"pipeline"},
    "info": {"top"},
    "job": set(),
    "pipeline": {"step"},
    "run": set(),
    "sim": {"pipeline", "step"},
    "step": set(),
    "top": {"trace"},
    "trace": set(),
}
# Modules that show only these headers. The other headers are for the module's own files, and for tests.
CONTRACTS = {
    "engine": {"engine/engine.h", "engine/engine_settings.h", "engine/progress.h"},
    "operand": {"operand/call.h", "operand/device_memory.h", "operand/lent.h", "operand/makers.h", "operand/operand.h", "operand/pieces.h"},
    "membership": {"membership/membership.h", "membership/member_process.h", "membership/same_host.h", "membership/cause_board.h",
                   "membership/survivors.h", "membership/survivors_board.h", "membership/agreement.h"},
    "memory": {"memory/memory.h", "memory/location.h", "memory/segment.h", "memory/memory_settings.h"},
}
# Parts of the engine within struct shoal_engine: their fields, and the files that may name them. Code on the path of a
# small operation reads them inline, in engine_state.h.
PARTS = {
    "intake": {"engine/engine.c", "engine/intake.c", "engine/engine_state.h"},
    "runner": {"engine/runner.c", "engine/engine_state.h"},
}
# Parts whose struct only these files see. All other files of src have a pointer to it and the functions of its header.
OPAQUE = {
    "shoal_progress": ["engine/progress_state.h", "engine/progress.c"],
    "shoal_p2p": ["engine/p2p.c"],
    "shoal_breakage": ["engine/failure.c"],
    "shoal_stall": ["engine/stall.c"],
    "shoal_dispute": ["engine/mismatch.c"],
    "fusion_comms": ["fusion/reducer/comms.c"],
    "fusion_marks": ["fusion/reducer/marks.c"],
    "fusion_flow": ["fusion/reducer/flow.c"],
    "fusion_compressor": ["fusion/reducer/compress.c"],
    "fusion_optimizer": ["fusion/reducer/optimizer_shards.h", "fusion/reducer/optimizer.c", "fusion/reducer/optimizer_calls.c",
                         "fusion/reducer/optimizer_borders.c", "fusion/reducer/optimizer_checkpoint.c",
                         "fusion/reducer/optimizer_teams.c", "fusion/reducer/offload.c"],
    "shoal_checkpoint": ["fusion/checkpoint/checkpoint_read.c"],
    "fusion_tally": ["fusion/reducer/tally.c"],
    "fusion_out": ["fusion/reducer/out.c"],
    "fusion_stats": ["fusion/reducer/stats.c"],
    "fusion_fault": ["fusion/reducer/reducer_failure.c"],
    "fusion_device": ["fusion/reducer/reducer_device.c"],
    "fusion_measure": ["fusion/reducer/measure.c"],
    "fusion_noise": ["fusion/reducer/reducer_noise.c"],
}
found = []


def say(path, line, rule, mend):
    found.append(f"{path.relative_to(TOP)}:{line}: {rule}: {mend}")


def lines_of(path):
    return enumerate(path.read_text().splitlines(), 1)


def sources(folder):
    return sorted(p for p in (TOP / folder).rglob("*.[ch]"))


def module_of(path):
    """Returns the module of a file, from its path below src/."""
    folders = path.split("/")[:-1]
    return "/".join(folders[:2 if folders[0] in ROOMS else 1])


def check_dependencies():
    used, single = set(), set()
    for path in sources("src"):
        module = module_of(path.relative_to(TOP / "src").as_posix())
        if module not in ALLOWED:
            say(path, 1, "dependencies", f"module \"{module}\" is not in the table of dev/check.py")
            continue
        for number, line in lines_of(path):
            match = re.match(r'#include "([a-z_]+/[^"]+)"', line)
            if match and match.group(1) in ALSO.get(module, ()):
                single.add((module, match.group(1)))
                continue
            other = module_of(match.group(1)) if match else module
            used.add((module, other))
            if other not in ALLOWED[module] | {module, "shoal"}:
                say(path, number, "dependencies", f"{module} may not see {other}: move the concept down, or turn the dependency round")
    for module, others in ALLOWED.items():
        for other in sorted(others - {there for here, there in used if here == module}):
            say(TOP / "dev/check.py", 1, "dependencies", f"nothing in {module} includes {other}: take it out of the table")
    for module, headers in ALSO.items():
        for header in sorted(headers - {there for here, there in single if here == module}):
            say(TOP / "dev/check.py", 1, "dependencies", f"nothing in {module} includes {header}: take it out of the table")


def check_contracts():
    for path in sources("src"):
        place = path.relative_to(TOP / "src").as_posix()
        for number, line in lines_of(path):
            match = re.match(r'#include "([a-z_]+/[^"]+)"', line)
            module = module_of(match.group(1)) if match else None
            contract = CONTRACTS.get(module)
            is_own_file = module_of(place) == module and place not in (contract or ())
            if contract and match.group(1) not in contract and not is_own_file:
                say(path, number, "contracts", f"{match.group(1)} is for the files of {module}: ask by a function of {', '.join(sorted(contract))}")
    for contract in CONTRACTS.values():
        for name in sorted(contract):
            if not (TOP / "src" / name).exists():
                say(TOP / "dev/check.py", 1, "contracts", f"there is no {name}: take it out of the table")


def check_parts():
    for path in sources("src") + sources("tests"):
        place = path.relative_to(TOP / "src").as_posix() if path.is_relative_to(TOP / "src") else ""
        for number, line in lines_of(path):
            match = re.search(r"engine->(" + "|".join(PARTS) + r")\b", line)
            if match and place not in PARTS[match.group(1)]:
                say(path, number, "parts", f"engine->{match.group(1)} is for {', '.join(sorted(PARTS[match.group(1)]))}: ask by a function of {match.group(1)}.h")


def check_opaque():
    """A struct in a header would open the part, and so would a header included by another file."""
    seen = set()
    for path in sources("src"):
        place = path.relative_to(TOP / "src").as_posix()
        for number, line in lines_of(path):
            match = re.match(r'struct (\w+) \{|#include "([^"]+)"', line)
            for name, files in OPAQUE.items() if match else ():
                defines, includes = match.group(1) == name, match.group(2) in files
                seen |= {name} if defines else set()
                if (defines or includes) and place not in files:
                    say(path, number, "parts", f"struct {name} is for {', '.join(files)}: ask by a function of its header")
    for name in sorted(OPAQUE.keys() - seen):
        say(TOP / "dev/check.py", 1, "parts", f"there is no struct {name}: take it out of the table")


def without_comments(text):
    return re.sub(r"/\*.*?\*/", lambda match: "\n" * match.group().count("\n"), text, flags=re.S)


NAMES = re.compile(r"""^(?:(?:struct|enum|union)[ ](shoal_\w+)[ ]\{      # a type
                         |(?!typedef)[A-Za-z][^;{=\n]*?\b(shoal_\w+)\(   # a function
                         |\#define[ ](SHOAL_\w+)(?<!_H)\b)               # a macro, but for the guard of the header""", re.M | re.X)


def names_of(path):
    """Returns (line, name) of the functions, types, enumerators and macros that a header declares or defines."""
    text = without_comments(path.read_text())
    found_at = [(match.start(), next(filter(None, match.groups()))) for match in NAMES.finditer(text)]
    for body in re.finditer(r"\benum(?: \w+)? \{([^}]*)\}", text):
        found_at += [(body.start(1) + match.start(1), match.group(1)) for match in re.finditer(r"(?:^|,)\s*(SHOAL_\w+)", body.group(1))]
    for at, name in sorted(found_at):
        yield text.count("\n", 0, at) + 1, name


CODE = ("include", "src", "tools", "examples", "python", "tests", "bench")


def check_files():
    """A file name in a backtrace or a search must be unambiguous."""
    files = {}
    for path in (path for folder in CODE for path in sources(folder)):
        other = files.setdefault(path.name, path)
        if other != path:
            say(path, 1, "names", f"{other.relative_to(TOP)} has this name, too: rename one of them")


def check_names():
    """The prefix of a name must show its module."""
    owners = {}
    for path in (path for path in sources("src") if path.suffix == ".h"):
        module = module_of(path.relative_to(TOP / "src").as_posix())
        module = "fusion" if module.startswith("fusion/") else module  # its rooms share a vocabulary
        for number, name in names_of(path):
            word = name.split("_")[1].lower()
            owner = owners.setdefault(word, (module, name))
            if owner[0] != module:
                say(path, number, "names", f"{name} is of {module}, but \"shoal_{word}\" belongs to {owner[0]} ({owner[1]}): give it another word")


STATIC = re.compile(r"^static (?!inline)[^;{}=#]*?\b(\w+)\([^;{}]*\)\s*\{", re.M)


def check_statics():
    """A function name in a backtrace must show its file."""
    files = {}
    for path in (path for path in sources("src") if path.suffix == ".c"):
        for name in sorted(set(STATIC.findall(without_comments(path.read_text())))):
            other = files.setdefault(name, path)
            if other != path:
                say(path, 1, "statics", f"{name} is a static function of {other.name}, too: begin its name with the file's word")


LINES_MAX = 44
BEFORE_A_FUNCTION = re.compile(r"$|\}|#|/\*| \*|.*(;|\*/|\\)$")


def functions_of(path):
    """Returns (line, number of lines) of the functions that a file defines, in clang-format's layout."""
    lines, begin = path.read_text().splitlines(), None
    for number, line in enumerate(lines):
        if line == "{":
            begin = number
            while begin and not BEFORE_A_FUNCTION.match(lines[begin - 1]):
                begin -= 1
        elif line == "}" and begin is not None:
            yield begin + 1, number - begin + 1
            begin = None


def check_lengths():
    for path in (path for folder in CODE for path in sources(folder)):
        for number, length in functions_of(path):
            if length > LINES_MAX:
                say(path, number, "lengths", f"this function has {length} lines, more than {LINES_MAX}: give its pieces names")


def check_settings():
    """A module declares the settings that it reads. One that the collection lacks would not exist for users."""
    collection = TOP / "src/comm/settings.c"
    collected = set(re.findall(r"&(shoal_\w+_setting_table)\b", collection.read_text()))
    declared = {}
    for path in sources("src"):
        for number, line in lines_of(path):
            if match := re.match(r"extern const struct shoal_setting_table (\w+);", line):
                declared[match.group(1)] = (path, number)
    for name in sorted(declared.keys() - collected):
        say(*declared[name], "settings", f"add {name} to {collection.name}, which collects the tables")


LOGS = r'shoal_log_(?:line|fail|is_on)\((?:[^";]*?)"([a-z]+)"'


def check_logs():
    """SHOAL_LOG accepts exactly the names that log lines begin with."""
    log = TOP / "src/base/log.c"
    taken = set(re.findall(r'"(\w+)"', re.search(r"modules\[\] = \{(.*?)\}", log.read_text(), re.S).group(1)))
    used = {name for path in sources("src") for name in re.findall(LOGS, path.read_text())}
    for name in sorted(taken ^ used):
        say(log, 10, "logs", f"{'no line begins with' if name in taken else 'add'} {name} in the list of modules")


# Also compiled into the command: they need only libc, and auth.c libsodium at run time (decision 22).
ALSO_FOR_TOOLS = {"base/clock.h", "base/json_text.h", "base/node_list.h", "base/spelling.h", "base/timed_call.h", "topology/limits.h", "topology/links.h", "link/address.h", "link/auth.h",
                  "link/link.h", "link/secret.h"}


def check_public():
    for folder in ("tools", "examples"):
        for path in sources(folder):
            for number, line in lines_of(path):
                match = re.match(r'#include "([^"]+)"', line)
                if folder == "tools" and match and (match.group(1) in ALSO_FOR_TOOLS or (TOP / "tools" / match.group(1)).exists()):
                    continue
                if match and not (path.parent / match.group(1)).exists():
                    say(path, number, "public", "include <shoal/shoal.h> and files of the same folder only")


def check_circles():
    for path, mend in circles.differences(TOP):
        say(path, 1, "circles", mend)
    page = TOP / "docs/architecture.md"
    for fault in circles.picture_faults(page.read_text(), TOP) if page.exists() else ():
        say(page, 1, "circles", f"{fault}: mend the picture or the code")


def check_commands():
    used = set()
    for path in sources("tools"):
        *command, _ = path.relative_to(TOP / "tools").parts
        for number, line in lines_of(path):
            match = re.match(r'#include "([a-z_]+)/', line)
            if not match or match.group(1) not in COMMANDS or [match.group(1)] == command:
                continue
            used.update((one, match.group(1)) for one in command)
            if not command or match.group(1) not in COMMANDS.get(command[0], ()):
                say(path, number, "commands", f"move what both need to tools/, or list \"{match.group(1)}\" in COMMANDS")
    for command, others in COMMANDS.items():
        for other in sorted(others - {b for a, b in used if a == command}):
            say(TOP / "dev/check.py", 1, "commands", f"{command} no longer includes {other}: remove it from COMMANDS")


def check_symbols():
    header = "\n".join(path.read_text() for path in sources("include"))
    declared = set(re.findall(r"^SHOAL_(?:API|CALL) [^;]*?\b(shoal_\w+)\(", header, re.M | re.S))
    listed = set(re.findall(r"^\s+(shoal_\w+);", (TOP / "src/shoal.map").read_text(), re.M))
    for name in sorted(declared - listed):
        say(TOP / "src/shoal.map", 1, "symbols", f"add {name}, which the header declares")
    for name in sorted(listed - declared):
        say(TOP / "src/shoal.map", 1, "symbols", f"remove {name}, which the header does not declare")
    library = TOP / "build/libshoal.so"
    if library.exists():
        output = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True).stdout
        exported = {line.split()[-1].split("@")[0] for line in output.splitlines() if " A " not in line}
        for name in sorted(exported ^ listed):
            say(TOP / "src/shoal.map", 1, "symbols", f"{name} is exported or listed, but not both: build again, or mend the map")
    tests = "\n".join(p.read_text() for p in (TOP / "tests").rglob("*.c")) + "\n".join(p.read_text() for p in sources("examples"))
    tests += "\n".join(p.read_text() for p in sources("tools"))
    for name in sorted(declared):
        if not re.search(rf"\b{name}\b", tests):
            say(TOP / "include/shoal/shoal.h", 1, "symbols", f"no test, tool or example calls {name}")


def compiles(path, language, standard, compiler):
    command = [compiler, "-fsyntax-only", "-Wall", "-Wextra", f"-std={standard}", "-D_GNU_SOURCE",
               *(f"-I{TOP}/{folder}" for folder in ("include", "src", "tools")), "-x", language, str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def check_headers():
    for path in sources("include") + [p for p in sources("src") if p.suffix == ".h"]:
        if path.name.endswith("kernel_body.h"):  # a template that the file of each instruction set includes
            continue
        result = compiles(path, "c", "c11" if "include" in path.parts else "gnu11", "gcc")
        if result.returncode:
            say(path, 1, "headers", "does not compile alone:\n" + result.stderr.strip())
    for public in sources("include"):
        if shutil.which("g++") and compiles(public, "c++", "c++17", "g++").returncode:
            say(public, 1, "headers", "does not compile as C++17")


WORDS = [
    (r"\bgetenv\(", {"base/setting.c", "bootstrap"}, "settings are read through base/setting.h"),
    (r"\bprintf\(|\bputs\(", set(), "print to a FILE the caller gave, or log"),
    (r"\babort\(\)|\b_?exit\(", set(), "a library returns a status"),
    (r"\bsleep\(|\busleep\(|\bnanosleep\(", {"bootstrap", "device/cuda/cuda_host_ops.c", "helpers/helpers.c"}, "waiting happens in engine/progress.c"),
    (r"->runner\.(chunks|left_packed|next|slot_base)\b", {"engine/runner.c"}, "ask by a function of engine/runner.h"),
    (r"->message\.\w", {"engine/p2p.c", "engine/message_copy.c"}, "ask by a function of engine/p2p.h"),
    (r"\batomic_(load|store|fetch_add|fetch_sub|exchange)\(", {"bootstrap"}, "name the memory order (_explicit)"),
]


def check_words():
    for path in sources("include"):
        for number, line in lines_of(path):
            if len(line) > 128:
                say(path, number, "words", "longer than 128 columns")
    for path in sources("src"):
        place = path.relative_to(TOP / "src").as_posix()
        for number, line in lines_of(path):
            for pattern, where, mend in WORDS:
                if re.search(pattern, line) and not any(place.startswith(w) for w in where):
                    say(path, number, "words", mend)
            if len(line) > 128:
                say(path, number, "words", "longer than 128 columns")


def prose_of(path):
    """Yields (line, text) of a page's prose, without code, tables and HTML comments."""
    is_code = is_comment = False
    for number, line in lines_of(path):
        is_code ^= line.strip().startswith("```")
        is_comment |= "<!--" in line
        if not is_code and not is_comment and not line.startswith("|"):
            yield number, line
        is_comment &= "-->" not in line


CODE_COLUMNS = 84
README_LINES = 120


def wide_code_of(path):
    """Yields the numbers of lines of code that the site's page cannot show at once."""
    is_code = is_comment = False
    for number, line in lines_of(path):
        is_code ^= line.startswith("```")
        is_comment |= "<!--" in line
        if len(line) > CODE_COLUMNS and not is_comment and (is_code or line.startswith("    ")):
            yield number
        is_comment &= "-->" not in line


def check_prose():
    decisions = {int(path.name[:4]) for path in (TOP / "docs/decisions").glob("*.md")}
    package = TOP / "python/smdistributed/README.md"  # a page of the site as well
    pages = [TOP / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + [package, *sorted((TOP / "docs").rglob("*.md"))]
    if len(pages[0].read_text().splitlines()) > README_LINES:
        say(pages[0], README_LINES + 1, "prose", f"more than {README_LINES} lines: move details to a page of docs/")
    for path in (path for path in pages if "figures" not in path.parts):
        for number in wide_code_of(path) if path.parent == TOP / "docs" or path in (package, pages[0]) else ():
            say(path, number, "prose", f"a line of code longer than {CODE_COLUMNS} columns: the site's page is no wider")
        for number, line in prose_of(path):
            is_written = path in readme.PAGES and line.startswith("`bench/")  # dev/readme.py writes such lines
            if len(line) > 120 and " " in line[:120].strip() and not is_written:
                say(path, number, "prose", "longer than 120 columns")
            for named in re.findall(r"\bdecision (\d+)", line):
                if int(named) not in decisions:
                    say(path, number, "prose", f"there is no decision {named} in docs/decisions")


def check_python():
    for path in sorted(p for folder in ("python", "examples") for p in (TOP / folder).rglob("*.py")):
        try:
            ast.parse(path.read_text(), feature_version=(3, 9))
        except SyntaxError as error:
            say(path, error.lineno, "python", f"newer than 3.9: {error.msg}")


def check_native():
    for mend in native.differences():
        say(native.WRITTEN, 1, "native", mend)


def check_version():
    for name, line, mend in version.differences():
        say(TOP / name, line, "version", mend)


def check_ptx():
    for line, mend in ptx.differences():
        say(ptx.WRITTEN, line, "ptx", mend)


def check_figures():
    for path, line, mend in (*readme.differences(), *drawings.differences()):
        say(path, line, "figures", mend)
    for page, line, mend in version_records.differences():
        say(TOP / page, line, "versions", mend)


def check_tested():
    for path, line, mend in tested.differences():
        say(path, line, "tested", mend)


CHECKS = (check_dependencies, check_circles, check_contracts, check_parts, check_opaque, check_files, check_names, check_statics, check_lengths, check_settings, check_logs, check_public, check_commands, check_symbols, check_headers, check_python, check_native, check_version, check_ptx, check_figures, check_tested, check_words, check_prose)


def main():
    for check in CHECKS:
        check()
    names = ", ".join(check.__name__.removeprefix("check_") for check in CHECKS)
    print("\n".join(found) if found else f"checks: {names}: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
