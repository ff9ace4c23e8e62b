"""Shoal, collective communication for data-parallel training: where the C library, its header and its command are.

`import shoal.torch` makes the backend "shoal" known to torch.distributed."""
import os
import pathlib

__version__ = "0.1.0"

_PACKAGE = pathlib.Path(__file__).resolve().parent


def library_path() -> pathlib.Path:
    """libshoal.so: $SHOAL_LIBRARY if that is set, else the copy that was installed with this package."""
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
    """The command `shoal`: the one that was installed with this package, else the one beside $SHOAL_LIBRARY."""
    installed = _PACKAGE / "bin/shoal"
    return installed if installed.is_file() else _existing(library_path().parent / "shoal")


def _existing(path: pathlib.Path) -> pathlib.Path:
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: `pip install .` puts it there; in a checkout, `make build` and "
                                "SHOAL_LIBRARY=build/libshoal.so do")
    return path
