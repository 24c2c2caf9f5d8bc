"""Small workspaces that are zeros between launches: every launch leaves them as it found them.

They take no memset, which costs 2.3 us of the GPU's time before each launch (H200), a tenth of a
short attention. Launches of one stream run one after the other, so all plans share what a stream
has. A stream is told by its driver's id, not by its handle, which a later stream may get anew; the
per-thread default stream by its thread. The legacy default stream is one and is never captured, so
that nothing is asked of the driver.

Captured launches share a workspace of their graph for each stream of the capture. A graph may be
replayed on any stream, but a graph, its clones and all that is instantiated from them must not run
at the same time. The graph owns a reference to a CUDA user object, as do its clones and what is
instantiated from them; the driver destroys that object with the last of them and after their last
replay. From then on the workspace, which is zeros again, serves other graphs.

What a stream has is not given back: a launch may still use it. The memory is the driver's, not
torch's allocator's: what lives on in the pool of a graph would not be tracked there (torch's graph
trees), and what is freed there is overwritten by graphs that share the pool.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from dataclasses import dataclass

from cuda.bindings import driver

from warploom.generator.locks import fork_lock
from warploom.runtime.driver import LEGACY_STREAMS, PER_THREAD_STREAM, check, enter

LEAST = 128  # bytes: a cache line, so that counters of different streams do not meet in one
_SLAB = 64 << 10  # bytes that are asked of the driver at once
_SEMAPHORE = 64  # bytes of a sem_t, at most

_libc = ctypes.CDLL(None)
_libc.calloc.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True, eq=False)
class _Zeros:
    """A workspace that a graph has.

    semaphore   the address of a POSIX one, which is posted when the graph is gone
    """

    address: int
    size: int
    semaphore: int


Key = tuple[int, ...]

_lock = fork_lock()
_found: dict[Key, tuple[int, int]] = {}  # address and bytes, by device and stream
_captured: dict[Key, _Zeros] = {}  # by device, capture and stream
_lent: list[tuple[Key, _Zeros]] = []  # all that graphs have, or had until now
_free: dict[tuple[int, int], list[_Zeros]] = {}  # by device and bytes
_slabs: dict[int, tuple[int, int]] = {}  # the unused address and bytes, by device
_own = threading.local()
_threads = itertools.count()

for _each in (_found, _captured, _lent, _free, _slabs):
    os.register_at_fork(after_in_child=_each.clear)


def zeros(device: int, stream: int, size: int) -> int:
    """Return the address of `size` bytes of zeros for the next launch on a stream of `device`.

    That launch must leave zeros there. May be called under a capture.
    """
    if stream not in LEGACY_STREAMS and _capturing(device, stream):
        return _of_capture(device, stream, size)
    key = (device, *identity(stream))
    address, found = _found.get(key, (0, 0))
    if found >= size:
        return address
    room = _room(size)
    with _lock:
        address = _carve(device, room)
        _found[key] = (address, room)
    return address


def _of_capture(device: int, stream: int, size: int) -> int:
    """The same for a launch that is captured."""
    # A capture's number is of no other in the life of the process.
    _, capture, graph, *_ = check(driver.cuStreamGetCaptureInfo(driver.CUstream(stream)))
    key = (device, int(capture), stream, _thread() if stream == PER_THREAD_STREAM else -1)
    with _lock:
        known = _captured.get(key)
        if known is None or known.size < size:
            known = _lend(device, _room(size), key, graph)
            _captured[key] = known
        return known.address


def _lend(device: int, room: int, key: Key, graph: driver.CUgraph) -> _Zeros:
    """Give a graph a workspace until it is gone. To be called with the lock."""
    for entry in list(_lent):
        owner, one = entry
        if _libc.sem_trywait(ctypes.c_void_p(one.semaphore)) == 0:  # its graph is gone
            _lent.remove(entry)
            _captured.pop(owner, None)
            _free.setdefault((owner[0], one.size), []).append(one)
    free = _free.get((device, room))
    one = free.pop() if free else _Zeros(_carve(device, room), room, _semaphore())
    # The driver calls this from a thread of its own, at any time, also while the interpreter ends:
    # no Python function may be called then.
    post = driver.CUhostFn(ctypes.cast(_libc.sem_post, ctypes.c_void_p).value)
    unsynchronised = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    reference = check(driver.cuUserObjectCreate(one.semaphore, post, 1, unsynchronised))
    _lent.append((key, one))
    move = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    try:
        check(driver.cuGraphRetainUserObject(graph, reference, 1, move))
    except BaseException:
        driver.cuUserObjectRelease(reference, 1)
        raise
    return one


def _semaphore() -> int:
    """A semaphore at 0. It is never freed: the driver may post it when the interpreter has gone."""
    address: int | None = _libc.calloc(1, _SEMAPHORE)
    if address is None:
        raise MemoryError
    _libc.sem_init(ctypes.c_void_p(address), 0, 0)
    return address


def _capturing(device: int, stream: int) -> bool:
    handle = driver.CUstream(stream)
    status, capturing = driver.cuStreamIsCapturing(handle)
    if status:  # a thread new to CUDA
        enter(device)
        capturing = check(driver.cuStreamIsCapturing(handle))
    return bool(capturing)


def identity(stream: int) -> Key:
    """What tells a stream from all others of the process, past and to come."""
    if stream in LEGACY_STREAMS:
        return -2, 0
    if stream != PER_THREAD_STREAM:
        return (check(driver.cuStreamGetId(driver.CUstream(stream))),)  # not while it captures
    return -1, _thread()


def _thread() -> int:
    """The number of the calling thread, which none other gets."""
    if not hasattr(_own, "number"):
        _own.number = next(_threads)
    number: int = _own.number
    return number


def _room(size: int) -> int:
    return max(LEAST, 1 << (size - 1).bit_length())


def _carve(device: int, size: int) -> int:
    if size >= _SLAB:
        return _allocate(device, size)
    address, left = _slabs.get(device, (0, 0))
    if left < size:
        address, left = _allocate(device, _SLAB), _SLAB
    _slabs[device] = (address + size, left - size)
    return address


def _allocate(device: int, size: int) -> int:
    """Allocate zeros outside of every stream's order, also where something is being captured."""
    import torch

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with torch.cuda.device(device):
        enter(device)
        mode = check(driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            stream = check(driver.cuStreamCreate(flags))
            address = check(driver.cuMemAlloc(size))
            check(driver.cuMemsetD8Async(address, 0, size, stream))
            check(driver.cuStreamSynchronize(stream))
            check(driver.cuStreamDestroy(stream))
        finally:
            check(driver.cuThreadExchangeStreamCaptureMode(mode))
    return int(address)
