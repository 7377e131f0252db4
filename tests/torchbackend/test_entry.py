"""What `import torch` loads in every program of an environment that has asynccoll."""

import importlib.metadata
import subprocess
import sys

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def printed(code):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=90,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_torch_knows_the_backend_and_has_not_loaded_asynccoll():
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "print(dist.is_backend_available('asynccoll'), dist.Backend('asynccoll'), 'asynccoll' in sys.modules)\n"
        "print(*dist.Backend.backend_capability['asynccoll'], dist.get_default_backend_for_device('cpu'))\n"
    )
    assert printed(code) == ["True", "asynccoll", "False", "cpu", "gloo"]


def test_the_entry_point_never_raises():
    (point,) = [
        one for one in importlib.metadata.entry_points(group="torch.backends") if one.name == "asynccoll"
    ]
    entry, _, function = point.value.partition(":")
    code = (
        f"import sys, types, {entry}\n"
        "assert not {'torch', 'asynccoll', 'numpy'} & set(sys.modules)\n"
        "sys.modules['torch'] = types.ModuleType('torch')  # one that was built without torch.distributed\n"
        f"{entry}.{function}()\n"
        "print('quiet')\n"
    )
    assert printed(code) == ["quiet"]
