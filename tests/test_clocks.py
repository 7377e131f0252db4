"""No module of the package asks for the time of day: clocks of hosts are set, jump, and disagree. Read from the syntax trees."""

import ast
from pathlib import Path

import pytest

import asynccoll

ROOT = Path(asynccoll.__file__).parent
OF_DAY = {
    "time": {"time", "time_ns", "ctime", "gmtime", "localtime", "asctime", "strftime", "CLOCK_REALTIME"},
    "datetime": {"now", "utcnow", "today", "fromtimestamp", "utcfromtimestamp"},
    "date": {"today", "fromtimestamp"},
}
"""Name of a module or class -> what of it tells the time of day."""


def uses(code):
    """Every use of the time of day in ``code``, as ``"name (line)"``."""
    tree = ast.parse(code)
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if node.attr in OF_DAY.get(names.get(owner, owner), ()):
                yield f"{ast.unparse(node)} (line {node.lineno})"
        elif isinstance(node, ast.ImportFrom) and node.module in OF_DAY:
            for alias in node.names:
                if alias.name in OF_DAY[node.module]:
                    yield f"{node.module}.{alias.name} (line {node.lineno})"


def test_no_module_asks_for_the_time_of_day():
    found = {
        str(path.relative_to(ROOT)): used
        for path in sorted(ROOT.rglob("*.py"))
        if (used := list(uses(path.read_text())))
    }
    assert not found, "deadlines and elapsed times are for time.monotonic() and loop.time()"


@pytest.mark.parametrize(
    "code",
    [
        "import time\ntime.time()",
        "import time as clock\nclock.time_ns()",
        "from time import time",
        "from time import time as now\nnow()",
        "import time\ntime.clock_gettime(time.CLOCK_REALTIME)",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime as moment\nmoment.utcnow()",
    ],
)
def test_the_reader_sees_every_form(code):
    assert list(uses(code))


@pytest.mark.parametrize(
    "code", ["import time\ntime.monotonic()", "loop.time()", "from datetime import timedelta"]
)
def test_the_reader_minds_no_other_clock(code):
    assert not list(uses(code))
