"""Every command in the README, the docs and the examples runs; every Python block compiles; every link leads somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))

# How to run the short form of a command that is meant for longer: by what it starts with.
SHORT = {
    "python -m benchmarks.allreduce": ["--sizes", "8,4K", "--rounds", "1"],
    "python -m benchmarks.cpu_per_op": ["--iters", "200", "--rounds", "1"],
    "python -m benchmarks.import_time": ["--runs", "1"],
    "python -m tests.conformance.mismatches": ["--sample", "--sizes", "2,3"],
    "python -m benchmarks.objects": [
        *("--nproc", "2", "--rounds", "1", "--iters", "5", "--late", "0.1"),
        *("--broadcast", "1M", "--array", "1M"),
    ],
    "python -m benchmarks.stream": ["--size", "1M", "--rounds", "1"],
    "python -m asynccoll soak": ["--seeds", "4"],
    "python -m benchmarks.ddp": ["--width", "64", "--rounds", "1", "--steps", "1"],
    "python -m tests.torchbackend.torchs_own": ["--world", "2", "--only", "test_get_backend"],
    "torchrun --standalone --nproc-per-node 2 examples/ddp_digits.py": ["--epochs", "1"],
    "python examples/parameter_server.py": ["--machines", "1", "--epochs", "2"],
}

# Commands for a reader's own files, or that this very suite is part of.
NOT_HERE = re.compile(
    r"script\.py|train\.py|-m (module|package|yourpackage)|^tox\b|^pip\b|^python3 -m venv|^\. |--full"
)


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(text):
    """Commands of this project in a text: whole lines of blocks, and inline code."""
    ours = r"(?:asynccoll run -|torchrun --|python3? (?:-m (?:benchmarks|tests|asynccoll)|examples/))[^`\n]*"
    found = re.findall(rf"^(?:    |\$ )?({ours})$", text, re.MULTILINE) + re.findall(rf"`({ours})`", text)
    return [command.split("  #")[0].strip() for command in found]


def all_commands():
    texts = [page.read_text() for page in PAGES] + [path.read_text() for path in EXAMPLES]
    unique = dict.fromkeys(command for text in texts for command in commands(text))
    return [command for command in unique if not NOT_HERE.search(command) and "[" not in command]


def quick_start():
    return re.search(
        r"^## Quick start\n(.*?)^## ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )[1]


def test_the_quick_start_has_two_blocks_the_main_job_and_the_tests():
    first, second = re.findall(r"^```sh\n(.*?)^```$", quick_start(), re.MULTILINE | re.DOTALL)
    assert "asynccoll run -n 4 examples/train_digits.py" in first.splitlines()
    assert second.splitlines()[-1] == "tox"


def test_there_are_commands_to_run():
    assert {"asynccoll run -n 4 examples/train_digits.py", "asynccoll run -n 4 examples/mean.py"} <= set(
        all_commands()
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_run_by_a_command_somewhere(example):
    name = str(example.relative_to(ROOT))
    assert any(name in command.split() for command in all_commands())


@pytest.mark.parametrize("command", all_commands())
def test_the_command_runs(command):
    words = shlex.split(command)
    for start, short in SHORT.items():
        if command.startswith(start):
            words += short
    if words[0] == "asynccoll":
        words[:1] = [sys.executable, "-m", "asynccoll"]
    elif words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    else:
        words[0] = sys.executable
    # Extras that the numpy-only run has not.
    needed = {
        "gloo": "torch",
        "ddp": "torch",
        "parameter_server": "torch",
        "torchs_own": "expecttest",
        "digits": "sklearn",
    }
    for word, extra in needed.items():
        if word in command:
            pytest.importorskip(extra)
    done = subprocess.run(
        words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_compile(page):
    for block in blocks(page, "python"):
        compile(block, str(page), "exec", flags=0x2000)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def test_the_simulated_training_of_the_testing_page_runs():
    (program,) = [block for block in blocks(ROOT / "docs" / "testing.md", "python") if "Simulation(" in block]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"[0-9.]+ [0-9a-f]{32}\n", done.stdout)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_trained_model_is_good_equal_everywhere_and_that_of_one_process():
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "asynccoll", "run", "-n", "4", "examples/train_digits.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(re.search(r"test accuracy ([0-9.]+)", done.stdout)[1]) >= 0.95
    assert "weights: 1 hash on 4 ranks" in done.stdout
    assert float(re.search(r"largest difference of a weight (\S+)", done.stdout)[1]) <= 1e-5
