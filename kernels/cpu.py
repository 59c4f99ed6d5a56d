"""The CPU's own operations: C++ compiled on first use for the processor it runs on, and kept.

A decode step of a small model is a thousand operations of torch, which take longer than the numbers
do; and for two to sixteen rows torch's products read a matrix at half the speed of memory. So where
`compiled` says so, an operation runs here instead of as its torch reference. Without a C++ compiler
the references run, and one line in the log says so.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import platform
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sluice.kernels.launch import INTERPRETED

SOURCES = sorted(Path(__file__).parent.glob("cpu*.[ch]*"))
FOLDER = Path("~/.cache/sluice")
COMPILERS = ("g++", "clang++")
FLAGS = "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared"
FEW_ROWS = 16  # beyond, torch's products are faster
DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # of numbers, as the library knows them
KNOWN = {*DTYPES, torch.int64}
_thread = threading.local()
log = logging.getLogger(__name__)


def compiled(*tensors: Tensor) -> bool:
    """Whether operations on these tensors run here: all on a CPU, in dtypes known here."""
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.dtype not in KNOWN or not tensor.is_cpu:
            return False
    return not INTERPRETED and _library() is not None


def prepare() -> None:
    """Compile what is not compiled yet, so that no request has to wait for it."""
    _library()


def few_rows(x: Tensor, *weights: Tensor) -> bool:
    """Whether products of x [n, ...] with such weights run here."""
    for weight in weights:
        if type(weight) is not Tensor or weight.dtype != x.dtype or not weight.is_contiguous():
            return False
    return len(x) <= FEW_ROWS and compiled(x)


@dataclass(frozen=True)
class Operation:
    """A call of the library, ready to be made anew; `tensors` are what its pointers point to."""

    function: ctypes._NamedFuncPointer
    packed: bytes
    tensors: tuple[Tensor, ...]


def call(name: str, *arguments: Tensor | int | float | None) -> None:
    """Run a function of the library: tensors are passed as pointers to their first number."""
    function = _function(name)
    packed = pack(arguments)
    function(packed)
    if (recorder := getattr(_thread, "recorder", None)) is not None:
        tensors = tuple(a for a in arguments if isinstance(a, Tensor))
        recorder(Operation(function, packed, tensors))


def pack(arguments: Sequence[Tensor | int | float | None]) -> bytes:
    """Arguments as the library takes them, in 8 bytes each."""
    numbers = [a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments]
    form = "".join("d" if type(number) is float else "q" for number in numbers)
    return struct.pack(form, *numbers)


@contextmanager
def recording(recorder: Callable[[Operation], None]) -> Iterator[None]:
    """Hand every operation that this thread runs here to the recorder as well."""
    _thread.recorder = recorder
    try:
        yield
    finally:
        _thread.recorder = None


def is_recording() -> bool:
    """Whether this thread's operations are recorded."""
    return getattr(_thread, "recorder", None) is not None


def replay(operations: Sequence[Operation]) -> Callable[[], None]:
    """A function that makes recorded calls anew, all in one. Keeps what they read and write."""
    functions = (ctypes.c_void_p * len(operations))(
        *[ctypes.cast(o.function, ctypes.c_void_p).value for o in operations]
    )
    arguments = (ctypes.c_char_p * len(operations))(*[o.packed for o in operations])
    run = _function("replay")
    kept = tuple(operations)
    return lambda: run(functions, arguments, len(kept))


@cache
def _function(name: str) -> ctypes._NamedFuncPointer:
    library = _library()
    assert library is not None, "`compiled` is asked before"
    return getattr(library, f"sluice_{name}")


def dtype_of(tensor: Tensor) -> int:
    """The number that the library knows a tensor's dtype by."""
    return DTYPES[tensor.dtype]


def place(rows: Tensor) -> tuple[Tensor, int, int, int]:
    """A pool's layer view [num_pages, rows_per_page, *row_shape] as the library takes it."""
    return rows, rows.stride(0), rows.stride(1), rows.shape[1]


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(_build()))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # also: no home
        detail = getattr(error, "stderr", None) or error
        log.warning(
            "event=no_compiled_kernels effect='decode on CPU is slower' reason=%r", str(detail)
        )
        return None


def _build() -> Path:
    """The library for these sources and this processor; the first process that asks compiles it."""
    folder = FOLDER.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"kernels-{_fingerprint()}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path)
    return path


def _compile(path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError(f"none of {', '.join(COMPILERS)} is installed")
    begin, part = time.monotonic(), path.with_suffix(".part")
    sources = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    command = [compiler, *FLAGS.split(), *sources, "-o", str(part)]
    log.info("event=compiling_kernels compiler=%s path=%s", compiler, path)
    subprocess.run(command, check=True, capture_output=True, text=True)
    part.rename(path)
    log.info("event=kernels_compiled seconds=%.1f path=%s", time.monotonic() - begin, path)


def _fingerprint() -> str:
    """Of the sources, how they are compiled, and the processor's instructions."""
    parts = [source.read_bytes() for source in SOURCES] + [FLAGS.encode()]
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    parts += [line.encode() for line in lines if line.startswith(("flags", "Features"))][:1]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
