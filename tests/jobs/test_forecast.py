"""What jobs that were measured say about the others."""

from dataclasses import replace

from memfit.jobs import Job, LocalAdmission
from memfit.memory import Footprint


def make():
    """The forecast of a scheduler that knows nothing yet."""
    return LocalAdmission(lambda in_use_bytes: None).forecast


def job(declared=None, stage="", **params):
    footprint = Footprint.declared(declared) if declared else None
    return Job("j", command=("true",), footprint=footprint, params=params, stage=stage)


def test_jobs_of_another_stage_say_nothing_even_with_the_same_parameters():
    forecast = make()
    for size in (10, 20, 30, 40):
        forecast.learn(job(stage="prepare", size=str(size)), Footprint(size))
    assert forecast.predict(job(stage="fold", size="20")) is None
    assert forecast.predict(job(500, stage="fold", size="20")).private_bytes == 500
    assert forecast.predict(job(stage="prepare", size="100")).private_bytes == 40


def test_a_declared_size_stands_until_one_like_it_was_measured():
    forecast = make()
    assert forecast.predict(job(500, lr="1")).private_bytes == 500
    forecast.learn(job(lr="2"), Footprint(100))
    assert forecast.predict(job(500, lr="1")).private_bytes == 500
    forecast.learn(job(lr="1"), Footprint(90))
    assert forecast.predict(job(500, lr="1")).private_bytes == 90


def test_a_job_without_parameters_is_like_every_other():
    forecast = make()
    forecast.learn(job(), Footprint(100))
    forecast.learn(job(), Footprint(80))
    assert forecast.predict(job(500)).private_bytes == 100


def test_jobs_with_the_same_names_count_before_the_whole_stage_and_the_largest_of_them():
    forecast = make()
    for model, batch, size in (("a", "1", 10), ("a", "2MiB", 20), ("b", "1", 500), ("b", "2MiB", 900)):
        forecast.learn(job(model=model, batch=batch, seed="0"), Footprint(size))
    assert forecast.predict(job(model="a", batch="2MiB", seed="1")).private_bytes == 20
    assert forecast.predict(job(model="a", batch="3", seed="1")).private_bytes == 20
    assert forecast.predict(job(model="c", batch="2", seed="1")).private_bytes == 900


def test_device_footprints_are_kept_although_the_host_peak_is_smaller():
    forecast = make()
    forecast.learn(job(), Footprint(1000))
    forecast.learn(job(), Footprint(900, device_bytes={"GPU-1": 7}))
    assert forecast.predict(job()).device_bytes == {"GPU-1": 7}


def test_where_each_job_was_declared_apart_its_own_hint_counts_until_one_like_it_was_measured():
    forecast = make()
    for size in (100, 900):
        forecast.learn(job(declared=size, kind="a", name=f"n{size}"), Footprint(size))
    assert forecast.predict(job(declared=200, kind="a", name="n200")).private_bytes == 200


def test_a_guess_takes_the_jobs_that_ended_with_most_names_in_common_then_most_numbers():
    forecast = make()
    for model, batch, size in (("a", "1", 100), ("a", "1", 100), ("b", "2", 900), ("b", "2", 900), ("b", "3", 500)):
        forecast.learn(job(model=model, batch=batch, seed=str(size)), Footprint(size), peaked=1.0, seconds=9.0)
    guess = lambda **params: forecast.guess(replace(job(**params), id="-".join(["j", *params.values()])))  # noqa: E731
    assert guess(model="a", batch="2", seed="0").most == 100
    assert guess(model="b", batch="2", seed="0").most == 900
    assert guess(model="b", batch="3", seed="0").most == 500
    assert guess(model="b", batch="2", seed="0").is_early


def test_what_running_jobs_took_is_a_forecast_only_once_they_passed_their_phases():
    forecast = make()
    forecast.learn(job(seed="1"), Footprint(100), is_final=False)
    assert forecast.guess(job(seed="2")) is None
    phased = Job("phased", command=("true",), phases=("load",), params={"seed": "3"})
    assert (forecast.guess(phased).size, forecast.guess(phased).most) == (110, 220)
