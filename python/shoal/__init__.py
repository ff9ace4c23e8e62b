"""Shoal, collective communication for data-parallel training. This package locates the C library, its header and its command.

`import shoal.torch` registers the back-end "shoal" with torch.distributed."""
import os
import pathlib

__version__ = "0.1.0"

_PACKAGE = pathlib.Path(__file__).resolve().parent


def library_path() -> pathlib.Path:
    """The path of libshoal.so: $SHOAL_LIBRARY if it is set, else the library installed with this package."""
    named = os.environ.get("SHOAL_LIBRARY")
    if named:
        return pathlib.Path(named)
    return _existing(_PACKAGE / "lib/libshoal.so.0")


def include_path() -> pathlib.Path:
    """The folder that holds shoal/shoal.h."""
    checkout = _PACKAGE.parents[1]
    for folder in (_PACKAGE / "include", checkout / "include"):
        if (folder / "shoal/shoal.h").is_file():
            return folder
    return _existing(_PACKAGE / "include")


def command_path() -> pathlib.Path:
    """The path of the command `shoal`: the one installed with this package, else the one in the folder of $SHOAL_LIBRARY."""
    installed = _PACKAGE / "bin/shoal"
    return installed if installed.is_file() else _existing(library_path().parent / "shoal")


def _existing(path: pathlib.Path) -> pathlib.Path:
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: `pip install .` puts it there; in a checkout, `make build` and "
                                "SHOAL_LIBRARY=build/libshoal.so do")
    return path
