"""The benchmark of a DDP step: its figures from its rounds, and what it says of wrong weights. Without torch, and without ranks."""

import pytest

from benchmarks import ddp


def rank(ours, theirs, **more):
    return {
        "times": {"asynccoll": ours, "gloo": theirs},
        "cpu": {"asynccoll": [0.003], "gloo": [0.004]},
        "parameters": 10,
        "torch": "2",
        "apart": 1e-7,
        "same_bits": True,
        **more,
    }


def test_a_share_is_of_the_slowest_ranks_of_a_round_and_the_median_over_rounds():
    lines, share = ddp.table([rank([0.1, 0.2, 0.4], [0.2, 0.2, 0.2]), rank([0.2, 0.1, 0.1], [0.1, 0.4, 0.1])])
    # Round by round: 0.2 of 0.2, 0.2 of 0.4, 0.4 of 0.2.
    assert share == 1.0
    assert [line.split() for line in lines[1:3]] == [
        ["asynccoll", "200.00", "200.00", "400.00", "3.00"],
        ["gloo", "200.00", "200.00", "400.00", "4.00"],
    ]
    assert lines[3] == "# share of gloo's time: 1.00 (rounds 0.50 to 2.00)"


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ({}, 0, "1.0e-07 from gloo's, the same bits on all ranks"),
        ({"apart": 1e-3}, 1, "1.0e-03 from gloo's"),
        ({"same_bits": False}, 1, "DIFFERENT on all ranks"),
    ],
)
def test_wrong_weights_of_one_rank_are_an_exit_code_of_1(more, code, said, monkeypatch, capsys):
    ranks = [rank([0.1], [0.1]), rank([0.1], [0.1], **more)]
    monkeypatch.setattr(ddp.command, "launch", lambda *args, **kwargs: ranks)
    assert ddp.main([]) == code
    assert said in capsys.readouterr().out
