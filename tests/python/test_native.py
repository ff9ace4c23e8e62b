#!/usr/bin/env python3
"""Python's knowledge of the C headers (shoal._native, written by dev/native.py), compared with the compiler and the library."""
import ctypes
import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "dev"), str(TOP / "python"), str(TOP / "tests/multi")]
os.environ.setdefault("SHOAL_LIBRARY", str(TOP / "build/libshoal.so"))

import native  # noqa: E402
import versions  # noqa: E402
from shoal import _native  # noqa: E402
from tap import Skip, call, expect, run_cases  # noqa: E402

HEADERS = TOP / "include/shoal"
OTHER_PYTHONS = ("3.9", "3.10", "3.12", "3.13", "3.14")


def compiled(program):
    """Returns the output of a C program that includes all headers, as lines."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise Skip("no C compiler")
    includes = "".join(f"#include <shoal/{path.name}>\n" for path in sorted(HEADERS.glob("*.h")))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([compiler, f"-I{HEADERS.parent}", "-x", "c", "-", "-o", f"{folder}/program"], check=True, text=True,
                       input=f"{includes}#include <stdio.h>\n#include <string.h>\n{program}")
        code, out, err = call(f"{folder}/program")
        expect(code == 0, out, err)
        return out.splitlines()


def declarations_are_what_the_headers_say():
    expect(not native.differences(), *native.differences())


def structs_lie_as_the_compiler_lays_them():
    wanted, prints = [], []
    for struct in native.read(HEADERS).structs.values():
        python = getattr(_native, native.python_name(struct.name))
        prints.append(f'printf("{struct.name} %zu\\n", sizeof(struct {struct.name}));')
        wanted.append(f"{struct.name} {ctypes.sizeof(python)}")
        for name, _ in struct.fields:
            field, c_field = getattr(python, name), f"((struct {struct.name} *)0)->{name}"
            prints.append(f'printf("{struct.name}.{name} %zu %zu\\n", (size_t)&{c_field}, sizeof({c_field}));')
            wanted.append(f"{struct.name}.{name} {field.offset} {field.size}")
    expect(len(wanted) > 100, wanted)
    told = compiled("int main(void) {" + "\n".join(prints) + "}")
    expect(told == wanted, *(f"{one} in C, {other} in Python" for one, other in zip(told, wanted) if one != other))


def structs_begin_as_their_macros_say():
    wanted, prints = [], []
    for name in native.read(HEADERS).begins:
        macro = name.upper() + "_INIT"
        prints.append(f"static struct {name} {name}_ = {macro}; show(&{name}_, sizeof {name}_);")
        wanted.append(bytes(getattr(_native, native.python_name(name))()).hex())
    show = ('static void show(void *at, size_t n) {'
            'for (size_t i = 0; i < n; i++) printf("%02x", ((unsigned char *)at)[i]); printf("\\n"); }')
    told = compiled(f"{show}\nint main(void) {{" + "\n".join(prints) + "}")
    expect(len(wanted) > 8 and told == wanted, *zip(told, wanted))


def numbers_are_the_compilers():
    constants = native.read(HEADERS).constants
    prints = "\n".join(f'printf("{name} %lld\\n", (long long){name});' for name in constants)
    wanted = [f"{name} {getattr(_native, name.removeprefix('SHOAL_'))}" for name in constants]
    expect(len(wanted) > 30 and compiled(f"int main(void) {{{prints}}}") == wanted, wanted)


def every_exported_function_is_known():
    exported = set(re.findall(r"^\s+(shoal_\w+);", (TOP / "src/shoal.map").read_text(), re.M))
    expect(len(exported) > 50 and exported <= set(_native.FUNCTIONS), sorted(exported - set(_native.FUNCTIONS)))


def a_sum_needs_nothing_but_python():
    library, context, comm = _native.load(), _native.create_context(), ctypes.c_void_p()
    try:
        options = _native.CommOptions(name=b"alone", timeout_ms=10000)
        expect(library.comm_create_at(context, b"127.0.0.1:1", 0, 1, ctypes.byref(options), ctypes.byref(comm)) == _native.OK)
        values = (ctypes.c_double * 3)(1, 2, 3)
        half = _native.Options(scale=0.5)
        words = (comm, values, values, 3, _native.FLOAT64)
        status = library.allreduce(*words, _native.SCALED_SUM, ctypes.byref(half))
        expect(status == _native.OK and list(values) == [0.5, 1, 1.5], status, list(values))
        status = library.allreduce(*words, _native.OP_END, None)
        error = _native.error_of(status, context)
        expect(status == error.status == _native.ERR_ARGUMENT and "none of enum shoal_op" in str(error), status, error)
    finally:
        library.comm_free(comm)
        library.context_destroy(context)


def read_all():
    """Other Python versions parse each file, import the modules that need no framework, and reduce some numbers."""
    for path in sorted((TOP / "python").rglob("*.py")):
        compile(path.read_bytes(), str(path), "exec")
    for name in ("shoal.job.engines", "shoal.horovod._common.controller", "shoal.horovod._common.elastic"):
        importlib.import_module(name)
    a_sum_needs_nothing_but_python()


def other_versions_of_python_read_all():
    found = list(filter(None, map(versions.find_python, OTHER_PYTHONS)))
    if not found:
        raise Skip(f"there is no Python {', '.join(OTHER_PYTHONS)}")
    for interpreter in found:
        code, out, err = call(interpreter, "-W", "error", __file__, "--read-all")
        expect(code == 0, interpreter, out, err)


def callbacks_are_called():
    lines, context = [], ctypes.c_void_p()
    log = _native.LogFn(lambda arg, level, line: lines.append((arg, level, line)))
    settings = (ctypes.c_char_p * 2)(b"SHOAL_TIMEOUT_MS=never", None)
    options = _native.ContextOptions(log=log, log_arg=7, settings=settings)
    status = _native.load().context_create(ctypes.byref(options), ctypes.byref(context))
    expect(status == _native.ERR_ARGUMENT and not context.value, status)
    expect(len(lines) == 1 and lines[0][0] == 7 and b"SHOAL_TIMEOUT_MS" in lines[0][2], lines)


def another_library_is_refused():
    program = "import shoal._native as n\ntry:\n n.load().version()\nexcept n.ShoalError as error:\n print(error.status, error)"
    other = next((name for name in ("libc.so.6", "libm.so.6") if not call(sys.executable, "-c",
                                                                          f"import ctypes; ctypes.CDLL('{name}')")[0]), None)
    if not other:
        raise Skip("no other library to load")
    code, out, err = call(sys.executable, "-c", program,
                          env={**os.environ, "SHOAL_LIBRARY": other, "PYTHONPATH": str(TOP / "python")})
    told = f"{_native.ERR_UNSUPPORTED} {other} has no function shoal_version: "
    expect(code == 0 and out.startswith(told) and "install or build both from one source" in out, out, err)


# ---- The generator -------------------------------------------------------------------------------------------------------

SECOND = """
#include <shoal/shoal.h>
enum shoal_second_mode { SHOAL_SECOND_FAST = 1 << 4, SHOAL_SECOND_SAFE };
struct shoal_second;
struct shoal_second_options {
    size_t struct_bytes;
    enum shoal_second_mode mode;
    unsigned char keys[2 * 4];
    int (*pick)(void *arg, const struct shoal_tensor *tensors, size_t count);
};
#define SHOAL_SECOND_OPTIONS_INIT { sizeof(struct shoal_second_options), SHOAL_SECOND_SAFE, {0}, 0 }
SHOAL_API SHOAL_MUST_USE enum shoal_status shoal_second_create(struct shoal_comm *comm, const struct shoal_second_options *o,
                                                               struct shoal_second **second_out);
"""


def written(second):
    """Returns the module generated from the public header and a second one."""
    with tempfile.TemporaryDirectory() as folder:
        headers = pathlib.Path(folder, "shoal")
        headers.mkdir()
        shutil.copy(HEADERS / "shoal.h", headers)
        (headers / "second.h").write_text(second)
        return native.text_of(headers)


def a_second_header_joins_the_first():
    module = {"__name__": "shoal._native._second", "__package__": "shoal._native"}
    exec(written(SECOND), module)
    options = module["SecondOptions"]()
    expect((options.mode, options.struct_bytes) == (17, ctypes.sizeof(options)), options.mode)
    expect(module["SecondOptions"].keys.size == 8 and module["SecondOptionsPick"]._argtypes_[1]._type_ is module["Tensor"])
    result, arguments = module["FUNCTIONS"]["shoal_second_create"]
    expect(result is ctypes.c_int and arguments[2] is ctypes.POINTER(ctypes.c_void_p), arguments)
    expect({"SECOND_FAST", "SecondOptions", "FLOAT32", "Options"} <= set(module["__all__"]), module["__all__"])


def other_forms_are_refused_with_their_place():
    forms = {"struct shoal_s { int a : 3; };": "a bit-field",
             "struct shoal_s { int *a, b; };": "a pointer among several fields",
             "struct shoal_s { int a[2], b; };": "an array",
             "struct shoal_s { union shoal_u u; };": 'a type "union shoal_u"',
             "struct shoal_s { struct shoal_t t; };": "whose size is not known",
             "enum { SHOAL_A };": "an enum without a name",
             "typedef int shoal_number;": "a typedef of something else",
             "int shoal_f(const char *format, ...);": "a variable number of arguments",
             "int shoal_f(void (*fn)(void));": "a bare function pointer",
             "int shoal_f(size_t counts[4]);": "an array",
             "int shoal_f(wchar_t c);": 'a type "wchar_t"',
             "int other(void);": "without the prefix",
             "extern int shoal_x;": "cannot be read",
             "struct shoal_s { size_t a[sizeof(int)]; };": "no constant",
             "#define SHOAL_S_INIT { 1, 2 }": "does not begin with sizeof",
             "enum shoal_e { SHOAL_Options }; struct shoal_Options { int a; };": "one name in Python",
             "#error planted": "planted"}
    for form, reason in forms.items():
        try:
            written(f"#include <shoal/shoal.h>\n\n{form}\n")
        except native.Unreadable as error:
            place = "" if "one name" in reason or "INIT" in form else "second.h:3"
            expect(reason in str(error) and place in str(error), form, error)
        else:
            expect(False, "not refused:", form)


if sys.argv[1:] == ["--read-all"]:
    sys.exit(read_all())
run_cases([declarations_are_what_the_headers_say, structs_lie_as_the_compiler_lays_them, structs_begin_as_their_macros_say,
           numbers_are_the_compilers, every_exported_function_is_known, a_sum_needs_nothing_but_python, callbacks_are_called,
           other_versions_of_python_read_all, another_library_is_refused, a_second_header_joins_the_first,
           other_forms_are_refused_with_their_place])
