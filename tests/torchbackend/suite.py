"""What a scenario is, and when an answer of one backend is as good as another's. Knows no process and no backend.

A scenario is a function of a `World` that returns named answers: tensors, numbers, texts, and lists and dictionaries of these. It
raises what went wrong. Inside a dictionary of cases an answer may be `Refused`: the backend said no to that case, on every rank.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist

TOLERANCE = 1e-6


class World:
    """What a scenario has: its rank, how many there are, and a default process group of the backend under test."""

    def __init__(self, rank: int, size: int, backend: str, store: Any, scratch: Path) -> None:
        self.rank = rank
        self.size = size
        self.backend = backend
        self.store = store
        """Shared by the ranks, apart from any process group."""
        self.scratch = scratch
        """A directory that the ranks share."""
        self._opened = 0

    @property
    def ranks(self) -> range:
        return range(self.size)

    @property
    def right(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def left(self) -> int:
        return (self.rank - 1) % self.size

    def open(self, seconds: float = 15) -> None:
        """A new default process group, in place of the present one."""
        self.close()
        self._opened += 1
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(f"group{self._opened}", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(seconds=seconds),
        )

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class Scenario(NamedTuple):
    name: str
    area: str
    run: Callable[[World], dict[str, Any] | None]
    same: tuple[str, ...]
    """Answers that must be the same bits on every rank."""
    worlds: tuple[int, ...]
    seconds: float
    """After which it hangs."""
    slow: bool
    fresh: bool
    """Processes that have run it on gloo are not used again: it breaks them there."""
    known: str
    """Why asynccoll cannot do it, where gloo can."""
    tolerance: float
    """How far its answers may be from gloo's."""


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str,
    *,
    same: tuple[str, ...] = (),
    worlds: tuple[int, ...] = (2, 4),
    seconds: float = 20,
    slow: bool = False,
    fresh: bool = False,
    known: str = "",
    tolerance: float = TOLERANCE,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function; its module's name is the area."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in SCENARIOS, name
        area = run.__module__.rpartition(".")[2]
        SCENARIOS[name] = Scenario(name, area, run, same, worlds, seconds, slow, fresh, known, tolerance)
        return run

    return register


class Refused(str):
    """Why a backend did not do one case, or that it did it wrong: a difference from what plain torch computes."""

    wrong = False


class Wrong(Refused):
    """A backend did one case without an error, and wrong."""

    wrong = True


def plain(value: Any) -> Any:
    """``value`` with arrays of numpy in place of tensors, so that another process can read it."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.float().numpy() if value.dtype == torch.bfloat16 else value.resolve_conj().numpy().copy()
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    assert value is None or isinstance(value, bool | int | float | str), type(value)
    return value


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every answer within ``value``, with the way to it."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, f"{path}/{key}" if path else str(key))
    else:
        yield path, value


def refusals(answers: Any) -> list[str]:
    return [
        f"{path.rpartition('/')[2]}{' (wrong result)' if value.wrong else ''}"
        for path, value in leaves(answers)
        if isinstance(value, Refused)
    ]


def difference(reference: Any, other: Any, tolerance: float = TOLERANCE) -> str:
    """The first place where ``other`` is not as good as ``reference``; empty if there is none."""
    if isinstance(reference, Refused):
        return ""  # whatever the other did is not worse
    if isinstance(other, Refused):
        return f"{'wrong' if other.wrong else 'refused'}: {other}"
    if isinstance(reference, dict) and isinstance(other, dict):
        if reference.keys() != other.keys():
            return f"answers {sorted(other)} instead of {sorted(reference)}"
        pairs = [(key, reference[key], other[key]) for key in reference]
    elif isinstance(reference, list) and isinstance(other, list):
        if len(reference) != len(other):
            return f"{len(other)} answers instead of {len(reference)}"
        pairs = [(str(at), *pair) for at, pair in enumerate(zip(reference, other, strict=True))]
    else:
        return _distance(reference, other, tolerance)
    for key, one, two in pairs:
        found = difference(one, two, tolerance)
        if found:
            return f"{key}: {found}"
    return ""


def _distance(reference: Any, other: Any, tolerance: float) -> str:
    if isinstance(reference, str) or reference is None:
        return "" if reference == other else f"{other!r} instead of {reference!r}"
    one, two = numpy.asarray(reference), numpy.asarray(other)
    if one.dtype != two.dtype or one.shape != two.shape:
        return f"{two.dtype}{list(two.shape)} instead of {one.dtype}{list(one.shape)}"
    if one.dtype.kind in "biu":
        return "" if (one == two).all() else f"{two.tolist()} instead of {one.tolist()}"[:200]
    if numpy.allclose(two, one, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"off by {numpy.abs(one - two).max():g}"


def bits(value: Any) -> Any:
    """``value`` such that == tells whether two are the same bits."""
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    if isinstance(value, list):
        return [bits(one) for one in value]
    if isinstance(value, numpy.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    return value


def expect(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """The two are equal: exactly if their type has whole numbers only, else within `TOLERANCE`."""
    kinds = [(one.dtype, list(one.shape)) for one in (found, expected)]
    assert kinds[0] == kinds[1], f"{what} {kinds[0]} instead of {kinds[1]}"
    tolerance = TOLERANCE if expected.is_floating_point() or expected.is_complex() else 0.0
    assert torch.allclose(found.detach(), expected.detach(), rtol=tolerance, atol=tolerance), (
        f"{what} {found.tolist()} instead of {expected.tolist()}"
    )


def raised(call: Callable[[], Any]) -> Exception:
    """What ``call`` raises."""
    try:
        value = call()
    except Exception as error:  # noqa: BLE001 (that is the answer)
        return error
    raise AssertionError(f"nothing was raised: {value!r}"[:300])


def one_line(error: BaseException) -> str:
    """An error in a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]


def attempt(call: Any) -> Any:
    """What ``call`` returns, `Refused` with what it raised, or `Wrong` with what it did wrong."""
    try:
        return call()
    except AssertionError as error:
        return Wrong(one_line(error))
    except Exception as error:  # noqa: BLE001 (that is the answer)
        return Refused(one_line(error))
