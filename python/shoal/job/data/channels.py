"""Data in: fills the folder of an input channel on each host before the script starts.

    document: Channel("s3://bucket/train")  -->  listing  -->  fetching.Cache  -->  hosts/algo-1/input/data/training/...

A channel's folder appears whole or not at all: it is built under a temporary name and then renamed. Local data are linked, not
copied."""
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import random
import shutil
from typing import Any, Callable, Dict, List, Optional, Tuple

from shoal.job.data.fetching import SPARE_BYTES, Cache, Progress, Report, Say, bytes_text, cache_folder, local_errors
from shoal.job.data.storage import FullError, Item, LocalStore, StorageError, Store, store_open
from shoal.job.document import Channel, local_path

FICLONE = 0x40049409

Named = Tuple[str, Item]  # the name below the channel's folder, and the object


class ChannelError(StorageError):
    """The document asks for data that do not exist or cannot be served. The message is one line."""


def channel_bring(channel: Channel, folder: pathlib.Path, host_index: int, host_count: int, say: Say,
                  report: Report = lambda amount: None) -> None:
    """Fills `folder`. Passes `say` a line now and then, and `report` the amount that has arrived. Raises StorageError; then
    `folder` has nothing half-written, and what has arrived stays in the cache for the next time."""
    _check(channel)
    folder = folder.absolute()
    path = local_path(channel.uri)
    if path is not None and channel.data_type == "S3Prefix" and not path.exists():
        raise ChannelError(f"there is no {path}")
    if path is not None and channel.data_type == "S3Prefix" and channel.distribution == "FullyReplicated":
        _local_link(path, folder)
        return
    store, named = _listing(channel)
    own = _share(channel, named, host_index, host_count)
    if not own:
        say(f"channel {folder.name}: {len(named)} objects for {host_count} hosts: this host gets none")
    if isinstance(store, LocalStore):
        _assemble(folder, own, lambda name, item, place: place.symlink_to(item.key))
    else:
        if channel.input_mode == "FastFile":
            say(f"channel {folder.name}: also with FastFile, all data are fetched before the script starts")
        _bring(folder, store, own, host_index / host_count, say, report)


def file_bring(uri: str, path: pathlib.Path) -> None:
    """Downloads one object to a file, whole or not at all. Raises StorageError."""
    store, key = store_open(uri)
    item = store.info(key)
    if item is None:
        raise ChannelError(f"there is no {uri}")
    coming = path.with_name(f".{path.name}.coming")
    try:
        with local_errors(path):
            with open(coming, "wb") as file:
                store.read(item, 0, item.size, lambda data: _write(file, data))
            os.replace(coming, path)
    finally:
        coming.unlink(missing_ok=True)


def _write(file: Any, data: bytes) -> None:
    with local_errors(file.name):
        file.write(data)


def _check(channel: Channel) -> None:
    """Refuses what reading.py accepts in a vendor's document, and what it could not know."""
    if channel.input_mode not in ("File", "FastFile"):
        raise ChannelError(f"input mode {channel.input_mode} is not served: use File")
    if channel.data_type not in ("S3Prefix", "ManifestFile"):
        raise ChannelError(f"data type {channel.data_type} is not served: use S3Prefix or ManifestFile")
    if channel.distribution not in ("FullyReplicated", "ShardedByS3Key"):
        raise ChannelError(f"distribution {channel.distribution} is not served: use FullyReplicated or ShardedByS3Key")
    if channel.compression not in (None, "None"):
        raise ChannelError(f"compression {channel.compression} belongs to the mode Pipe: unpack in the script, or store the "
                           "data unpacked")
    if channel.record_wrapping not in (None, "None"):
        raise ChannelError(f"record wrapping {channel.record_wrapping} belongs to the mode Pipe")


# ---- listing ----

def _listing(channel: Channel) -> Tuple[Store, List[Named]]:
    """Lists all objects of a channel with their names, sorted by key."""
    if channel.data_type == "ManifestFile":
        store, named = _manifest_listing(channel.uri)
    else:
        store, key = store_open(channel.uri)
        named = [(_name(item.key, key), item) for item in _without_markers(store, store.list(key))]
    if not named:
        raise ChannelError(f"there is no object at {channel.uri}: the key of an object has to begin with this text")
    _check_names(store, named)
    return store, named


def _without_markers(store: Store, items: List[Item]) -> List[Item]:
    """Leaves out empty objects whose keys end in a slash: they represent folders."""
    for item in items:
        if item.key.endswith("/") and item.size:
            raise ChannelError(f"{store.uri(item.key)} has {item.size:,} bytes and the name of a folder: no file can be made "
                               "of it")
    return [item for item in items if not item.key.endswith("/")]


def _name(key: str, prefix: str) -> str:
    """Returns the file's name, as the SDK's local mode chooses it: what follows the prefix. If the prefix is the key itself,
    the name is the whole last part of the key."""
    rest = key.rsplit("/", 1)[-1] if key == prefix else key[len(prefix):]
    return "/".join(part for part in rest.split("/") if part)


def _manifest_listing(uri: str) -> Tuple[Store, List[Named]]:
    """Lists exactly the objects that a manifest names. A manifest is `[{"prefix": "s3://bucket/"}, "a", "b/c"]`."""
    store, key = store_open(uri)
    item = store.info(key)
    if item is None:
        raise ChannelError(f"there is no manifest {uri}")
    prefix, names = _manifest_read(uri, store.read_all(item))
    names = list(dict.fromkeys(names))
    store, start = store_open(prefix)
    wanted = [start + name for name in names]
    found = store.list(os.path.commonprefix(wanted)) if store.scheme == "s3" and wanted else map(store.info, wanted)
    there = {one.key: one for one in found if one}
    missing = [key for key in wanted if key not in there]
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise ChannelError(f"the manifest {uri} names {store.uri(missing[0])}{more}, which is not there")
    named = [(name.lstrip("/"), there[key]) for name, key in zip(names, wanted)]
    return store, sorted(named, key=lambda one: one[1].key.encode())


def _manifest_read(uri: str, data: bytes) -> Tuple[str, List[str]]:
    form = 'it has to be [{"prefix": "s3://BUCKET/..."}, "KEY", ...]'
    try:
        entries = json.loads(data)
    except ValueError as error:
        raise ChannelError(f"the manifest {uri} is not JSON ({error}): {form}") from error
    head = entries[0] if isinstance(entries, list) and entries else None
    if not isinstance(head, dict) or not isinstance(head.get("prefix"), str):
        raise ChannelError(f"the manifest {uri} does not begin with a prefix: {form}")
    wrong = next((entry for entry in entries[1:] if not isinstance(entry, str)), None)
    if wrong is not None:
        raise ChannelError(f"the manifest {uri} has the entry {json.dumps(wrong)}: {form}")
    return head["prefix"], entries[1:]


def _check_names(store: Store, named: List[Named]) -> None:
    """Checks that each name is a different file below the channel's folder."""
    seen: Dict[str, Item] = {}
    folders: Dict[str, Item] = {}
    for name, item in named:
        parts = name.split("/")
        if ".." in parts or "." in parts or "" in parts or "\0" in name:
            raise ChannelError(f"{store.uri(item.key)} makes no name of a file below the channel's folder: rename the object")
        if name in seen:
            raise ChannelError(f"{store.uri(seen[name].key)} and {store.uri(item.key)} would both be the file {name}")
        seen[name] = item
        for end in range(1, len(parts)):
            folders.setdefault("/".join(parts[:end]), item)
    for name in seen:
        if name in folders:
            raise ChannelError(f"{store.uri(seen[name].key)} would be a file and, for {store.uri(folders[name].key)}, a "
                               "folder: choose a prefix that holds one of them")


def _share(channel: Channel, named: List[Named], host_index: int, host_count: int) -> List[Named]:
    """Returns this host's objects. With ShardedByS3Key, object i of the sorted keys belongs to host i mod n. A seed shuffles
    the keys first, in the same order on all hosts."""
    order = list(named)
    if channel.shuffle_seed is not None:
        random.Random(channel.shuffle_seed).shuffle(order)
    return order[host_index::host_count] if channel.distribution == "ShardedByS3Key" else order


# ---- filling the channel's folder ----

def _local_link(path: pathlib.Path, folder: pathlib.Path) -> None:
    with local_errors(folder):
        if path.is_dir():
            _remove(folder)
            folder.symlink_to(path.resolve())
    if not path.is_dir():
        _assemble(folder, [(path.name, Item(str(path.resolve()), 0))], lambda name, item, place: place.symlink_to(item.key))


def _bring(folder: pathlib.Path, store: Store, named: List[Named], offset: float, say: Say, report: Report) -> None:
    """Downloads all bytes now. Hosts that need the same objects begin at different ones."""
    first = int(offset * len(named))
    items = [item for _, item in named[first:] + named[:first]]
    progress = Progress(f"channel {folder.name}", len(items), sum(item.size for item in items), say, report)
    cache = Cache(cache_folder(folder), store)
    cache.bring_all(items, progress)
    place_at = _way_to_place(cache.path(items[0]), folder, progress.size, say) if items else link
    try:
        _assemble(folder, named, lambda name, item, place: place_at(cache.path(item), place))
    except FullError:
        if place_at is not _copy:
            raise
        _no_room_say(folder, progress.size, say)
        _assemble(folder, named, lambda name, item, place: link(cache.path(item), place))
    progress.end()


def _way_to_place(first: pathlib.Path, folder: pathlib.Path, size: int, say: Say) -> Callable[[pathlib.Path, pathlib.Path], None]:
    """Returns the function that gives a file of the cache its name in the channel. All hosts of the machine and later jobs
    share the cache, so nobody may write to its files. A script that nevertheless could, such as root's, gets copies of its
    own."""
    if not os.access(first, os.W_OK):
        return link
    probe = folder.with_name(f".{folder.name}.clone")
    with local_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            is_cheap = _clone(first, probe)
        finally:
            probe.unlink(missing_ok=True)
        room = os.statvfs(folder.parent)
    if is_cheap or size + SPARE_BYTES <= room.f_bavail * room.f_frsize:
        return _copy
    _no_room_say(folder, size, say)
    return link


def _no_room_say(folder: pathlib.Path, size: int, say: Say) -> None:
    say(f"channel {folder.name}: there is no room for a second copy of {bytes_text(size)}, so its files are those of the cache: a script that "
        "writes to them changes them for all hosts of this machine")


def _clone(source: pathlib.Path, place: pathlib.Path) -> bool:
    """Makes a file that shares its blocks with `source` until either is written. Returns false if the file system cannot do
    this."""
    with open(source, "rb") as old, open(place, "xb") as new:
        try:
            fcntl.ioctl(new, FICLONE, old.fileno())
        except OSError:
            return False
    return True


def _copy(source: pathlib.Path, place: pathlib.Path) -> None:
    if not _clone(source, place):
        shutil.copyfile(source, place)
    status = source.stat()
    os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))


def link(source: pathlib.Path, place: pathlib.Path) -> None:
    """Gives the same bytes a second name: a hard link, or a symbolic link if that fails, as on another disk."""
    try:
        os.link(source, place)
    except OSError:
        place.symlink_to(source)


def _assemble(folder: pathlib.Path, named: List[Named], make: Callable[[str, Item, pathlib.Path], None]) -> None:
    coming = folder.with_name(f".{folder.name}.coming")
    with local_errors(folder):
        try:
            _remove(coming)
            coming.mkdir(parents=True)
            made: Optional[pathlib.Path] = None
            for name, item in named:
                place = coming / name
                if place.parent != made:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    made = place.parent
                make(name, item, place)
            _remove(folder)
            os.rename(coming, folder)
        finally:
            _remove(coming)


def _remove(folder: pathlib.Path) -> None:
    """Removes a folder. Removes a link itself, never its target."""
    if folder.is_symlink():
        folder.unlink()
        return
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
