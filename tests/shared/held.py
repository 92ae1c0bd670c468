"""Count the bytes of tensors while code runs."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """Dispatch mode that counts bytes: of living tensors, their peak, and the largest tensor."""

    def __init__(self, *there):
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._seen = {}
        for tensor in there:
            self._see(tensor)
        self.largest = 0

    def _see(self, tensor):
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key not in self._seen:
            self._seen[key] = weakref.ref(storage, lambda _: self._gone(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)
            self.largest = max(self.largest, size)

    def _gone(self, key, size):
        del self._seen[key]
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self._see(each)
        return made
