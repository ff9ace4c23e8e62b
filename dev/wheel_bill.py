"""The libraries that a wheel carries with Shoal's own: their licences, and the bill of materials (PEP 770) that names them.
dev/wheels.py calls it."""
import collections
import datetime
import hashlib
import importlib.metadata
import json
import pathlib
import re
import shutil
import uuid

# What a wheel carries. `files`: its files in the wheel. `origin`: the distribution on PyPI that they come from. `licence_file`:
# in the compiled wheel, or in the packages of the tools.
Component = collections.namedtuple("Component", "name version licence source files origin licence_file note")
COMPONENTS = (
    Component("libfabric", "2.5.1", "BSD-2-Clause", "https://github.com/ofiwg/libfabric",
              ("shoal/lib/libfabric.so.1", "shoal/lib/libfabric/libefa-fi.so", "shoal/lib/libfabric/libverbs-fi.so"), "openmpi",
              "shoal/licenses/libfabric.txt", "Offered under BSD-2-Clause or GPL-2.0; taken under BSD-2-Clause."),
    Component("libsodium", "1.0.22", "ISC", "https://github.com/jedisct1/libsodium", ("shoal/lib/libsodium.so",), "pyzmq",
              "shoal/licenses/libsodium.txt", "Unchanged except for its name."),
)
# The compiler links parts of its runtime, such as 128-bit arithmetic, into these.
COMPILED = ("shoal/lib/libshoal.so.0", "shoal/lib/libshoal_tensorflow.so", "shoal/bin/shoal")
RUNTIME = ("zig-compiler-rt", "MIT", "https://codeberg.org/ziglang/zig")
OWN_LICENCE = "Apache-2.0"


class Unknown(Exception):
    """The wheel carries something else than this page says; the text names it."""


def add(content, one, bundle, tools, headers, shims):
    """Moves the licences into the unpacked wheel's dist-info, names them in its metadata, and writes the bill of materials.
    `one` has the machine, the commit and its time (`epoch`). `tools` is the environment that made the wheel; `headers` has the
    versions of headers that it was compiled with; `shims` is what dev/wheel_shims.py returned."""
    info = next(content.glob("*.dist-info"))
    components = [*COMPONENTS, runtime_of(tools, shims), *headers_of(shims, one.folder)]
    headers = {**headers, **{f"python{python.version}": python.exact for python in shims.pythons}}
    for component in components:
        place_licence(component, content, info, tools)
    shutil.rmtree(content / "shoal/licenses")
    name_licences(info / "METADATA", components)
    listed = [describe(component, content, bundle) for component in components]
    (info / "sboms").mkdir()
    text = json.dumps(bill(info, one, listed, tool_versions(tools, headers)), indent=2, sort_keys=True)
    (info / "sboms/shoal.cdx.json").write_text(text + "\n")


def runtime_of(tools, shims):
    name, licence, source = RUNTIME
    return Component(name, version_in(tools, "ziglang"), licence, source, (*COMPILED, *shims.files), "ziglang", "ziglang/LICENSE",
                     "Linked into these files by the compiler.")


def headers_of(shims, folder):
    """Returns the components whose headers have code that is compiled into the shims."""
    if not shims.files:
        return []
    licence = folder / "pytorch.txt"
    licence.write_text("\n\n".join(path.read_text() for path in shims.torches[-1].licences))
    versions = ", ".join(torch.version for torch in shims.torches)
    return [Component("pytorch", versions, "BSD-3-Clause", "https://github.com/pytorch/pytorch", tuple(shims.files), "torch",
                      licence, "Code of its headers, and of pybind11's, which it contains, is compiled into these files."),
            Component("libstdc++", shims.library.release, "GPL-3.0-or-later WITH GCC-exception-3.1", "https://gcc.gnu.org/git/gcc.git",
                      tuple(shims.files), None, libstdcxx_licence(shims.library),
                      "Code of its headers is compiled into these files, which the exception permits under any terms.")]


def libstdcxx_licence(library):
    """Returns Debian's file about libstdc++, or else a header, which begins with the licence."""
    files = sorted(pathlib.Path("/usr/share/doc").glob(f"*gcc-{library.release}-base*/copyright"))
    return files[0] if files else library.folders[0] / "bits/c++allocator.h"


def version_in(tools, name):
    """Returns the version of a distribution in a virtual environment."""
    folders = [str(path) for path in sorted(tools.glob("lib/python3*/site-packages"))]
    found = next(iter(importlib.metadata.distributions(name=name, path=folders)), None)
    if not found:
        raise Unknown(f"{tools} has no {name}: remove the folder, and `make wheels` makes it again")
    return found.version


def place_licence(component, content, info, tools):
    candidates = (content / component.licence_file, *tools.glob(f"lib/python3*/site-packages/{component.licence_file}"))
    found = next((path for path in candidates if path.is_file()), None)
    if not found:
        raise Unknown(f"there is no {component.licence_file}, the licence of {component.name}")
    shutil.copyfile(found, info / "licenses" / f"{component.name}.txt")


def name_licences(metadata, components):
    text = metadata.read_text()
    expression = " AND ".join([OWN_LICENCE, *sorted({component.licence for component in components})])
    files = "".join(f"License-File: {component.name}.txt\n" for component in components)
    text, expressions = re.subn(r"^License-Expression: .*$", f"License-Expression: {expression}", text, count=1, flags=re.M)
    text, places = re.subn(r"^(License-File: LICENSE\n)", rf"\1{files}", text, count=1, flags=re.M)
    if not expressions or not places:
        raise Unknown(f"{metadata} names no licence: did pyproject.toml change?")
    metadata.write_text(text)


def digest(path):
    return [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}]


def describe(component, content, bundle):
    """Returns a component of the bill. Its files are components within it, with their digests."""
    files = [content / name for name in component.files]
    for path in files:
        if not path.is_file():
            raise Unknown(f"{path.name} is missing: the build found no {component.name} in {bundle}")
    if component in COMPONENTS and component.version.encode() + b"\0" not in files[0].read_bytes():
        raise Unknown(f"{files[0].name} of {component.origin} is not version {component.version}: did "
                      "dev/wheel_bundle.txt change? COMPONENTS in dev/wheel_bill.py names the version")
    return {
        "type": "library", "bom-ref": component.name, "name": component.name, "version": component.version,
        "description": component.note, "licenses": [licence_of(component)],
        "externalReferences": [{"type": "vcs", "url": component.source}, *origins(component, bundle)],
        "components": [{"type": "file", "bom-ref": f"{component.name}:{name}", "name": name, "hashes": digest(content / name)}
                       for name in component.files],
    }


def licence_of(component):
    is_expression = " " in component.licence
    return {"expression": component.licence} if is_expression else {"license": {"id": component.licence}}


def origins(component, bundle):
    """Returns the wheel that a component was taken from, if there is one."""
    if component.origin in (None, "torch"):
        return []
    if component not in COMPONENTS:
        return [{"type": "distribution", "url": f"pkg:pypi/{component.origin}@{component.version}"}]
    found = next((bundle / "files").glob(f"{component.origin}-*.whl"))
    version = found.name.split("-")[1]
    url = f"pkg:pypi/{component.origin}@{version}?file_name={found.name}"
    return [{"type": "distribution", "url": url, "hashes": digest(found)}]


def tool_versions(tools, headers):
    programs = {name: version_in(tools, name) for name in ("meson", "meson-python", "wheel", "ziglang")}
    return [*({"type": "application", "name": name, "version": version} for name, version in programs.items()),
            *({"type": "library", "name": name, "version": version} for name, version in headers.items())]


def bill(info, one, components, tools):
    """Returns the bill of materials, in CycloneDX. Nothing in it depends on when or where it is written."""
    version = info.name.removesuffix(".dist-info").partition("-")[2]
    purl = f"pkg:pypi/shoal@{version}?file_name=shoal-{version}-py3-none-manylinux_2_28_{one.machine}.whl"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX", "specVersion": "1.6",
        "version": 1, "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{purl}#{one.commit}')}",
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(one.epoch, datetime.timezone.utc).isoformat(),
            "component": {"type": "library", "bom-ref": "shoal", "name": "shoal", "version": version,
                          "purl": purl, "licenses": [{"license": {"id": OWN_LICENCE}}],
                          "properties": [{"name": "shoal:commit", "value": one.commit}]},
            "tools": {"components": tools},
        },
        "components": components,
        "dependencies": [{"ref": "shoal", "dependsOn": sorted(component["bom-ref"] for component in components)},
                         *({"ref": component["bom-ref"]} for component in components)],
    }
