"""``asynccoll plan``: who is which rank, drawn. Knows arguments and files; `asynccoll.planner` knows the rest."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from asynccoll.planner import ProcessRanks, RankPlan, Topology, documents, drawing, ring_cost, ring_order, svg
from asynccoll.planner.rings import SEGMENT

__all__ = ["main"]

_T = TypeVar("_T")

_FORM = "asynccoll.plan"
"""Format of what ``--json-out`` writes: a plan, a topology, and the ring."""

_EPILOG = """\
examples:
  asynccoll plan --roles trainer=4,parameter_server=4,lock_server=1 --machines 4
  asynccoll plan --biggraph 3 -1                          as BigGraph numbers its processes
  asynccoll plan --topology links.json --svg ring.svg     the ring before and after
  asynccoll plan --biggraph 2 3 --json-out plan.json
  asynccoll plan --json plan.json                         also what RankPlan.to_json() wrote; - is standard input

a topology is written by Python: Topology.from_hosts(["a", "a", "b"], latency=...).to_json() of asynccoll.planner,
with the host of each rank and, if they were measured, the seconds and bytes per second of each link

exit code:
  0    the plan was drawn
  2    a mistake on this command line or in a file, told in one line
  130  Ctrl-C
"""


class _Found(NamedTuple):
    """What the command line asks for, read and checked."""

    plan: RankPlan | None
    topology: Topology | None
    segment: int
    before: tuple[int, ...] = ()
    """The ring in the order of the ranks; empty without a topology."""
    after: tuple[int, ...] = ()
    """The planned one."""


def main(argv: Sequence[str]) -> int:
    """Draw the plan that ``argv`` describes; return the exit code.

    2: a mistake, or a file that cannot be read or written. 130: Ctrl-C. 141: the reader of the output went away.
    """
    parser = _parser()
    try:
        options = parser.parse_args(list(argv))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 2
    try:
        found = _read(options)
        text = _text(found, options)
        if options.svg is not None and options.svg != "-":
            _write(options.svg, _picture(found))
        if options.json_out is not None and options.json_out != "-":
            _write(options.json_out, _document(found))
        return _print(text)
    except (ValueError, TypeError) as mistake:
        return _refuse(str(mistake))
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:  # as a shell reports Ctrl-C
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asynccoll plan",
        description="Draw who is which rank: roles by machines, groups, and the order of a ring.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--roles", metavar="ROLE=N,...", help="roles and their numbers of ranks, in the order of the ranks"
    )
    source.add_argument(
        "--biggraph",
        nargs=2,
        type=int,
        metavar=("MACHINES", "PARTITION_SERVERS"),
        help="the processes of a BigGraph training; partition servers: -1 one on each machine, 0 none, or how many you start",
    )
    source.add_argument(
        "--json", metavar="FILE", help="a plan that was written before; - reads standard input"
    )
    parser.add_argument(
        "--machines", type=int, metavar="N", help="with --roles: on how many machines the ranks run"
    )
    parser.add_argument(
        "--topology",
        metavar="FILE",
        help="a topology as JSON: hosts, and measured links; - reads standard input",
    )
    parser.add_argument(
        "--segment",
        type=_nbytes,
        default=SEGMENT,
        metavar="BYTES",
        help="what a ring passes on at a time (1M)",
    )
    parser.add_argument(
        "--svg",
        metavar="FILE",
        help="draw it all into an SVG file as well; - writes that to standard output, and no drawing",
    )
    parser.add_argument(
        "--json-out",
        metavar="FILE",
        help="write it all as JSON as well; - writes that to standard output, and no drawing",
    )
    return parser


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15})([KMG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; write 65536, or 64K")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def _read(options: argparse.Namespace) -> _Found:
    plan: RankPlan | None = None
    topology: Topology | None = None
    if None not in (options.svg, options.json_out) and _same(options.svg, options.json_out):
        raise ValueError("--svg and --json-out cannot both write to the same place; give two")
    if options.machines is not None and options.roles is None:
        raise ValueError("--machines goes with --roles; other plans say themselves what runs where")
    if options.roles is not None:
        plan = RankPlan.from_roles(_roles(options.roles), machines=options.machines)
    elif options.biggraph is not None:
        plan = ProcessRanks.from_num_invocations(*options.biggraph).plan()
    elif options.json is not None:
        if options.json == options.topology == "-":
            raise ValueError("--json and --topology cannot both read standard input")
        plan, topology = _plan_of(_file(options.json), options.json)
    if options.topology is not None:
        topology = _named(options.topology, Topology.from_json, _file(options.topology))
    if plan is None and topology is None:
        raise ValueError(
            "nothing to draw; give --roles, --biggraph, --json or --topology (--help has examples)"
        )
    if plan is not None and topology is not None and plan.world_size != topology.world_size:
        raise ValueError(
            f"the plan has {plan.world_size} ranks and the topology {topology.world_size}; give two of one world"
        )
    if topology is None and plan is not None and plan.machines is not None and None not in plan.machines:
        topology = Topology.from_hosts(f"machine {at}" for at in plan.machines)
    if topology is None:
        return _Found(plan, None, options.segment)
    return _Found(plan, topology, options.segment, topology.ranks, ring_order(topology, options.segment))


def _roles(text: str) -> dict[str, int]:
    roles: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"([^=]+)=(\d{1,9})", part.strip())
        if match is None:
            raise ValueError(
                f"--roles: {part!r} is no ROLE=N; write trainer=4,parameter_server=4,lock_server=1"
            )
        if match[1] in roles:
            raise ValueError(f"--roles: {match[1]!r} is there twice; give each role once")
        roles[match[1]] = int(match[2])
    return roles


def _file(name: str) -> bytes:
    if name == "-" and sys.stdin is None:
        raise _closed("standard input")
    try:
        if name == "-":
            return sys.stdin.buffer.read()
        with open(name, "rb") as file:
            return file.read()
    except OSError as error:  # what fails in the middle says no name
        raise OSError(error.errno, error.strerror, "standard input" if name == "-" else name) from None


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _plan_of(text: bytes, name: str) -> tuple[RankPlan | None, Topology | None]:
    """What `RankPlan.to_json` or ``--json-out`` wrote."""
    if not _has_all(text):
        return _named(name, RankPlan.from_json, text), None
    fields = _named(name, lambda data: documents.load(data, _FORM, ("plan", "topology", "ring")), text)
    plan, topology = (
        None if fields[key] is None else json.dumps(fields[key]) for key in ("plan", "topology")
    )
    return (
        None if plan is None else _named(name, RankPlan.from_json, plan),
        None if topology is None else _named(name, Topology.from_json, topology),
    )


def _has_all(text: bytes) -> bool:
    """Whether it is what ``--json-out`` wrote, wherever in it that stands; what is garbled is not."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("format") == _FORM


def _named(name: str, read: Callable[[str | bytes], _T], text: str | bytes) -> _T:
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{'standard input' if name == '-' else name}: {error}") from None


def _text(found: _Found, options: argparse.Namespace) -> str:
    if options.json_out == "-":
        return _document(found)
    if options.svg == "-":
        return _picture(found)
    width = max(20, shutil.get_terminal_size().columns)
    terminal = sys.stdout is not None and sys.stdout.isatty()
    bold = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    parts = []
    if found.plan is not None:
        parts += [drawing.table(found.plan, width, bold=bold), drawing.groups(found.plan, width, bold=bold)]
    if found.topology is not None:
        parts.append(drawing.ring(found.topology, found.before, found.after, found.segment, width, bold=bold))
    return "\n\n".join(parts) + "\n"


def _picture(found: _Found) -> str:
    world = found.plan or found.topology
    assert world is not None
    return svg.picture(
        f"asynccoll plan: {world.world_size} ranks",
        found.plan,
        found.topology,
        before=found.before,
        after=found.after,
        nbytes=found.segment,
    )


def _document(found: _Found) -> str:
    ring = None
    if found.topology is not None:
        ring = {
            name: {"order": list(order), **ring_cost(found.topology, order, found.segment)._asdict()}
            for name, order in (("before", found.before), ("after", found.after))
        }
    return (
        documents.dump(
            _FORM,
            {
                "plan": None if found.plan is None else json.loads(found.plan.to_json()),
                "topology": None if found.topology is None else json.loads(found.topology.to_json()),
                "ring": ring,
            },
        )
        + "\n"
    )


def _write(name: str, text: str) -> None:
    try:
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None  # a full disk says no name


def _closed(name: str) -> OSError:
    return OSError(errno.EBADF, "is closed", name)


def _refuse(why: str) -> int:
    if sys.stderr is not None:  # else `print` would write to standard output
        print(f"asynccoll plan: {' '.join(why.split())}", file=sys.stderr)
    return 2


def _print(text: str) -> int:
    if sys.stdout is None:
        raise _closed("standard output")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        # A name that the terminal cannot write is shown escaped.
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # The interpreter must not try once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever reads went away: `... | head`
            return 141
        raise OSError(error.errno, error.strerror, "standard output") from None
    return 0
