"""`asynccoll plan`: what it reads, what it draws and writes, and how it refuses."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from asynccoll.cli import main
from asynccoll.planner import ProcessRanks, RankPlan, Topology, ring_order

ROLES = ("--roles", "trainer=4,parameter_server=4,lock_server=1")
LINKS = str(Path(__file__).parents[2] / "examples" / "links.json")


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def plan(capsys, *argv):
    assert main(["plan", *argv]) == 0
    seen = capsys.readouterr()
    assert seen.err == ""
    return seen.out


def refused(capsys, *argv):
    assert main(["plan", *argv]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    return seen.err


def stdin(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_roles_groups_and_the_ring_are_drawn(capsys):
    lines = plan(capsys, *ROLES, "--machines", "4").splitlines()
    assert lines[0] == "9 ranks in 3 roles on 4 machines"
    assert "0        0        4                 8" in lines
    assert "parameter_server  1       4-7" in lines
    assert "a ring of 9 ranks on 4 hosts" in lines
    assert "before  8" in lines
    assert "after   4" in lines


def test_without_machines_there_is_no_ring(capsys):
    out = plan(capsys, *ROLES)
    assert "lock_server       1       8" in out
    assert "ring" not in out


def test_biggraph_with_its_numbers(capsys):
    out = plan(capsys, "--biggraph", "3", "-1")
    assert "13 ranks in 5 roles on 3 machines" in out
    assert "partitions.0 to partitions.15  16      0-2 10-12" in out
    assert "any" in plan(capsys, "--biggraph", "5", "3")


def test_a_topology_alone_is_a_ring_before_and_after(capsys):
    out = plan(capsys, "--topology", LINKS)
    assert out.startswith("a ring of 8 ranks on 2 hosts\n")
    assert "before  4                5.11 ms       13.5 ms" in out
    assert "after     node-a [0 5 4 1] -> node-b [7 3 2 6] -> 0" in out
    assert "times for segments of 1 MiB" in out
    assert "times for segments of 64 KiB" in plan(capsys, "--topology", LINKS, "--segment", "64K")


def test_what_is_written_as_json_is_read_again(capsys, tmp_path):
    file = str(tmp_path / "plan.json")
    drawn = plan(capsys, *ROLES, "--machines", "4", "--json-out", file)
    assert plan(capsys, "--json", file) == drawn
    found = json.loads(Path(file).read_text())
    expected = RankPlan.from_roles({"trainer": 4, "parameter_server": 4, "lock_server": 1}, machines=4)
    assert RankPlan.from_json(json.dumps(found["plan"])) == expected
    topology = Topology.from_json(json.dumps(found["topology"]))
    assert found["ring"]["before"]["order"] == list(range(9))
    assert found["ring"]["after"]["order"] == list(ring_order(topology))
    assert set(found["ring"]["after"]) == {"order", "slowest", "total"}


def test_json_to_standard_output_is_all_there_is(capsys):
    (line,) = plan(capsys, "--topology", LINKS, "--json-out", "-").splitlines()
    found = json.loads(line)
    assert found["plan"] is None
    assert found["ring"]["after"]["order"] == [0, 5, 4, 1, 7, 3, 2, 6]


def test_json_comes_from_standard_input_too(capsys, monkeypatch):
    made = ProcessRanks.from_num_invocations(3, -1).plan()
    stdin(monkeypatch, made.to_json())
    assert plan(capsys, "--json", "-") == plan(capsys, "--biggraph", "3", "-1")
    topology = Topology.from_hosts(["a", "b", "a", "b"])
    stdin(monkeypatch, topology.to_json())
    assert "after     a [0 2] -> b [1 3] -> 0" in plan(capsys, "--topology", "-")


def test_the_image_is_a_file_of_its_own(capsys, tmp_path):
    file = tmp_path / "plan.svg"
    plan(capsys, "--biggraph", "3", "-1", "--svg", str(file))
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    assert root.find("{http://www.w3.org/2000/svg}title").text == "asynccoll plan: 13 ranks"


def test_the_image_to_standard_output_is_all_there_is(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = 'a b=1,<&>"é=2,\N{CJK UNIFIED IDEOGRAPH-65E5}=1'
    root = ElementTree.fromstring(plan(capsys, "--roles", names, "--machines", "2", "--svg", "-"))
    assert {'<&>"é', "a b"} <= {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert list(tmp_path.iterdir()) == []  # and above all no file of that name


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="a file that opens and cannot be read")
def test_a_file_that_fails_in_the_middle_is_said_with_its_name(capsys):
    assert refused(capsys, "--json", "/proc/self/mem").startswith("asynccoll plan: /proc/self/mem: ")


@pytest.mark.parametrize("columns", ["40", "120"])
def test_it_is_as_wide_as_the_terminal(capsys, monkeypatch, tmp_path, columns):
    monkeypatch.setenv("COLUMNS", columns)
    file = tmp_path / "topology.json"
    file.write_text(Topology.from_hosts([f"node-{rank % 3}" for rank in range(13)]).to_json())
    widest = max(map(len, plan(capsys, "--biggraph", "3", "-1", "--topology", str(file)).splitlines()))
    assert widest <= int(columns)


@pytest.mark.parametrize(
    ("terminal", "environment", "bold"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_headings_are_bold_on_a_terminal_only(capsys, monkeypatch, terminal, environment, bold):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert ("\x1b[1m" in plan(capsys, *ROLES)) is bold


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "nothing to draw; give --roles, --biggraph, --json or --topology"),
        (["--roles", "trainer"], "--roles: 'trainer' is no ROLE=N"),
        (["--roles", "a=1,,b=1"], "--roles: '' is no ROLE=N"),
        (["--roles", "a=-1"], "--roles: 'a=-1' is no ROLE=N"),
        (["--roles", "a=1,a=2"], "--roles: 'a' is there twice"),
        (["--roles", "a=0"], "0 ranks together"),
        (["--roles", "a=2", "--machines", "3"], "3 machines, and the largest role has 2 ranks; use 1 to 2"),
        (["--biggraph", "0", "-1"], "num_machines is 0; a training has at least one machine"),
        (["--biggraph", "2", "-2"], "num_partition_servers is -2"),
        (["--biggraph", "2", "0", "--machines", "2"], "--machines goes with --roles"),
        (["--json", "/no/such/file"], "/no/such/file: No such file or directory"),
        (["--topology", "/no/such/file"], "/no/such/file: No such file or directory"),
        (["--json", "-", "--topology", "-"], "cannot both read standard input"),
        (["--json", LINKS], "the field 'roles' is missing"),
        (["--roles", "a=3", "--topology", LINKS], "the plan has 3 ranks and the topology 8"),
        (["--roles", "a=3", "--svg", "/no/such/directory/a.svg"], "/no/such/directory/a.svg: No such file"),
        (["--roles", "a=3", "--json-out", "/no/such/directory/a"], "/no/such/directory/a: No such file"),
        (["--roles", "a=3", "--json-out", "-", "--svg", "-"], "--svg and --json-out cannot both write"),
        (["--roles", "a=3", "--json-out", "a", "--svg", "./a"], "--svg and --json-out cannot both write"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, argv, said):
    error = refused(capsys, *argv)
    assert error.startswith("asynccoll plan: ")
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize(
    "argv",
    [
        ["--roles", "a=1", "--biggraph", "1", "1"],
        ["--biggraph", "1"],
        ["--biggraph", "one", "1"],
        ["--topology", LINKS, "--segment", "1.5"],
        ["--nonsense"],
        ["more"],
    ],
)
def test_what_is_no_command_line_shows_the_usage(capsys, argv):
    error = refused(capsys, *argv)
    assert error.startswith("usage: asynccoll plan")
    assert "asynccoll plan: error: " in error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ("nonsense", "no JSON"),
        ("[1]", "'document'"),
        ('{"format": "asynccoll.plan"}', "the field 'version' is missing"),
        (
            '{"format": "asynccoll.plan", "version": 1, "plan": 5, "topology": null, "ring": null}',
            "'document' is 5",
        ),
        (
            '{"format": "asynccoll.plan", "version": 1, "plan": null, "topology": null, "ring": null}',
            "nothing to draw",
        ),
        (
            '{"format": "asynccoll.RankPlan", "version": 9, "roles": 1, "groups": 1, "machines": 1}',
            "'version' is 9",
        ),
        ("\N{REPLACEMENT CHARACTER}", "no JSON"),
    ],
)
def test_a_garbled_file_is_refused_with_its_name_and_the_field(capsys, monkeypatch, text, said):
    stdin(monkeypatch, text)
    error = refused(capsys, "--json", "-")
    assert said in error
    assert error.count("\n") == 1
    assert "standard input: " in error or said == "nothing to draw"


def test_help_has_examples_that_work(capsys, monkeypatch, tmp_path):
    assert main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    examples = [
        line.split("  ")[1].strip() for line in text.splitlines() if line.startswith("  asynccoll plan ")
    ]
    assert len(examples) == 5
    monkeypatch.chdir(tmp_path)
    (tmp_path / "links.json").write_text(Path(LINKS).read_text())
    for example in examples:
        plan(capsys, *example.split()[2:])
    assert (tmp_path / "ring.svg").exists()


def test_a_name_that_the_terminal_cannot_write_is_escaped():
    done = subprocess.run(
        [sys.executable, "-m", "asynccoll", "plan", "--roles", "ärger=1"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xe4rger" in done.stdout


def test_a_reader_that_goes_away_is_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "asynccoll", "plan", "--roles", "a=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        process.stdout.close()  # before it can have written: the interpreter has yet to start
        error = process.stderr.read()
        code = process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert (code, error) == (141, "")


def test_it_needs_nothing_heavy():
    program = "import sys, asynccoll.cli.plan\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "rich", "multiprocessing"} & set(done.stdout.split())


def test_what_json_out_wrote_is_known_by_its_format_alone(capsys, tmp_path):
    whole = json.loads(plan(capsys, "--biggraph", "2", "3", "--json-out", "-"))
    drawn = plan(capsys, "--biggraph", "2", "3")
    turned = json.dumps(dict(reversed(whole.items())))
    for text in (turned.encode(), turned.encode("utf-16"), turned.encode("utf-8-sig")):
        (tmp_path / "plan.json").write_bytes(text)
        assert plan(capsys, "--json", str(tmp_path / "plan.json")) == drawn
    roles = RankPlan.from_roles({"asynccoll.plan": 2})
    (tmp_path / "plan.json").write_text(roles.to_json())
    assert "asynccoll.plan" in plan(capsys, "--json", str(tmp_path / "plan.json"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is full")
@pytest.mark.parametrize("option", ["--svg", "--json-out"])
def test_a_full_disk_is_said_with_the_name_of_the_file(capsys, option):
    assert refused(capsys, *ROLES, option, "/dev/full").startswith("asynccoll plan: /dev/full: No space left")


@pytest.mark.skipif(os.name != "posix", reason="a shell")
@pytest.mark.parametrize(
    ("argv", "to", "said"),
    [
        ("--roles a=2", ">&-", "standard output: is closed"),
        ("--roles a=2 --json-out -", ">&-", "standard output: is closed"),
        ("--json -", "<&-", "standard input: is closed"),
        ("--roles a=x", "2>&-", ""),
        pytest.param(
            "--roles a=2",
            ">/dev/full",
            "standard output: No space left on device",
            marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is full"),
        ),
    ],
)
def test_a_stream_that_is_closed_or_full_is_no_traceback(argv, to, said):
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m asynccoll plan {argv} {to}', sys.executable],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (f"asynccoll plan: {said}\n" if said else "")


def test_ctrl_c_is_an_exit_code(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("asynccoll.cli.plan.ring_order", interrupted)
    assert main(["plan", "--topology", LINKS]) == 130
    assert capsys.readouterr() == ("", "")
