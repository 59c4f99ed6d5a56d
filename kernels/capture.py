"""Capture: a step on a CPU, recorded once and replayed without Python in between.

As a graph is to a GPU: what the step did is done again on the same memory, so its inputs must lie
where they lay, and its shapes, and every number that Python read from a shape, are those of the
recording. Looking at data while recording raises NotRepeatable. Consecutive operations of our own
library become one call; of torch's, views need nothing, and the others are run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sluice.kernels import cpu
from sluice.kernels.cpu import Operation

EMPTY = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)  # allocations: their memory stays, and their content meant nothing
LOOKS = frozenset(
    {Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__int__, Tensor.__float__, Tensor.__bool__}
)
LOOKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
Again = Callable[[], object]


class NotRepeatable(Exception):
    """The step looks at data, so another one may take another way."""


class Capture:
    """A recorded computation. Keeps all memory that it touched."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        """Run `compute`, record it, and keep its result as `result`. Raises NotRepeatable."""
        steps: list[Operation | Again] = []
        with cpu.recording(steps.append), _LooksAtNothing(), _Recorder(steps):
            self.result = compute()
        self._again = list(_joined(steps))

    def replay(self) -> Tensor:
        """Compute again from what the inputs' memory holds now; returns `result`, overwritten."""
        for again in self._again:
            again()
        return self.result


def _joined(steps: Iterable[Operation | Again]) -> Iterable[Again]:
    for ours, group in groupby(steps, lambda step: isinstance(step, Operation)):
        members = list(group)
        if ours:
            yield cpu.replay([step for step in members if isinstance(step, Operation)])
        else:
            yield from (step for step in members if not isinstance(step, Operation))


class _LooksAtNothing(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in LOOKS:
            raise NotRepeatable(f"{func.__name__}() while a step is recorded")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Appends to `steps` how to repeat every operation of torch."""

    def __init__(self, steps: list[Operation | Again]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if LOOKING & set(func.tags) and not _indexes(func, args):
            raise NotRepeatable(f"{func} while a step is recorded")
        result = func(*args, **(kwargs or {}))
        if func not in EMPTY and not _is_view(func, args, result):
            self._steps.append(_again(func, args, kwargs or {}, result))
        return result


def _indexes(func: Any, args: Any) -> bool:
    """Whether this is indexing with numbers: a mask would make a shape of data."""
    return func is torch.ops.aten.index.Tensor and all(
        indices.dtype == torch.int64 for indices in _tensors(args[1:])
    )


def _is_view(func: Any, args: Any, result: Any) -> bool:
    """Whether an operation wrote nothing: schemas do not tell, as `x.to(dtype)` may be x itself."""
    given = {t.untyped_storage().data_ptr() for t in _tensors(args)}
    seen = {t.untyped_storage().data_ptr() for t in _tensors(result)}
    return not func._schema.is_mutable and seen <= given


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _again(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> Again:
    """Run an operation again, its results into the memory of the first ones."""
    if func._schema.is_mutable:
        return lambda: func(*args, **kwargs)
    results = _tensors(result)
    into, names = _writes_into(func)
    if into is not None:
        return partial(into, *args, **kwargs, **dict(zip(names, results, strict=True)))

    def again() -> None:
        for kept, new in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
            kept.copy_(new)

    return again


@cache
def _writes_into(func: Any) -> tuple[Any, list[str]]:
    """The same operation into given memory, if torch has it, and its parameters for the results."""
    inputs = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        given = [a for a in other._schema.arguments if not a.is_out]
        outs = [a.name for a in other._schema.arguments if a.is_out]
        if outs and [(a.name, str(a.type)) for a in given] == inputs:
            return other, outs
    return None, []
