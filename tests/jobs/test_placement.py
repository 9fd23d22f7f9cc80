"""Which GPU a job gets."""

from memfit.jobs._placement import DEVICE_RESERVE_BYTES, place
from memfit.memory import Claim, Device
from memfit.units import GIB


def gpu(index, free):
    return Device(index, f"MIG-{index}", "stand-in", 80 * GIB, free, 80 * GIB - free, ())


def test_a_job_goes_where_there_is_the_most_room():
    device, why = place((gpu(0, 10 * GIB), gpu(1, 30 * GIB)), {}, 5 * GIB)
    assert device is not None and device.uuid == "MIG-1"
    assert "MIG-1" in why


def test_what_running_jobs_may_still_take_is_not_free():
    claims = {"MIG-1": [Claim(20 * GIB, 1 * GIB)]}
    device, _ = place((gpu(0, 15 * GIB), gpu(1, 30 * GIB)), claims, 5 * GIB)
    assert device is not None and device.uuid == "MIG-0"


def test_a_reserve_stays_for_what_a_context_takes_on_top():
    assert place((gpu(0, 5 * GIB),), {}, 5 * GIB)[0] is None
    assert place((gpu(0, 5 * GIB + DEVICE_RESERVE_BYTES),), {}, 5 * GIB)[0] is not None


def test_why_there_is_no_room_is_told_with_the_arithmetic():
    _, why = place((gpu(0, 5 * GIB),), {}, 6 * GIB)
    assert "needs 6.00 GiB on a GPU" in why and "4.75 GiB may be lent on GPU 0" in why
    assert "there is none here" in place((), {}, 6 * GIB)[1]
