"""What torch is asked to do, written down."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class TorchCalls(TorchDispatchMode):
    """Names of the operations within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(function))
        return function(*arguments, **(options or {}))
