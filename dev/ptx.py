#!/usr/bin/env python3
"""Writes src/device/cuda/kernels/kernels.ptx.xz, the kernels for GPUs, from their source, and the table of registers in
docs/gpu.md. `xz -dc` prints the code.

  dev/ptx.py            writes both; needs clang 14 or newer, and for the table ptxas, which comes with the CUDA toolkit
  dev/ptx.py --check    prints differences; exit code 1 if there are any (dev/check.py runs the same check, without a compiler)

The code is for compute capability 7.0 and drivers from 11.0 on, which compile it for their device when they load it. Its first
line names the source by a digest that comments and line breaks do not change."""
import hashlib
import lzma
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parent.parent
FOLDER = TOP / "src/device/cuda/kernels"
WRITTEN = FOLDER / "kernels.ptx.xz"
SOURCES = ("kernels/lanes.h", "kernels/formats.h", "kernels/kernel_lists.h", "device/cuda/kernels/gpu_kernels.h",
           "device/cuda/kernels/gpu_kernel_body.h")
PAGE = TOP / "docs/gpu.md"
BLOCK = re.compile(r"(<!-- dev/ptx.py -->\n).*?(<!-- end -->\n)", re.S)
# No toolkit is used. Products are not fused with sums, so results have the same bits as those of the processor's kernels.
FLAGS = ("--cuda-device-only", "-nocudainc", "-nocudalib", "--cuda-gpu-arch=sm_70", "-Xclang", "-target-feature", "-Xclang", "+ptx70",
         "-O2", "-fno-unroll-loops", "-ffp-contract=off", "-Wno-unknown-cuda-version", "-D_GNU_SOURCE")
COMPILERS = ("clang-14", "clang", *(f"clang-{version}" for version in range(15, 30)))
DEVICES = (75, 80, 86, 89, 90, 100, 120)  # devices for which ptxas reports registers
THREADS = 512
# Inexact or slow instructions: fused, flushing subnormals to zero, approximate, rounded as the assembler chooses, spilled.
REFUSED = re.compile(r"\b(?:fma\.|mad\.\w+\.f)|\.ftz|\.approx|\b(?:add|sub|mul|div)\.f(?:32|64)\b|\.local")


def digest(texts):
    """Returns the digest of sources without comments; white space counts as one space."""
    code = [" ".join(re.sub(r"/\*.*?\*/|\\\n", " ", text, flags=re.S).split()) for text in texts]
    return hashlib.sha256("\n".join([*FLAGS, *code]).encode()).hexdigest()[:32]


def source_digest():
    return digest((TOP / "src" / name).read_text() for name in SOURCES)


def committed():
    """Returns the code in the tree."""
    return lzma.decompress(WRITTEN.read_bytes()).decode("ascii")


def differences(code=None):
    """Yields the faults of some code, by default that in the tree, as texts."""
    text = committed() if code is None else code
    made_from = re.match(r"// Written by dev/ptx.py from source (\w+)", text)
    if not made_from or made_from[1] != source_digest():
        yield 1, "its source is another one now: run dev/ptx.py (which needs clang)"
    for number, line in enumerate(text.splitlines(), 1):
        if REFUSED.search(line):
            yield number, f"\"{line.strip()}\" has other bits than the processor's kernels, or is slow: look at the flags of dev/ptx.py"


# ---- Compiling -----------------------------------------------------------------------------------------------------------


def compile_ptx(compiler):
    """Returns the code, without comments."""
    command = [compiler, "-x", "cuda", *FLAGS, f"-I{TOP}/include", f"-I{TOP}/src", "-S", str(FOLDER / "gpu_kernel_body.h"), "-o", "-"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    version = subprocess.run([compiler, "-dumpversion"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    lines = (line.split("//")[0].rstrip() for line in result.stdout.splitlines())
    head = f"// Written by dev/ptx.py from source {source_digest()}, with clang {version}.\n"
    return head + "\n".join(filter(None, lines)) + "\n"


# ---- Registers, from the assembler -----------------------------------------------------------------------------------------


def find_ptxas():
    places = [pathlib.Path(folder) / "bin" for folder in sorted(pathlib.Path("/usr/local").glob("cuda*"))]
    return shutil.which("ptxas", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)]))


def registers(ptxas, device):
    """Returns the registers of each kernel on a device of that compute capability. Ends the program if one needs local
    memory."""
    with tempfile.NamedTemporaryFile() as binary, tempfile.NamedTemporaryFile("w", suffix=".ptx") as code:
        code.write(committed())
        code.flush()
        command = [ptxas, f"-arch=sm_{device}", "-v", code.name, "-o", binary.name]
        told = subprocess.run(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, check=True).stdout
    used = {}
    for entry in told.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", entry)[1]
        if not re.search(r"\b0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", entry):
            sys.exit(f"{name} needs local memory on sm_{device}:\n{entry}")
        used[name] = int(re.search(r"Used (\d+) registers", entry)[1])
    return used


def kind_of(name):
    """Returns the kernel's row of the table."""
    reduction = re.match(r"reduce_([A-Z]+\d+)_", name)
    return f"reductions of {reduction[1].lower()}" if reduction else name


def most_registers(ptxas, device):
    """Returns a column of the table: the most registers of any kernel, by row."""
    most = {}
    for name, count in reversed(registers(ptxas, device).items()):
        most[kind_of(name)] = max(count, most.get(kind_of(name), 0))
    return most


def table(ptxas):
    columns = [most_registers(ptxas, device) for device in DEVICES]
    lines = [f"| kernel | {' | '.join(f'sm_{device}' for device in DEVICES)} |", "|---|" + "---:|" * len(DEVICES)]
    lines += [f"| {kind} | {' | '.join(str(column[kind]) for column in columns)} |" for kind in columns[0]]
    return "\n".join(lines) + "\n"


def write():
    compiler, ptxas = next(filter(None, map(shutil.which, COMPILERS)), None), find_ptxas()
    if not compiler:
        sys.exit("dev/ptx.py needs clang 14 or newer")
    WRITTEN.write_bytes(lzma.compress(compile_ptx(compiler).encode("ascii"), preset=9 | lzma.PRESET_EXTREME))
    for line, mend in differences():
        print(f"{WRITTEN.relative_to(TOP)}:{line}: {mend}")
    if not ptxas:
        print("no ptxas: the table of docs/gpu.md stays as it was")
        return
    text = table(ptxas)
    PAGE.write_text(BLOCK.sub(lambda match: match[1] + text + match[2], PAGE.read_text()))
    print(text, end="")


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    if not sys.argv[1:]:
        write()
    found = list(differences())
    for line, mend in found:
        print(f"{WRITTEN.relative_to(TOP)}:{line}: {mend}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
