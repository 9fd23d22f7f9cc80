"""Which share of the weights a step moves: by the rule, and by dry steps on real weights."""

import pytest

from memfit.estimation import Setup, share_that_moves


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("rate", [1e-5, 1e-4, 1e-3])
def test_the_rule_says_what_real_steps_of_the_optimizer_move(dtype, optimizer, rate, tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    pytest.importorskip("safetensors.torch").save_file(
        {str(number): torch.randn(64, 256) * 0.02 for number in range(8)}, tmp_path / "model.safetensors"
    )
    setup = Setup(dtype=dtype, optimizer=optimizer, learning_rate=rate)
    (by_rule, rule), (measured, dry) = share_that_moves(setup), share_that_moves(setup, tmp_path)
    assert by_rule == pytest.approx(measured, abs=0.05)
    assert ("rule" in rule, "real weights" in dry) == (True, True)


def test_where_updates_are_fp32_all_weights_move():
    for setup in (Setup(master_weights=True), Setup(lora_rank=8), Setup(dtype="bf16-amp"), Setup(dtype="fp32")):
        assert share_that_moves(setup) == (1.0, "")
