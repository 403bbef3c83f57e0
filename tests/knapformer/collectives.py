"""Counts the collectives that really reach torch's c10d dispatcher."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """While active, on this thread: `.names` lists every c10d operator that is called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))
