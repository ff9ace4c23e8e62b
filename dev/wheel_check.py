"""Checks of a finished wheel. Each function returns problems, one sentence each; none means that it found nothing wrong.
dev/wheels.py calls them. They read the wheel's files only, so a wheel for another processor is checked as well."""
import base64
import csv
import hashlib
import io
import json
import pathlib
import re
import subprocess
import tempfile
import zipfile

NAME = re.compile(r"shoal-(?P<version>[\d.]+)-py3-none-manylinux_2_(?P<glibc>\d+)_(?P<machine>x86_64|aarch64)\.whl")
MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}  # as readelf prints them
# What every system of manylinux_2_28 has (the policy of PEP 600), as far as libraries in C use it.
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "ld-linux-x86-64.so.2",
          "ld-linux-aarch64.so.1"}
# libfabric loads its providers for network cards only if the machine has the libraries of rdma-core, which belong to its
# driver. So these two may need them, and nothing else may.
RDMA_CORE = {"libefa.so.1", "libibverbs.so.1", "librdmacm.so.1"}
PROVIDERS = {"shoal/lib/libfabric/libefa-fi.so", "shoal/lib/libfabric/libverbs-fi.so"}
# The shims of torch (dev/wheel_shims.py) are loaded by a torch that has loaded these already.
SHIM = re.compile(r"shoal/torch/compiled/shoal_torch-(?P<torch>[\d.]+)-(?P<inputs>\w+)\.cpython-\d+-\w+-linux-gnu\.so")
TORCH = {"libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so", "libstdc++.so.6", "libgcc_s.so.1"}
NEWEST_CXX = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}  # the policy of manylinux_2_28
BUNDLED = {"shoal/lib/libfabric.so.1", "shoal/lib/libsodium.so", *PROVIDERS}
REQUIRED = BUNDLED | {"shoal/lib/libshoal.so.0", "shoal/lib/libshoal_tensorflow.so", "shoal/bin/shoal", "shoal/__init__.py",
                      "shoal/include/shoal/shoal.h"}
READELF_TIMEOUT_S = 60
TOOL_TIMEOUT_S = 300


def problems_of(wheel):
    wheel = pathlib.Path(wheel)
    name = NAME.fullmatch(wheel.name)
    if not name:
        return [f"its name is not shoal-VERSION-py3-none-manylinux_2_28_MACHINE.whl but {wheel.name}"]
    with zipfile.ZipFile(wheel) as archive:
        files = {entry: archive.read(entry) for entry in archive.namelist()}
    info = f"shoal-{name['version']}.dist-info"
    return [*(f"{file} is missing" for file in sorted(REQUIRED - files.keys())), *problems_of_tags(files, info, name),
            *problems_of_record(files, f"{info}/RECORD"), *problems_of_libraries(files, name), *problems_of_bill(files, info),
            *problems_of_launchers(files)]


def problems_of_launchers(files):
    """Without PMIx's header at build time, mpirun and srun cannot start a job."""
    library = "shoal/lib/libshoal.so.0"
    return [] if b"libpmix.so.2\0" in files.get(library, b"libpmix.so.2\0") else [f"{library} was built without PMIx"]


def problems_of_tags(files, info, name):
    tag = f"py3-none-manylinux_2_{name['glibc']}_{name['machine']}"
    named = re.findall(r"^Tag: (.*)$", files.get(f"{info}/WHEEL", b"").decode(), re.M)
    return [] if named == [tag] else [f"{info}/WHEEL names the tags {named}, not {tag}"]


def problems_of_record(files, record):
    """RECORD lists each file with its digest and size, and nothing else."""
    if record not in files:
        return [f"{record} is missing"]
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(files[record].decode()))}
    problems = [f"RECORD and the wheel disagree about {name}: only one has it" for name in sorted(rows.keys() ^ files.keys())]
    for name in sorted((rows.keys() & files.keys()) - {record}):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        if rows[name] != [f"sha256={digest}", str(len(files[name]))]:
            problems.append(f"RECORD has another digest or size for {name}: {rows[name]}")
    return problems


def problems_of_libraries(files, name):
    problems = []
    own = {pathlib.PurePosixPath(file).name for file in files}
    for file in sorted(file for file, content in files.items() if content.startswith(b"\x7fELF")):
        facts = read_elf(files[file])
        allowed = SYSTEM | own | (RDMA_CORE if file in PROVIDERS else TORCH if SHIM.fullmatch(file) else set())
        problems += [f"{file} is for {facts['machine']}"] * (facts["machine"] != MACHINES[name["machine"]])
        problems += [f"{file} needs {library}, which neither the wheel nor every system has"
                     for library in sorted(facts["needed"] - allowed)]
        problems += [f"{file} needs GLIBC_{'.'.join(map(str, version))}, which glibc 2.{name['glibc']} lacks"
                     for version in sorted(facts["GLIBC"]) if version > (2, int(name["glibc"]))]
        problems += [f"{file} needs {kind}_{'.'.join(map(str, version))}, newer than manylinux_2_28 has" for kind, newest in NEWEST_CXX.items()
                     for version in sorted(facts[kind]) if version > newest]
        problems += [f"{file} searches for libraries in {path}" for path in facts["paths"] if not path.startswith("$ORIGIN")]
        problems += [f"{file} changes its own code when it is loaded (TEXTREL)"] * facts["has_text_relocations"]
        problems += [f"{file} names a folder of the machine that built it: {folder.decode()}"
                     for folder in sorted(set(re.findall(rb"/(?:tmp|home|root)/[\w./-]*shoal[\w./-]*", files[file])))]
    return problems


def read_elf(content):
    """Returns what readelf prints about a library or program."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        command = ["readelf", "--wide", "--file-header", "--dynamic", "--version-info", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=READELF_TIMEOUT_S,
                              env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"}).stdout
    paths = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text)
    return {
        "machine": re.search(r"^ *Machine: *(.*?) *$", text, re.M)[1],
        "needed": set(re.findall(r"\(NEEDED\).*\[(.*)\]", text)),
        "paths": [path for one in paths for path in one.split(":")],
        **{kind: {tuple(map(int, version.split("."))) for version in re.findall(rf"Name: {kind}_([\d.]+)", text)}
           for kind in ("GLIBC", "GLIBCXX", "CXXABI")},
        "has_text_relocations": "(TEXTREL)" in text,
    }


def problems_of_bill(files, info):
    """The bill of materials has each bundled library with its digest, version, licence and source."""
    try:
        bill = json.loads(files[f"{info}/sboms/shoal.cdx.json"])
    except (KeyError, ValueError) as fault:
        return [f"it has no bill of materials ({info}/sboms/shoal.cdx.json): {fault!r}"]
    problems, listed = [], set()
    for component in bill["components"]:
        for field in ("version", "licenses", "externalReferences"):
            problems += [] if component.get(field) else [f"the bill of materials names no {field} of {component['name']}"]
        if f"{info}/licenses/{component['name']}.txt" not in files:
            problems.append(f"{info}/licenses has no {component['name']}.txt")
        for file in component.get("components", ()):
            listed.add(file["name"])
            digest = hashlib.sha256(files.get(file["name"], b"")).hexdigest()
            if digest != file["hashes"][0]["content"]:
                problems.append(f"the bill of materials has another digest for {file['name']}")
    libraries = {file for file, content in files.items() if content.startswith(b"\x7fELF")}
    return problems + [f"the bill of materials does not name {file}" for file in sorted(libraries - listed)]


VALIDATE = """
import sys, zipfile
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
archive = zipfile.ZipFile(sys.argv[1])
name = next(name for name in archive.namelist() if name.endswith(".cdx.json"))
error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(archive.read(name).decode())
sys.exit(f"{name}: {error}" if error else 0)
"""


def problems_by_others(wheel, python):
    """What auditwheel and CycloneDX's own schema find, with the Python that has them."""
    problems = []
    code, out, err = called(python, "-c", VALIDATE, wheel)
    if code:
        problems.append(f"its bill of materials is not CycloneDX 1.6: {(out + err).strip()}")
    with tempfile.TemporaryDirectory() as nowhere:  # it would follow this machine's rdma-core to newer symbols
        code, out, err = called(python, "-m", "auditwheel", "show", "--json", "--ldpaths", nowhere, wheel)
    if code:
        return [*problems, f"auditwheel cannot read it: {(out + err).strip()}"]
    facts, name = json.loads(out), NAME.fullmatch(wheel.name)
    found = re.match(r"manylinux_2_(\d+)_", facts["sym_tag"])
    if not found or int(found[1]) > int(name["glibc"]):
        problems.append(f"auditwheel says that its symbols are of {facts['sym_tag']}")
    with zipfile.ZipFile(wheel) as archive:  # a shim finds libshoal loaded, wherever its file is
        own = {pathlib.PurePosixPath(file).name for file in archive.namelist()}
    missing = sorted(facts["external_libs"].keys() - RDMA_CORE - TORCH - own)
    return problems + [f"auditwheel says that it needs {library} from the machine" for library in missing]


def called(*words):
    done = subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=TOOL_TIMEOUT_S)
    return done.returncode, done.stdout, done.stderr
