"""What torch's features do on gloo they do on asynccoll, with the same answers."""

import pytest

torch = pytest.importorskip("torch")

from tests.torchbackend.scenarios import complete, worse  # noqa: E402
from tests.torchbackend.suite import SCENARIOS  # noqa: E402

pytestmark = pytest.mark.torch


def assert_like_gloo(size, chosen):
    fallen = []
    table = complete(["gloo", "asynccoll"], size, chosen, fallen)
    assert len(table) == 2 * sum(size in one.worlds for one in chosen)
    assert worse(table) == []
    assert [text for text in fallen if text.startswith("asynccoll")] == []


@pytest.mark.timeout(300)
def test_two_ranks():
    assert_like_gloo(2, [one for one in SCENARIOS.values() if not one.slow])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_compiled():
    assert_like_gloo(2, [one for one in SCENARIOS.values() if one.slow])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks():
    assert_like_gloo(4, list(SCENARIOS.values()))
