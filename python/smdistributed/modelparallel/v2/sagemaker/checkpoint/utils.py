"""Limits the number of checkpoints in a folder."""
import contextlib
import os
import re
import shutil

from torch.sagemaker.logger import get_logger


def SORT_BY_LAST_INT(name):  # noqa: N802  the vendor's name
    """Returns the last number in a folder's name: the step, in `llama-120steps`. -1 if there is none."""
    numbers = re.findall(r"\d+", os.path.basename(name))
    return int(numbers[-1]) if numbers else -1


def SORT_BY_TIME(name):  # noqa: N802
    """Returns when a folder was last changed."""
    return os.stat(name).st_mtime_ns


def limit_num_subdirs(path, max_num, sort_fn=SORT_BY_TIME, regex=None, log=True):
    """Removes checkpoints from the folder that has `path`, the first ones in the order of sort_fn, so that max_num remain. Returns the
    names of those removed.

    path: the full path of the checkpoint written last, or of a part in it, such as `llama-120steps/tp2-0`. regex: only folders whose
    name matches count. log: true on the one rank that removes; on others nothing happens."""
    if not log or max_num is None or max_num <= 0:
        return []
    folders = _siblings(_checkpoint_of(os.path.abspath(path), regex), regex)
    removed = sorted(folders, key=sort_fn)[:-max_num]
    for folder in removed:
        get_logger().info("removing the checkpoint %s: %d are kept", folder, max_num)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
    return [os.path.basename(folder) for folder in removed]


def _checkpoint_of(path, regex):
    """Returns the innermost folder of a path whose name matches, or the path."""
    found = path
    while regex is not None and not re.match(regex, os.path.basename(found)):
        if os.path.dirname(found) == found:
            return path
        found = os.path.dirname(found)
    return found


def _siblings(path, regex):
    """Returns the folders in the folder that has `path`, which need not exist."""
    try:
        with os.scandir(os.path.dirname(path)) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)
                    and (regex is None or re.match(regex, entry.name))]
    except FileNotFoundError:
        return []
