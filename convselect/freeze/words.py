"""Words of memory in which CPython and PyTorch note every write: where they are, found by experiment.

A frozen call asks some hundred dictionaries and tensors whether they have changed. After a run of the network none of
them is in the caches, and Python touches them one by one: half a microsecond each. C reads a list of words with all
misses on their way at the same time (`cs_same`), twenty times as fast. The words are

- a dictionary's version tag (PEP 509; CPython up to 3.13): a number that no dictionary had before, after each change;
- in a tensor's Python object, the address of PyTorch's object; there, of its storage and of its version counter, and
  the offset into the storage; in these, the data's address and the version.

None of these layouts is promised to anyone. So each is searched for once per process, in objects made for it, with
reads that cannot fail (/proc/self/mem), and is used only if it shows every kind of write there. Otherwise, and
whenever a word differs, the objects are asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from convselect.kernels import _library

_TAG = 24  # count of references, type, number of entries
_called: Any = operator.methodcaller("__call__")
_OBJECT_BYTES, _IMPL_BYTES, _INNER_BYTES = 64, 160, 48


class TensorLayout(NamedTuple):
    """Offsets in bytes.

    Attributes:
        impl: in the Python object, of the address of PyTorch's object.
        storage, offset, counter: in that, of the storage's address, the offset into it, the version counter's address.
        version: in the counter.
        data: in the storage, of the data's address.
    """

    impl: int
    storage: int
    offset: int
    counter: int
    version: int
    data: int


class Words:
    """Words that are compared with what they were when this was made.

    Args:
        dictionaries, tensors: they are kept alive.
        layout: of tensors, if there are any.
    """

    def __init__(
        self, dictionaries: Iterable[dict[Any, Any]], tensors: Iterable[Tensor] = (), layout: TensorLayout | None = None
    ) -> None:
        self._owners = ({id(d): d for d in dictionaries}, {id(t): t for t in tensors})
        objects, inner, innermost = [at + _TAG for at in self._owners[0]], [], []
        for t in self._owners[1].values():
            assert layout is not None
            impl, storage = t._cdata, t.untyped_storage()._cdata
            counter = _word(impl + layout.counter)
            objects.append(id(t) + layout.impl)
            inner += [impl + at for at in (layout.storage, layout.offset, layout.counter)]
            innermost += [storage + layout.data, *([counter + layout.version] if counter else [])]  # inference tensors
        # What is read behind an address is alive as long as the address is the same: hence one after another.
        self._rounds = [_compared(sorted(set(part))) for part in (objects, inner, innermost) if part]

    def same(self) -> bool:
        return all(map(_called, self._rounds))


def _compared(addresses: list[int]) -> Callable[[], int]:
    count = len(addresses)
    given, values = (ctypes.c_void_p * count)(*addresses), (ctypes.c_uint64 * count)(*map(_word, addresses))
    return functools.partial(_same_words(), given, values, ctypes.c_int64(count))


def _word(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


@functools.cache
def _same_words() -> Any:
    loaded = _library.library()
    if loaded is None:
        return None
    same = loaded["cs_same"]
    same.argtypes, same.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), ctypes.c_int32
    return same


@functools.cache
def dictionaries_have_tags() -> bool:
    """Whether the word at `_TAG` of a dictionary shows each change."""
    if _same_words() is None or sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    return all(map(_shows_changes, (dict, OrderedDict))) and _shows_attributes()


def _shows_changes(kind: type) -> bool:
    d: Any = kind(a=object(), b=object())
    changes: list[Callable[[], object]] = [
        lambda: d.__setitem__("a", object()), lambda: d.__setitem__("c", 1), lambda: d.update(c=2),
        lambda: d.setdefault("e", 3), lambda: d.pop("c"), lambda: d.__delitem__("a"), lambda: d.popitem(),
        lambda: d.clear(), lambda: d.__ior__({"a": object()}), lambda: d.update({i: i for i in range(50)}),
    ]  # fmt: skip
    seen = {_word(id(d) + _TAG)}
    for change in changes:
        change()
        tag = _word(id(d) + _TAG)
        if tag in seen:
            return False
        seen.add(tag)
    other = kind(d)
    list(other.items())
    return _word(id(d) + _TAG) == tag and _word(id(other) + _TAG) not in seen  # reading changes nothing


def _shows_attributes() -> bool:
    """Whether attributes that are set show in a module's dictionary too, by hand and by code that runs often."""
    module = nn.Identity()
    attributes = vars(module)
    seen = {_word(id(attributes) + _TAG)}
    for i in range(100):
        module.training = bool(i % 2)
        tag = _word(id(attributes) + _TAG)
        if tag in seen:
            return False
        seen.add(tag)
    return True


@functools.cache
def tensor_layout() -> TensorLayout | None:
    """None if it was not found, or not without doubt."""
    if _same_words() is None or ctypes.sizeof(ctypes.c_void_p) != 8 or sys.byteorder != "little":
        return None
    with contextlib.suppress(OSError, AttributeError, RuntimeError), torch.inference_mode(False), torch.no_grad():
        memory = os.open("/proc/self/mem", os.O_RDONLY)
        try:
            found = _searched(memory)
        finally:
            os.close(memory)
        return found if found is not None and _shows_writes(found) else None
    return None


def _probes() -> list[Tensor]:
    return [nn.Parameter(torch.ones(4, 3, 2, 2)), torch.ones(300), torch.tensor(3), torch.ones(7, 5)[2:]]


def _searched(memory: int) -> TensorLayout | None:
    def words(address: int, n_bytes: int) -> Iterator[tuple[int, int]]:
        """(offset, word) of what can be read there."""
        if not 4096 <= address < 2**47 or address % 8:
            return
        try:
            read = os.pread(memory, n_bytes, address)
        except OSError:
            return
        for at in range(0, len(read) - 7, 8):
            yield at, int.from_bytes(read[at : at + 8], "little")

    sets: list[list[set[Any]]] = []
    for k, probe in enumerate(_probes()):
        for write in range(3 * k + 2):
            probe.add_(write)
        storage = probe.untyped_storage()
        impl = list(words(probe._cdata, _IMPL_BYTES))
        base = storage.data_ptr()
        sets.append([
            {at for at, word in words(id(probe), _OBJECT_BYTES) if word == probe._cdata},
            {at for at, word in impl if word == storage._cdata},
            {at for at, word in impl if word == probe.storage_offset()},
            {(at, inner) for at, word in impl for inner, w in words(word, _INNER_BYTES) if w % 2**32 == probe._version},
            {at for at, word in words(storage._cdata, _INNER_BYTES) if word == base},
        ])  # fmt: skip
    common = [set.intersection(*parts) for parts in zip(*sets, strict=True)]
    impl_at, storage_at, offset_at, version_at, data_at = common
    if any(len(part) != 1 for part in (impl_at, storage_at, offset_at, version_at)) or not data_at:
        return None
    ((counter, version),) = version_at
    impl, storage, offset = (part.pop() for part in (impl_at, storage_at, offset_at))
    return TensorLayout(impl, storage, offset, counter, version, min(data_at))


def _shows_writes(layout: TensorLayout) -> bool:
    """Whether all that is done to tensors shows in these words, and nothing shows that was not done."""
    other = torch.full((4, 3, 2, 2), 2.0)
    long = torch.ones(2, 48)
    writes: list[Callable[[Tensor], object]] = [
        lambda t: t.add_(1), lambda t: t.copy_(other), lambda t: t.detach().mul_(2), lambda t: t.view(-1)[3:].zero_(),
        lambda t: setattr(t, "data", other.clone()), lambda t: setattr(t, "data", long[1].view(4, 3, 2, 2)),
        lambda t: t.set_(other.clone()),  # type: ignore[call-overload]
    ]  # fmt: skip
    swap = lambda t: torch.utils.swap_tensors(t, nn.Parameter(other.clone()))  # noqa: E731
    for write in (*writes, swap):
        for parameter in (True, False):
            t = long[0].view(4, 3, 2, 2)
            if parameter:
                t = nn.Parameter(t)
            elif write is swap:
                continue
            words = Words((), [t], layout)
            if float(t.detach().sum()) <= 0 or not words.same():
                return False
            write(t)
            if words.same():
                return False
            long.fill_(1)
    return True
