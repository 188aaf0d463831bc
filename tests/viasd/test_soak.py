"""Random decoding for a while, and that the soak run would notice a wrong token."""

import subprocess
import sys
from pathlib import Path

import pytest

import soak
import viasd

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.parametrize("minutes", ["0.25", pytest.param("1", marks=pytest.mark.full)])
@pytest.mark.skipif(sys.platform != "linux", reason="the soak run reads memory the way Linux tells it")
def test_random_decoding_gives_no_wrong_token_and_takes_no_more_memory(minutes):
    # A process of its own: the memory of other tests must not count.
    command = [sys.executable, str(SCRIPT), "--minutes", minutes]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_another_model_is_noticed():
    model, other = soak.tiny(0, 96), soak.tiny(1, 96)
    run = soak.Soak(model, other, 96, tie=1e-3)
    run.plain = viasd.load(other, drafter=None)
    greedy = (number for number in range(100) if soak.Case.draw(number, 96).temperature == 0)
    with pytest.raises(soak.Mismatch, match="first difference"):
        run.run(next(greedy))
