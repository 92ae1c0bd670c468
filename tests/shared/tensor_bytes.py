"""Measure the bytes of tensors that code allocates, on any device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of tensors that operations create.

    Args:
        initial_tensors: tensors that are counted from the start.

    Attributes:
        current_bytes: bytes of all counted tensors that exist.
        peak_bytes: largest value of ``current_bytes``.
        largest_tensor_bytes: bytes of the largest tensor that an operation has created.
    """

    def __init__(self, *initial_tensors):
        super().__init__()
        self.current_bytes = self.peak_bytes = self.largest_tensor_bytes = 0
        self._storages = {}
        for tensor in initial_tensors:
            self._count(tensor)
        self.largest_tensor_bytes = 0

    def _count(self, tensor):
        """Count the storage of ``tensor``, unless the storage is already counted."""
        storage = tensor.untyped_storage()
        storage_id, storage_bytes = id(storage), storage.nbytes()
        if storage_id not in self._storages:
            self._storages[storage_id] = weakref.ref(
                storage, lambda _: self._uncount(storage_id, storage_bytes)
            )
            self.current_bytes += storage_bytes
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)
            self.largest_tensor_bytes = max(self.largest_tensor_bytes, storage_bytes)

    def _uncount(self, storage_id, storage_bytes):
        del self._storages[storage_id]
        self.current_bytes -= storage_bytes

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result
