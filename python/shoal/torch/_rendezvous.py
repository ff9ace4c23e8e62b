"""Provides torch's Store to ranks that mpirun or srun started: these launchers do not set RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT.

    torch.distributed.init_process_group("shoal")                              # env://, if RANK and WORLD_SIZE are not set
    torch.distributed.init_process_group("shoal", init_method="shoal://")      # with every launcher, and with none

The ranks join like those of a C program (PMIx, PMI-1, Slurm's variables). Rank 0 opens a TCPStore and broadcasts its addresses.
A process does this once; each later group gets the same store with another prefix.
"""
from __future__ import annotations

import ctypes
import datetime
import fcntl
import importlib
import ipaddress
import json
import os
import secrets
import socket
import struct
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from .. import _native
from ._communicator import BackendError, milliseconds, timed_out

MESSAGE_BYTES = 8192  # size of rank 0's broadcast
TIMEOUT = getattr(dist, "default_pg_timeout", datetime.timedelta(minutes=30))
REACHED_S = 3  # to connect to one address of rank 0's host
SIOCGIFADDR = 0x8915
LAUNCHERS = (("PMIX_NAMESPACE",), ("PMI_FD", "PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))

_met = None  # (process, store, rank, size), once the ranks have met
_groups = 0  # number of groups that used it


def register() -> None:
    """Registers "shoal://", and lets env:// do the same if there is a launcher but torch's variables are not set."""
    handlers = getattr(importlib.import_module("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if "shoal" in handlers:
        return
    from_variables = handlers.get("env")
    dist.register_rendezvous_handler("shoal", lambda url, **options: _from_any(from_variables, url, **options))
    if from_variables:
        handlers["env"] = lambda url, **options: (_from_launcher if _is_launchers(url) else from_variables)(url, **options)


def _is_launchers(url):
    return not _has_variables() and not _told(url) and any(all(map(os.environ.get, names)) for names in LAUNCHERS)


def _has_variables():
    return any(map(os.environ.get, ("RANK", "WORLD_SIZE")))


def _told(url):
    """Returns rank and world_size if init_process_group was called with them."""
    return {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items() if name in ("rank", "world_size")}


def _from_any(from_variables, url, **options):
    if from_variables and _has_variables():
        return from_variables(url, **options)
    return _from_launcher(url, **options)


def _from_launcher(url, timeout=TIMEOUT, **_):
    global _met, _groups
    if _met is None or _met[0] != os.getpid():
        _met, _groups = (os.getpid(), *_meet(timeout)), 0
    _, store, rank, size = _met
    for name, told in _told(url).items():
        if told != (size if name == "world_size" else rank):
            raise ValueError(f"shoal: init_process_group was given {name}={told}, but the launcher's variables are rank {rank} of {size}")
    _groups += 1
    yield dist.PrefixStore(f"shoal {_groups}", store), rank, size
    raise RuntimeError("shoal: ranks cannot meet again within one group")  # the error of torch's own handlers


def _meet(timeout):
    """Returns (store, rank, size) of the job that the environment describes."""
    library, context, comm = _native.load(), _native.create_context(), ctypes.c_void_p()
    limit_ms = milliseconds(timeout)
    options = _native.CommOptions(name=b"rendezvous", timeout_ms=limit_ms, create_timeout_ms=limit_ms)
    try:
        _check(library.comm_create(context, ctypes.byref(options), ctypes.byref(comm)), context)
        rank, size = library.comm_rank(comm), library.comm_size(comm)
        _tell_local_rank(_place(library, comm, rank))
        if size == 1:
            return dist.HashStore(), 0, 1
        store = _open(size, timeout) if rank == 0 else None
        told = _broadcast(library, comm, store and {"port": store.port, "token": store.token, "addresses": _addresses()})
        store = store or _connect(told, _place(library, comm, 0).host == _place(library, comm, rank).host, size, timeout)
        _check(library.comm_finalize(comm), None, comm)  # no rank leaves while others connect
        return store, rank, size
    finally:
        library.comm_free(comm)
        library.context_destroy(context)


def _check(status, context=None, comm=None):
    if status != _native.OK:
        raise BackendError(f"shoal: ranks cannot meet: {timed_out(status)}{_native.error_of(status, context, comm)}")


def _place(library, comm, rank):
    place = _native.Place()
    _check(library.comm_place(comm, rank, ctypes.byref(place)))
    return place


def _tell_local_rank(place):
    """Sets the variables that torch.distributed.get_node_local_rank and many programs read."""
    os.environ.setdefault("LOCAL_RANK", str(place.local_rank))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(place.local_size))


def _broadcast(library, comm, told):
    """Returns rank 0's value on every rank; `told` is None on the others."""
    block = ctypes.create_string_buffer(_fit(told) if told else b"", MESSAGE_BYTES)
    _check(library.broadcast(comm, block, block, MESSAGE_BYTES, _native.UINT8, 0, None), None, comm)
    return json.loads(block.value)


def _fit(told):
    """Encodes the value as JSON. If the addresses do not fit, it keeps the first ones and the last, which is the host's
    name."""
    addresses = list(told["addresses"])
    while len(text := json.dumps({**told, "addresses": addresses}).encode()) >= MESSAGE_BYTES:
        del addresses[-2]
    return text


# ---- The store ---------------------------------------------------------------------------------------------------------------


class _Store(dist.TCPStore):
    """Rank 0's store, with a token that distinguishes it from another service at the same port of another host."""

    token = None


def _open(size, timeout):
    port = int(os.environ.get("MASTER_PORT") or 0)
    store = _Store("127.0.0.1", port, size, True, timeout=timeout, wait_for_workers=False)
    store.token = secrets.token_hex(16)
    store.set("token", store.token)
    return store


def _connect(told, is_local, size, timeout):
    """Returns rank 0's store through the first of its host's addresses that leads there."""
    addresses = ["127.0.0.1"] if is_local else [*filter(None, [os.environ.get("MASTER_ADDR")]), *told["addresses"]]
    reasons = []
    for address in addresses:
        try:
            socket.create_connection((address, told["port"]), REACHED_S).close()
            store = dist.TCPStore(address, told["port"], size, False, timeout=timeout, wait_for_workers=False)
            if store.check(["token"]) and store.get("token").decode() == told["token"]:
                return store
            reasons.append(f"{address}: another program listens there")
        except (OSError, RuntimeError) as error:
            reasons.append(f"{address}: {error}")
    raise BackendError(f"shoal: rank 0 opened a TCPStore at port {told['port']}, which cannot be reached from "
                       f"{socket.gethostname()} ({'; '.join(reasons)}). Set MASTER_ADDR on all ranks to an address of rank 0's "
                       "host, and MASTER_PORT if only some ports are open")


def _addresses():
    """The addresses of this host without loopback, then its name. Addresses of the interfaces in SHOAL_NIC come first."""
    found = [*_ipv4(), *_ipv6()]
    named = os.environ.get("SHOAL_NIC", "").split(",")
    found.sort(key=lambda one: one[0] not in named)
    return [address for _, address in found] + [socket.gethostname()]


def _ipv4():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                address = socket.inet_ntoa(fcntl.ioctl(asked.fileno(), SIOCGIFADDR, request)[20:24])
            except OSError:  # the interface has none
                continue
            if not ipaddress.ip_address(address).is_loopback:
                yield name, address


def _ipv6():
    try:
        with open("/proc/net/if_inet6") as file:
            lines = [line.split() for line in file]
    except OSError:  # a kernel without IPv6
        return
    for digits, _, _, scope, _, name in lines:
        if scope == "00":  # global scope: neither ::1 nor an address that needs the interface's name
            yield name, str(ipaddress.IPv6Address(int(digits, 16)))
