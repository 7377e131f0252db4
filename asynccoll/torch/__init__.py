"""torch's process groups over asynccoll, and started by it. Knows where its parts are; loads torch with the first of them.

Needs the extra ``asynccoll[torch]``. ``import asynccoll`` alone never loads torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynccoll.torch.bootstrapper import bootstrap
    from asynccoll.torch.opening import init_process_group
    from asynccoll.torch.servers import ServerFailed, ServerProcess, Startable, start_server

__all__ = [
    "ServerFailed",
    "ServerProcess",
    "Startable",
    "bootstrap",
    "init_process_group",
    "start_server",
]

if importlib.util.find_spec("torch") is None:
    raise ImportError(
        "asynccoll.torch needs torch, which is not installed: pip install 'asynccoll[torch]'", name="torch"
    )

_HOME = {
    "bootstrap": "asynccoll.torch.bootstrapper",
    "init_process_group": "asynccoll.torch.opening",
    "ServerFailed": "asynccoll.torch.servers",
    "ServerProcess": "asynccoll.torch.servers",
    "Startable": "asynccoll.torch.servers",
    "start_server": "asynccoll.torch.servers",
}


# At first use: torch itself may be what is loading this package, by an entry point, and is not complete then.
def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
