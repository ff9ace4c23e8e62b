#!/usr/bin/env python3
"""Prints which libraries the wheel carries, and their licences: a line `FILE -> PLACE` for each, PLACE in the package. They
come out of wheels that pyproject.toml names as build requirements; for one that is not installed there is only a warning."""
import importlib.metadata
import re
import sys

# distribution, file in it, place in the package. Providers for network cards are libraries of their own, beside libfabric.
BUNDLED = (
    ("openmpi", r"/libfabric\.so\.1$", "lib/libfabric.so.1"),
    ("openmpi", r"/libfabric/libefa-fi\.so$", "lib/libfabric/libefa-fi.so"),
    ("openmpi", r"/libfabric/libverbs-fi\.so$", "lib/libfabric/libverbs-fi.so"),
    ("openmpi", r"/LICENSE\.ofi$", "licenses/libfabric.txt"),
    ("pyzmq", r"/libsodium-[^/]*\.so[^/]*$", "lib/libsodium.so"),
    ("pyzmq", r"/LICENSE\.libsodium\.txt$", "licenses/libsodium.txt"),
)


def find(distribution, pattern):
    """The one file of an installed distribution that fits; None: the distribution is not installed."""
    try:
        files = importlib.metadata.files(distribution)
    except importlib.metadata.PackageNotFoundError:
        print(f"bundled.py: {distribution} is not installed, so the wheel is made without its files", file=sys.stderr)
        return None
    found = [file for file in files or () if re.search(pattern, f"/{file}")]
    if len(found) != 1:
        sys.exit(f"bundled.py: {len(found)} files of {distribution} fit {pattern}, not one; did its wheel change? "
                 "pyproject.toml names the version that this was written for")
    return found[0].locate().resolve()


for distribution, pattern, place in BUNDLED:
    path = find(distribution, pattern)
    if path:
        print(f"{path} -> {place}")
