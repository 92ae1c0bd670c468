"""Measure the bytes of tensors that code allocates, on any device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of tensors that operations create.

    Args:
        existing: tensors that are counted from the start.

    Attributes:
        now: bytes of all counted tensors that exist.
        peak: largest value of ``now``.
        largest: bytes of the largest tensor that an operation has created.
    """

    def __init__(self, *existing):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._storages = {}
        for tensor in existing:
            self._count(tensor)
        self.largest = 0

    def _count(self, tensor):
        """Count the storage of ``tensor``, unless the storage is already counted."""
        storage = tensor.untyped_storage()
        storage_id, storage_bytes = id(storage), storage.nbytes()
        if storage_id not in self._storages:
            self._storages[storage_id] = weakref.ref(
                storage, lambda _: self._uncount(storage_id, storage_bytes)
            )
            self.now += storage_bytes
            self.peak = max(self.peak, self.now)
            self.largest = max(self.largest, storage_bytes)

    def _uncount(self, storage_id, storage_bytes):
        del self._storages[storage_id]
        self.now -= storage_bytes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._count(each)
        return result
