"""The stubs exist only where the project was built; a checker need not have built it."""

from typing import Any

def __getattr__(name: str) -> Any: ...
