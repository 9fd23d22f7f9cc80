"""The scheduler against a fake backend: no process, no clock."""

import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.contract import FakeBackend, FakeJob, ListSource
from memfit.errors import DoesNotFitError
from memfit.jobs import Job, LocalAdmission, Policy, Scheduler, SlurmBackend, StopRequest, Submission, Verdict
from memfit.memory import HOST, Budget, Device, Footprint, Others
from memfit.units import GIB, MIB


def others_of(num, used, unused):
    return Others(Counter({HOST: num}), Counter({HOST: used}), Counter({HOST: unused}))


class Deadline:
    """A request to stop that fails a test in which jobs wait for ever."""

    def __init__(self, found, seconds):
        self.found, self.seconds = found, seconds

    @property
    def level(self):
        assert self.found.backend.now < self.seconds
        return 0


class FakeClaims:
    def __init__(self, unused, num=1):
        self.now, self.written, self.is_deciding = others_of(num, 0, unused), [], False
        self.all_unused = []

    def others(self):
        return self.now

    @contextmanager
    def deciding(self):
        assert not self.is_deciding  # the host's lock is not to be taken twice
        self.is_deciding = True
        yield self.now
        self.is_deciding = False

    def write(self, *, used, unused):
        self.written.append((used[HOST], unused[HOST]))
        self.all_unused.append(unused)


class World:
    """Fake jobs under a fake budget, of which a neighbour uses a part.

    ``known`` is the size of earlier jobs, one or by kind; ``told`` are fields that the backend says of each job;
    ``gpus`` are the GiB of each GPU with what strangers take of it; ``each`` and ``jobs`` are fields of all jobs and of
    single ones. Other options go to the policy.
    """

    def __init__(self, tmp_path, scripts, limit=1000, *, known=None, claims=None, **options):
        told, each, jobs = (options.pop(name, {}) for name in ("told", "each", "jobs"))
        self.gpus, self.cap, self.cpus = options.pop("gpus", ()), options.pop("cap", None), options.pop("cpus", 64)
        self.neighbour, reserve = options.pop("neighbour", 0), options.pop("reserve", 0)
        self.events, self.backend, self.limit, self.claims = [], FakeBackend(scripts), limit, claims
        self.gpu_name, self.in_use_seen = "GPU", 0
        say = options.pop("say", lambda kind, **fields: self.events.append((kind, fields)))
        if not options.pop("has_walls", True):
            self.backend.enforcer, self.backend.traits = None, replace(self.backend.traits, enforces_memory=True)
        source, is_shared = options.pop("source", None), options.pop("is_shared", True)
        (tmp_path / "proc").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/meminfo").write_text("MemTotal: 1048576 kB\nMemAvailable: 1048576 kB\n")
        self.budget = Budget.read(root=tmp_path, env={}, reserve_bytes=reserve)
        self.made = [Job(name, command=("true",), **{**each, **jobs.get(name, {})}) for name in scripts]
        policy = Policy(**{"slack": 0.0, **options})
        clock = self.backend.clock
        self.admission = LocalAdmission(self.read, policy=policy, claims=claims, now=clock, is_shared=is_shared)
        for kind, size in known.items() if isinstance(known, dict) else [("", known)] if known else ():
            params = {"kind": kind} if kind else {}
            self.admission.forecast.learn(Job("known", command=("true",), params=params), Footprint(size))
        self.scheduler = Scheduler(source or ListSource(self.made), self.backend, self.admission, say=say)
        if not is_shared:
            self.backend.traits = SlurmBackend.traits
        if told:
            poll = self.backend.poll
            self.backend.poll = lambda: {name: replace(status, **told) for name, status in poll().items()}

    def read(self, in_use_bytes):
        self.in_use_seen = max(self.in_use_seen, in_use_bytes)
        free = self.limit - self.backend.used_bytes - self.neighbour
        limits = [replace(self.budget.binding, limit_bytes=self.limit, headroom_bytes=free)]
        if self.cap is not None:
            own = {"limit_bytes": self.cap, "headroom_bytes": self.cap - in_use_bytes}
            limits.insert(0, replace(limits[0], name="cap", scope="job", id="", **own))
        used = sum((Counter(one.device_used_bytes) for one in self.backend.poll().values()), Counter())
        devices = []
        for number, (total, taken) in enumerate(self.gpus):
            uuid = f"{self.gpu_name}-{number}"
            free = (total - taken) * GIB - used[uuid]
            devices.append(Device(number, uuid, "stand-in", total * GIB, free, taken * GIB, ()))
        return replace(self.budget, limits=tuple(limits), num_cpus=self.cpus, devices=tuple(devices))

    def run(self, **options):
        self.statuses = self.scheduler.run(**options)
        return self

    def of(self, kind):
        return [fields for name, fields in self.events if name == kind]

    # What came of it

    @property
    def ends(self):
        found = {name: status.state for name, status in self.statuses.items()}
        return "completed" if {*found.values()} == {"completed"} else found

    @property
    def order(self):
        return self.backend.submitted

    @property
    def starts(self):
        return len(self.backend.submitted)

    @property
    def most(self):
        return self.backend.most_at_once

    @property
    def cancelled(self):
        return self.backend.cancelled

    @property
    def ended(self):
        return [fields["job"] for fields in self.of("end")]

    @property
    def reserved(self):
        return [fields["reservation_bytes"] for fields in self.of("admit")]

    @property
    def devices(self):
        return [[*fields["devices"]] for fields in self.of("admit")]

    @property
    def device_gib(self):
        return [round(size / GIB, 2) for fields in self.of("admit") for size in fields["devices"].values()]

    @property
    def waits(self):
        return {fields["on"] for fields in self.of("wait")}

    @property
    def retries(self):
        return [fields["reason"] for fields in self.of("retry")]

    @property
    def asides(self):
        return [fields["reason"] for fields in self.of("aside")]

    @property
    def shorts(self):
        return len(self.of("short"))

    @property
    def learned(self):
        return [fields["reservation_bytes"] for fields in self.of("footprint")]

    @property
    def why(self):
        return self.of("end")[0]["why_final"]


@pytest.fixture
def world(tmp_path):
    return lambda scripts, limit=1000, **options: World(tmp_path, scripts, limit, **options)


def same(num, *sizes, **options):
    return {f"j{number}": FakeJob(sizes, **options) for number in range(1, num + 1)}


def declared(size):
    return {"footprint": Footprint.declared(size)}


def kinds(*names):
    return {name: {"params": {"kind": name.rstrip("0123456789")}} for name in names}


def on_gpus(num=1, gib=None):
    return {"num_devices": num, "device_bytes": gib and gib * GIB}


LONG, SAVED = (100,) * 30, {"started": 1.0, "checkpointed": 2.0}
PHASED, FIVE = {"phases": ("load",)}, same(5, *[100] * 5)
SIZED = {"s1": 25, "s2": 25, "s3": 25, "large": 75, "middle": 50}
SMALL = {"small": 20} | {f"large{letter}": 90 for letter in "abcde"}
GROWING = FakeJob((100, 150, 200, 300, 300))
#: What jobs do, under which budget and policy, and what must come of it.
SCENES = {
    "as many at once as the measured footprint allows": (
        same(5, 50, 100, 100, 100), {"limit": 340, "slack": 0.1, "known": 100}, {"most": 3}),
    "what is reserved and not used yet is not available": (
        same(5, *[1] * 8, 100, 100), {"limit": 230, "known": 100}, {"most": 2}),
    "a job starts as soon as there is room": (
        {"a": FakeJob(LONG)} | {name: FakeJob((100,) * 3) for name in "bcd"}, {"limit": 220, "known": 100},
        {"ended": ["b", "c", "d", "a"]}),
    "the reserve stays free": (FIVE, {"limit": 320, "reserve": 100, "known": 100}, {"most": 2}),
    "without mapped files no room for their cache": (FIVE, {"limit": 400, "known": 100}, {"most": 4}),
    "room for the page cache of what jobs map": (
        FIVE, {"limit": 400, "known": 100, "each": {"mapped_bytes": 100}}, {"most": 3}),
    "a quarter of the limit for a panel that is larger than it": (
        FIVE, {"limit": 400, "known": 100, "each": {"mapped_bytes": 10_000}}, {"most": 3}),
    "what a job maps never keeps it from running alone": (
        same(2, *[390] * 3), {"limit": 400, "known": 390, "each": {"mapped_bytes": 300}}, {"most": 1}),
    "the user's cap counts what running jobs use": (
        same(3, *[100] * 6), {"limit": 250, "known": 100}, {"in_use_seen": 200}),
    "a cap of the user's own is not lessened by other runs": (
        same(3, *[100] * 4), {"cap": 300, "claims": FakeClaims(500), "known": 100}, {"most": 3}),
    "a neighbour holds jobs back": (
        same(4, *[100] * 6), {"limit": 500, "known": 100, "neighbour": 250}, {"most": 2, "waits": {"memory"}}),
    "a job that outgrows similar ones raises the reservations to come": (
        {"a": FakeJob((100,) * 9), "b": FakeJob((100, 100, 300, 300)), "c": FakeJob((100,) * 3)},
        {"limit": 450, "known": 100, "max_parallel": 2}, {"learned": [300], "reserved": [100, 100, 300]}),
    "forced": (same(3, *[100] * 3), {"limit": 50, "force": True}, {"most": 3}),
    "a declared size is a hint and the measured one counts": (
        same(9, *[100] * 40), {"limit": 420, "each": declared(400)}, {"most": 4}),
    "no more than max_parallel": (
        same(5, *[1] * 4), {"max_parallel": 2}, {"most": 2, "waits": {"max_parallel"}}),
    "one at a time keeps the order": (same(4, 1, 1), {"max_parallel": 1}, {"most": 1, "order": ["j1", "j2", "j3", "j4"]}),
    "a failure stops the others": (
        {"a": FakeJob((1,) * 3, state="failed"), "b": FakeJob((1,) * 50), "c": FakeJob()},
        {"on_failure": "stop", "max_parallel": 2, "known": 1},
        {"ends": {"a": "failed", "b": "preempted"}, "order": ["a", "b"]}),
    "a failure lets the others run": (
        {"a": FakeJob(state="failed"), "b": FakeJob(state="out_of_memory"), "c": FakeJob()}, {"retries": 0},
        {"ends": {"a": "failed", "b": "out_of_memory", "c": "completed"}, "ended": ["a", "b", "c"]}),
    "the next one is measured when the first fails before": (
        {"a": FakeJob((5, 5), settles_at=99, state="failed"), "b": FakeJob((7,) * 4), "c": FakeJob((7,))},
        {"each": PHASED}, {"reserved": [None, None, 7]}),
    "what one wants and is not free holds others back until a neighbour ends": (
        {"a": FakeJob((100,) * 12), "b": FakeJob((100, 100, 260, 260, 260)), "c": FakeJob((100,) * 2)},
        {"limit": 320, "known": 100}, {"ends": "completed", "order": ["a", "b", "c"], "cancelled": [], "shorts": 1}),
    "when all wait at their limits the cheapest gives way and comes again": (
        {"a": GROWING, "b": GROWING}, {"limit": 400, "known": 100},
        {"ends": "completed", "starts": 3, "retries": ["it gave way to other jobs"],
         "asides": ["a waits for memory and what is free is reserved"]}),
    "another run that holds next to nothing is not waited for": (
        {"a": FakeJob((100, 2000))}, {"claims": FakeClaims(10)}, {"ends": {"a": "out_of_memory"}, "starts": 1}),
    "a job larger than its cap is not asked to wait for another run": (
        {"big": FakeJob((100, 2000)), "small": FakeJob((100, 100))},
        {"limit": 5000, "cap": 1000, "claims": FakeClaims(500)},
        {"ends": {"big": "out_of_memory", "small": "completed"}}),
    # Ends and restarts
    "out of memory: again with more, and the last time with all": (
        {"a": FakeJob((100,), state="out_of_memory")}, {"limit": 10_000, "known": 100},
        {"ends": {"a": "out_of_memory"}, "reserved": [100, 150, 10_000]}),
    "out of memory once": (
        {"a": FakeJob((7000,), ends=("out_of_memory",))}, {"limit": 10_000, "known": 7000},
        {"ends": "completed", "reserved": [7000, 10_000]}),
    "one that had all is not tried again": (
        {"a": FakeJob((9000,), state="out_of_memory")}, {"limit": 10_000, "told": {"evidence": {"data_limit_bytes": 10_000}}},
        {"starts": 1, "why": re.compile("it had .* and the whole budget is")}),
    "refused at the limit of its start, while its reservation has grown since": (
        {"a": FakeJob((100, 260), ends=("out_of_memory",))}, {"limit": 1000, "has_walls": False, "retries": 1, "told": {"evidence": {"data_limit_bytes": 130}}},
        {"ends": "completed", "starts": 2}),
    "a refused allocation is a lack of memory whatever the exit code": (
        {"a": FakeJob((100,), ends=("failed",))}, {"known": 100, "told": {"wants_more": True}},
        {"ends": "completed", "retries": ["it ran out of memory at 100 B; it gets 150 B"]}),
    "device memory ran out without a GPU": (
        {"a": FakeJob(state="out_of_memory")}, {"told": {"evidence": {"place": "device"}}},
        {"starts": 1, "why": re.compile("--num-gpus 1")}),
    **{f"asked for and {state}": ({"a": FakeJob(state=state)}, {"told": {"asked": True}}, {"starts": 1})
       for state in ("preempted", "cancelled", "out_of_memory")},
    **{f"{state}, {told or 'not saved'}": (
        {"a": FakeJob((100,), state=state)}, {"told": told}, {"ends": {"a": state}, "starts": starts})
       for state, told, starts in [
           ("failed", {}, 1), ("failed", SAVED, 1), ("timeout", {}, 1), ("timeout", SAVED, 3),
           ("timeout", {"started": 1.0, "checkpointed": 1.0}, 1), ("node_fail", {}, 3), ("preempted", {}, 2)]},
    **{f"{state} without retries": ({"a": FakeJob(state=state)}, {"retries": 0}, {"starts": 1})
       for state in ("node_fail", "preempted", "out_of_memory")},
    **{f"on a cluster {state}, {told or 'not saved'}": (
        {"a": FakeJob(ends=(state,) * 5)}, {"told": told, "is_shared": False}, {"starts": starts})
       for state, told, starts in [
           ("preempted", {}, 4), ("preempted", SAVED, 6), ("node_fail", {}, 4), ("timeout", {}, 1), ("timeout", SAVED, 6)]},
    # What is known of others
    "jobs with the same names are similar": (
        {name: FakeJob((10 if name[0] == "s" else 500,) * 3) for name in ("s1", "l1", "s2", "l2")},
        {"limit": 1100, "max_parallel": 1,
         "jobs": {name: {"params": {"size": name[0], "seed": name[1]}} for name in ("s1", "l1", "s2", "l2")}},
        {"ends": "completed", "reserved": [None, 13, 13, 650]}),
    "only jobs of one stage are similar": (
        {"p": FakeJob((500,) * 2), "f1": FakeJob((10,) * 3), "f2": FakeJob((10,) * 3)},
        {"limit": 1100, "max_parallel": 1, "jobs": {"p": {"stage": "prepare"}, "f1": {"stage": "f"}, "f2": {"stage": "f"}}},
        {"reserved": [None, None, 10]}),
    "numbers too large for a number are names": (
        same(5, 5), {"jobs": {f"j{number}": {"params": {"x": text}} for number, text in
                              enumerate(["1e200", "1e300", "nan", "2", "inf"], 1)}}, {"ends": "completed"}),
    "what similar jobs took is no reason to refuse one": (
        {f"j{number}": FakeJob((20 * number,)) for number in range(1, 5)} | {"j9": FakeJob((60,) * 3)},
        {"limit": 100, "max_parallel": 1, "jobs": {f"j{n}": {"params": {"x": str(n)}} for n in (1, 2, 3, 4, 9)}},
        {"ends": "completed"}),
    # Order
    "the oldest that fits": (
        {name: FakeJob((size,) * 2) for name, size in SIZED.items()},
        {"limit": 100, "jobs": {name: {"params": {"kind": name}} for name in SIZED}, "known": SIZED},
        {"order": ["s1", "s2", "s3", "large", "middle"]}),
    "the largest that fits": (
        {name: FakeJob((size,) * 2) for name, size in SIZED.items()},
        {"limit": 100, "jobs": {name: {"params": {"kind": name}} for name in SIZED}, "known": SIZED, "largest_first": True},
        {"order": ["large", "s1", "middle", "s2", "s3"]}),
    "a small job that two larger ones passed starts as soon as it fits": (
        {name: FakeJob((size,) * 2) for name, size in SMALL.items()},
        {"limit": 100, "jobs": kinds(*SMALL), "known": SMALL, "largest_first": True},
        {"order": ["largea", "largeb", "small", "largec", "larged", "largee"]}),
    "an unknown size counts as the largest": (
        {"a": FakeJob((10,)), "b": FakeJob((10,))},
        {"limit": 100, "jobs": {"a": kinds("a")["a"], "b": {"stage": "b"}}, "known": {"a": 10}, "largest_first": True},
        {"order": ["b", "a"]}),
    "more devices and more memory on them are larger": (
        same(4, 9), {"known": 9, "gpus": [(80, 0)] * 2, "max_parallel": 1, "largest_first": True,
                     "jobs": {"j1": {}, "j2": on_gpus(1, 2), "j3": on_gpus(1, 3), "j4": on_gpus(2, 1)}},
        {"order": ["j4", "j3", "j1", "j2"]}),
    "one in the backend's queue blocks nobody": (
        {"a": FakeJob((10,) * 3, num_queued=5), "b": FakeJob((10,) * 3), "c": FakeJob((10,) * 3)}, {"known": 10},
        {"ends": "completed", "ended": ["b", "c", "a"]}),
    # GPUs
    "jobs share GPUs while what they declare fits beside strangers": (
        same(3, *[1] * 30), {"known": 1, "gpus": [(80, 55), (80, 69)], "each": on_gpus(1, 10)},
        {"devices": [["GPU-0"], ["GPU-0"], ["GPU-1"]], "most": 3}),
    "two jobs with two GPUs each run on four": (
        same(3, *[1] * 9, device_bytes=(50 * GIB,) * 9), {"known": 1, "gpus": [(80, 0)] * 4, "each": on_gpus(2, 50)},
        {"devices": [["GPU-0", "GPU-1"], ["GPU-2", "GPU-3"], ["GPU-0", "GPU-1"]], "most": 2, "waits": {"device"},
         "ends": "completed"}),
    "what one was measured to take of its GPU counts for similar ones": (
        same(4, *[1] * 9, device_bytes=(30 * GIB,) * 9, settles_at=4), {"known": 1, "gpus": [(80, 0)], "each": on_gpus()},
        {"device_gib": [79.75, 30, 30, 30], "most": 2}),
    "what it takes there counts once that is settled": (
        same(2, *[9] * 40, device_bytes=(30 * GIB,) * 40, settles_at=9), {"known": 1, "gpus": [(80, 0)], "each": on_gpus()},
        {"device_gib": [79.75, 30], "most": 2}),
    "one of unknown size takes a GPU of its own beside others": (
        same(3, *[1] * 9, device_bytes=(GIB,) * 9, settles_at=99), {"known": 1, "gpus": [(80, 0)] * 2, "each": on_gpus()},
        {"most": 2, "devices": [["GPU-0"], ["GPU-1"], ["GPU-0"]]}),
    "out of device memory comes again with more until it had all of a GPU": (
        {"a": FakeJob((1, 1), device_bytes=(10 * GIB,) * 2, settles_at=9, state="out_of_memory")},
        {"known": 1, "gpus": [(80, 0)], "each": on_gpus(1, 20), "told": {"evidence": {"place": "device"}}},
        {"ends": {"a": "out_of_memory"}, "device_gib": [20, 30, 79.75], "why": re.compile("gives one job 79.75 GiB")}),
}  # fmt: skip


@pytest.mark.proves("S0-18", "C-08")
@pytest.mark.parametrize(("scripts", "options", "wanted"), SCENES.values(), ids=SCENES)
def test_a_scene_ends_as_it_must(world, scripts, options, wanted):
    found = world(scripts, **options).run()
    for name, value in wanted.items():
        got = getattr(found, name)
        assert value.search(got) if isinstance(value, re.Pattern) else got == value, (name, got)
    assert found.scheduler.policy.force or found.neighbour or found.backend.peak_bytes <= found.limit


@pytest.mark.proves("S0-23", "S4-41")
@pytest.mark.parametrize(
    ("limit", "options", "words"),
    [
        (2 * GIB, {"each": declared("3GiB")}, r"j1 needs 3\.00 GiB .* 2\.00 GiB available = 2\.00 GiB free"),
        (100, {"reserve": 200}, "j1 needs"),
        (
            1000 * MIB,
            {"each": declared(951 * MIB), "refuse_tight": True},
            r"j1 is tight, as declared: 951\.0 MiB of 1000",
        ),
        (1000, {"each": on_gpus(1, 1)}, "it needs 1 GPU and 0 are here"),
        (1000, {"each": on_gpus(3), "gpus": [(80, 0)] * 2}, "it needs 3 GPUs and 2 are here"),
        (
            1000,
            {"each": on_gpus(2, 60), "gpus": [(80, 30), (80, 0)]},
            r"60\.00 GiB on 2 GPUs \(as declared\); 49\.75 GiB available on GPU 0 \(GPU-0\) = 50\.00 GiB free",
        ),
        (
            1000,
            {"each": declared(1) | on_gpus(1, 78), "gpus": [(80, 0)], "refuse_tight": True},
            r"j1 is tight on its GPU, as declared: 78\.00 GiB of 79\.75 GiB",
        ),
    ],
)
def test_what_cannot_fit_or_is_tight_is_refused_with_the_arithmetic(world, limit, options, words):
    found = world(
        same(1, 1), limit, known=None if "each" in options and "footprint" in options["each"] else 1, **options
    )
    with pytest.raises(DoesNotFitError, match=words) as caught:
        found.run()
    assert found.order == [] and ("tight" not in words or caught.value.remedy.endswith("accept it: --accept-tight"))


@pytest.mark.parametrize(
    ("size", "known", "refuse"), [(950, None, True), (970, None, False), (970, 970 * MIB, True)],
    ids=["leaves a twentieth", "accepted", "measured on a similar job"],
)  # fmt: skip
def test_what_is_not_tight_runs(world, size, known, refuse):
    options = {"each": declared(size * MIB), "known": known, "refuse_tight": refuse}
    assert world(same(1, 1), 1000 * MIB, **options).run().ends == "completed"


def test_a_declared_size_that_fits_is_not_tight_beside_other_jobs(world):
    options = {"each": declared(98 * MIB), "refuse_tight": True}
    assert world(same(2, *[90 * MIB] * 5), 200 * MIB, **options).run().most == 2


@pytest.mark.parametrize(("num", "is_refused"), [(2, True), (1, False)])
def test_a_process_can_use_one_mig_instance(world, num, is_refused):
    found = world(same(1, 1), known=1, gpus=[(40, 0)] * 4, each=on_gpus(num, 10))
    found.gpu_name = "MIG"
    if is_refused:
        with pytest.raises(DoesNotFitError, match=r"2 GPUs and 0 whole ones .* use only one MIG instance"):
            found.run()
    else:
        assert found.run().devices == [["MIG-0"]]


def test_on_a_cluster_the_first_job_runs_alone_until_it_has_passed_its_phases(world):
    phased = {"phases": ("load", "train")}
    found, seen = world(same(5, *[100] * 10, settles_at=4), 10_000, each=phased, is_shared=False), []
    found.run(on_tick=lambda: seen.append(found.starts))
    assert seen[:6] == [1, 1, 1, 1, 1, 5]
    assert "j1 is being measured" in found.of("wait")[0]["reason"]


@pytest.mark.proves("S0-16")
def test_what_is_used_is_told_before_each_job_and_after_it(world):
    found = world({"a": FakeJob((100, 100))}, neighbour=300).run()
    assert [fields["text"] for fields in found.of("admit")] == ["a started. Measuring its memory (700 B free)"]
    [end] = found.of("end")
    assert end["text"].startswith("a completed") and end["text"].endswith(", peak 100 B")
    assert (end["limit_bytes"], end["pss_bytes"]) == (1000, 0)


def test_a_dropped_job_keeps_the_number_of_its_attempts(world):
    scripts = {"fits": FakeJob((10,) * 50), "never": FakeJob()}
    jobs = {name: declared(size) | kinds(name)[name] for name, size in (("fits", 10), ("never", 500))}
    found = world(scripts, 100, jobs=jobs).run()
    assert (found.ends, found.statuses["never"].attempt) == ({"fits": "completed", "never": "failed"}, 0)
    assert "never needs 500 B" in found.statuses["never"].cause


# Stops, and jobs that run already


@pytest.mark.parametrize(
    ("ask", "level", "end", "text"),
    [
        (StopRequest.ask, 1, "preempted", "Stopping 1 running job at a checkpoint. Ctrl-C again ends them now"),
        (StopRequest.now, 2, "cancelled", "Ending 1 running job now"),
    ],
)
def test_a_request_to_stop_reaches_the_running_jobs_once_and_another_ends_them_now(world, ask, level, end, text):
    found, stop = world(same(3, *[1] * 100), max_parallel=1), StopRequest()
    found.run(stop=stop, on_tick=lambda: ask(stop) if found.backend.now > 0.3 else None)
    assert (found.cancelled, found.ends) == ([("j1", level > 1)], {"j1": end})
    assert found.of("stop") == [{"asked": level, "num_running": 1, "text": text}]


def test_jobs_that_still_run_are_taken_over_whatever_is_free(world):
    # What they use is taken already: asking whether it fits once more would refuse a run that goes on.
    found = world(same(3, *[100] * 5), 220, known=100, neighbour=30)
    found.backend.submit([Submission(job) for job in found.made[1:]])  # by an earlier supervisor
    found.run(still_running=found.backend.adopt(["j1", "j2", "j3"]))
    assert (found.order, found.most, found.ends) == (["j2", "j3", "j1"], 2, "completed")
    assert [fields["why"] for fields in found.of("admit")][:2] == ["it still runs and is taken over"] * 2


def test_a_job_that_is_taken_over_keeps_what_it_uses_of_its_gpus(world):
    scripts = {"a": FakeJob((1,) * 9, device_bytes=(30 * GIB,) * 9, settles_at=99), "b": FakeJob((1,) * 3)}
    found = world(scripts, known=1, gpus=[(80, 0)], each=on_gpus(1, 60))
    found.backend.submit([Submission(Job("a", command=("true",), env={"CUDA_VISIBLE_DEVICES": "GPU-0"}))])
    found.run(still_running=["a"])
    assert (found.most, found.of("wait")[0]["on"]) == (1, "device")


TWO = {"a": FakeJob((100,), ends=("out_of_memory",)), "b": FakeJob((950,) * 50)}


def test_a_job_that_is_stopped_while_it_waits_for_another_start_is_recorded_so(world):
    found = world(TWO, 1050, known={"a": 100, "b": 950}, jobs=kinds("a", "b"))
    found.run(stopped=lambda job: "by hand" if job == "a" and found.retries else "")
    recorded = found.backend.poll()["a"]
    assert (recorded.state, recorded.cause, found.statuses["a"].attempt) == ("cancelled", "by hand", 1)
    assert found.ends == {"a": "cancelled", "b": "completed"}


def test_a_stop_while_a_job_waits_to_be_started_again_leaves_it_pending(world):
    found, stop = world(TWO, 1050, known={"a": 100, "b": 950}, jobs=kinds("a", "b")), StopRequest()
    found.run(stop=stop, on_tick=lambda: stop.ask() if found.retries else None)
    assert found.of("retry")[0]["text"].startswith("a restarts as attempt 2: ")
    assert (found.ends, found.statuses["a"].attempt) == ({"a": "pending", "b": "preempted"}, 1)


# Growth, limits and giving way


def test_a_job_that_outgrows_its_reservation_gets_more_from_what_is_free(world):
    scripts = {"a": FakeJob((100,) * 3), "b": FakeJob((100, 150, 250, 400, 400))}
    found = world(scripts, known=100).run()
    assert (found.ends, found.order) == ("completed", ["a", "b"])
    grown = [fields["to_bytes"] for fields in found.of("grow") if fields["job"] == "b"]
    assert grown and grown == sorted(grown) and grown[-1] >= 400


def test_a_job_that_stands_still_gives_back_what_it_does_not_use(world):
    found, seen = world({"a": FakeJob((100, *[600] * 40)), "b": FakeJob((100,) * 42)}, 2000, known=100), []

    def tick():
        entry = found.admission.running.get("a")
        seen.append((round(found.backend.now, 1), entry.reserved[HOST] if entry else 0))

    found.run(on_tick=tick)
    assert max(size for _, size in seen) <= 750
    assert {size for now, size in seen if 1.5 < now < 4} <= {600, 750}  # at most a quarter above what it uses


def test_a_job_that_ended_tells_when_it_had_reached_its_peak_and_how_long_it_ran_without_its_waits(world):
    def times(limit, **others):
        found = world({"a": FakeJob((100, 100, 100, 300, 300, 300, 300, 300)), **others}, limit, jobs=kinds("a", "b"))
        guess = found.run().admission.forecast.guess(replace(found.made[0], id="next"))
        return round(guess.peaked, 1), round(guess.seconds, 1), round(found.backend.now, 1)

    peaked, seconds, free = times(10_000)
    assert (peaked, seconds) == (0.4, 0.8)
    peaked, seconds, narrow = times(400, b=FakeJob((200,) * 30))
    assert (peaked, seconds) == (0.4, 0.8) and narrow > free + 1


def test_the_first_that_lacks_memory_is_named_once(world):
    found = world({"a": FakeJob((100, *[300] * 9)), "b": FakeJob((100, *[300] * 9)), "c": FakeJob((100,) * 20)}, 350,
                  known=100)  # fmt: skip
    found.run()
    reasons = [fields["reason"] for fields in found.of("short")]
    assert "outgrew its" in reasons[0] and len(reasons) == len(set(reasons))


def test_every_grant_stays_within_the_capacity_and_leaves_room_for_a_burst(world):
    found, seen = world(same(2, *[100] * 4), known=100), []
    found.run(on_tick=lambda: seen.append(dict(found.backend.grants)))
    assert all(grant <= 1000 for grants in seen for grant in grants.values())
    # 800 are free beside the two reservations, and each may burst into an eighth of them at once.
    assert seen[2] == {"j1": 200, "j2": 200}
    assert all(sum(grants.values()) <= 1000 for grants in seen[1:])
    assert found.backend.total_bytes == 1000


@pytest.mark.parametrize(("used", "is_moved"), [(50_000, False), (95_000, True)], ids=["calm", "near its limit"])
def test_a_limit_moves_by_little_only_for_a_job_that_is_near_it(world, used, is_moved):
    found, seen = world({"a": FakeJob((used,) * 20), "b": FakeJob((1,) * 20)}, 300_000, known=100_000), []

    def tick():
        found.neighbour = 5_000 if found.backend.now > 0.9 else 0  # 625 for each, less than a 64th of a limit
        seen.append(found.backend.grants.get("a"))

    found.run(on_tick=tick)
    assert (len(set(seen[3:-3])) > 1) == is_moved


def test_a_job_that_wants_more_than_the_whole_budget_is_ended_with_the_arithmetic(world):
    found = world({"big": FakeJob((100, 2000)), "small": FakeJob((100, 100))}).run()
    assert found.ends == {"big": "out_of_memory", "small": "completed"}
    assert "needs more than the" in found.statuses["big"].cause
    assert all("gave way" in reason for reason in found.retries)


@pytest.mark.parametrize(("saved", "starts", "words"), [(9.0, 3, "restarted 2 times"), (1.0, 1, "the whole budget")])
def test_one_that_grew_to_the_whole_budget_goes_on_from_its_checkpoint_with_as_much(world, saved, starts, words):
    told = {"evidence": {"ran_out_by": "growth"}, "started": 1.0, "checkpointed": saved, "growth": {"text": "it grows"}}
    found = world({"big": FakeJob((100, 900, 2000))}, told=told).run()
    assert (found.starts, found.ends) == (starts, {"big": "out_of_memory"})
    assert words in (cause := found.statuses["big"].cause) and "more memory only" in cause and "raise" not in cause
    assert all("goes on from its checkpoint with the same memory" in reason for reason in found.retries)


@pytest.mark.slow
def test_a_smaller_job_may_pass_one_that_does_not_fit_yet_but_not_for_ever(world):
    scripts = {"a": FakeJob((100,) * 300), "large": FakeJob((950,) * 2)} | {f"s{i}": FakeJob((10,)) for i in range(200)}
    found = world(scripts, known={"a": 100, "large": 950, "s": 10}, jobs=kinds(*scripts), max_parallel=3).run()
    assert found.ends == "completed" and found.order.index("large") == 65


def test_a_neighbour_may_grow_into_the_reserve_without_holding_jobs_back(world):
    found = world(same(6, *[100] * 8), 700, known=100, reserve=400)

    def grow():
        found.neighbour = min(300, found.neighbour + 100)

    assert found.run(on_tick=grow).most == 3 and found.backend.peak_bytes <= 300


def test_when_a_neighbour_takes_the_whole_reserve_the_cheapest_gives_way_before_the_kernel_ends_one(world):
    found = world(same(3, *[100] * 12, checkpoint_bytes=7), 400, known=100, reserve=80)
    granted, give = [], found.backend.grant

    def grow():
        found.neighbour = 100 if 0.5 < found.backend.now < 1.0 else 0

    def note(job_id, grant):
        if job_id in found.backend.grants:
            granted.append((job_id, grant - found.backend.grants[job_id]))
        give(job_id, grant)

    found.backend.grant = note
    assert found.run(on_tick=grow).ends == "completed"
    [aside] = found.of("aside")
    assert "is left of" in aside["reason"] and found.starts == 4
    assert (aside["job"], 7 + 10) in granted  # the room to write its checkpoint, and an eighth of the reserve


def test_while_one_is_leaving_no_other_is_asked_to_and_one_alone_that_outsiders_press_comes_again(world):
    for num in (3, 1):
        found, asked = world(same(num, *[100] * 12), 100 * num + 100, known=100, reserve=80), []
        cancel = found.backend.cancel
        found.backend.cancel = lambda job_id, *, now=False, verdict=None, asked=asked: asked.append((job_id, verdict))

        def tick(found=found, asked=asked, cancel=cancel):
            found.neighbour = 95 if 0.5 < found.backend.now < 1.0 else 0
            if found.backend.now > 0.9 and asked:
                cancel(asked.pop()[0])
                assert not asked

        assert found.run(on_tick=tick).ends == "completed"
        assert len(found.asides) == 1 and found.starts == num + 1


def test_a_job_that_waits_at_its_limit_and_does_not_leave_is_ended(world):
    found, cancel = world({"a": GROWING, "b": GROWING}, 400, known=100), FakeBackend.cancel
    asked = []

    def late(job_id, *, now=False, verdict=None):
        asked.append((round(found.backend.now, 1), now))
        if now:
            cancel(found.backend, job_id, now=True, verdict=verdict)

    found.backend.cancel = late
    assert found.run(stop=Deadline(found, 60)).ends == "completed"
    (first, _), (last, is_now) = asked
    assert is_now and 2.0 <= round(last - first, 1) < 2.5


def test_limits_that_come_down_do_so_before_others_rise(world):
    found = world({"a": FakeJob((300,) * 40), "b": FakeJob((100,) * 20 + (600,) * 20)}, known=300)
    give, seen = found.backend.grant, []

    def note(job_id, wall):
        give(job_id, wall)
        seen.append(sum(found.backend.grants[name] for name in found.admission.running if name in found.backend.grants))

    found.backend.grant = note
    assert found.run().ends == "completed"
    assert max(seen) <= 1000 and len(seen) > 6


@pytest.mark.proves("S0-17")
@pytest.mark.parametrize(("most", "cores", "earlier", "at_once"), [(None, 1, 0, 4), (8, 1, 0, 8), (None, 0.1, 1000, 8)])
def test_busy_cores_hold_jobs_back_unless_the_user_gave_a_number(world, most, cores, earlier, at_once):
    found = world(same(8, *[10] * 60), 100, known=10, neighbour=60, max_parallel=most, cpus=2)
    poll = found.backend.poll
    found.backend.poll = lambda: {
        name: replace(one, cpu_seconds=earlier + cores * found.backend.now) for name, one in poll().items()
    }

    def tick():
        if found.backend.now > 3.0:
            found.neighbour = 0

    assert found.run(on_tick=tick).most == at_once
    assert ("cores" in found.waits) == (at_once == 4)


def test_the_room_for_the_largest_checkpoint_is_never_lent(world):
    sizes = (100, 150, 200, 300, 300)
    found = world({"a": FakeJob(sizes, checkpoint_bytes=50), "b": FakeJob(sizes)}, 450, known=100).run()
    assert found.ends == "completed" and found.backend.peak_bytes <= 450
    assert "50 B reserve" in found.of("admit")[-1]["why"]


def test_the_last_retry_has_the_whole_budget_to_itself(world):
    scripts = {"a": FakeJob((100,), ends=("out_of_memory",) * 2), "b": FakeJob((100,) * 9)}
    found = world(scripts, 10_000, known=100)

    def others_take_a_little():
        found.neighbour = 100 if found.order.count("a") == 2 else 0

    assert found.run(on_tick=others_take_a_little).ends == "completed"
    assert found.reserved[-1] >= 9_900 and found.of("admit")[-1]["num_running"] == 1


@pytest.mark.parametrize("state", ["node_fail", "out_of_memory", "failed", "preempted"])
def test_a_job_that_gave_way_comes_again_however_it_ended(world, state):
    found = world({"a": GROWING, "b": GROWING}, 400, known=100, retries=0)
    cancel = found.backend.cancel
    found.backend.cancel = lambda job_id, *, now=False, verdict=None: cancel(
        job_id, verdict=Verdict(state, "meanwhile")
    )
    assert found.run().ends == "completed"


def test_a_reservation_on_a_gpu_grows_with_its_job_and_holds_others_back(world):
    grows = FakeJob((1,) * 40, device_bytes=(10 * GIB, 40 * GIB, *[70 * GIB] * 38), settles_at=99)
    found = world({"a": grows, "b": FakeJob((1,) * 3)}, known=1, gpus=[(80, 0)], each=on_gpus(1, 20))
    policy = found.admission.policy
    found.admission.policy = replace(policy, max_parallel=1)

    def open_up():
        if found.backend.now > 1.0:
            found.admission.policy = policy

    grown = found.run(on_tick=open_up).of("grow_device")
    assert grown[0]["from_bytes"] == 20 * GIB and grown[-1]["to_bytes"] >= 70 * GIB
    assert "GPU 0" in grown[0]["why"] and found.most == 1


@pytest.mark.slow
def test_a_gpu_whose_reading_saw_what_a_job_gave_back_is_no_fuller_than_it_is(world):
    script = FakeJob((1, 1), device_bytes=(10 * GIB,) * 2, settles_at=9, ends=("out_of_memory",) * 2)
    found = world({"a": script}, known=1, gpus=[(80, 20)], each=on_gpus(1, 20), told={"evidence": {"place": "device"}})
    budget, late = found.admission.budget, Counter({"GPU-0": 5 * GIB})
    read, in_use = budget.read, budget.in_use

    def read_late():
        budget.in_use = lambda: in_use() + late if found.backend.now < 2 else in_use()
        read()
        budget.in_use = in_use

    budget.read = read_late
    assert found.run().ends == "completed"
    assert found.of("admit")[-1]["devices"] == {"GPU-0": 60 * GIB - 256 * MIB}


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(0, 2)), min_size=1, max_size=12
    ),
    st.integers(100, 300),
    st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_jobs_do_the_budget_holds_and_every_job_that_fits_completes(tmp_path_factory, jobs, limit, hinted):
    scripts = {f"j{number}": FakeJob(tuple(sizes)) for number, (sizes, _) in enumerate(jobs)}
    own = {f"j{number}": {"params": {"kind": str(kind)}} for number, (_, kind) in enumerate(jobs)}
    each = declared(20) if hinted else {}
    found = World(tmp_path_factory.mktemp("machine"), scripts, limit, jobs=own, each=each, slack=0.1).run()
    assert found.ends == "completed" and found.backend.now < 2000
    assert found.backend.peak_bytes <= limit


# Other runs on this host


def test_what_other_supervisors_have_lent_is_not_lent_again_and_they_are_told(world):
    claims = FakeClaims(750)
    assert world(same(4, *[100] * 4), known=100, claims=claims).run().most == 2
    assert max(used for used, _ in claims.written) == max(unused for _, unused in claims.written) == 200
    assert claims.written[-1] == (0, 0)


def test_what_runs_under_limits_of_their_own_have_lent_holds_nothing_back(world):
    claims = FakeClaims(0)
    claims.now = Others(Counter({"1:7": 1}), Counter(), Counter({"1:7": 750}))
    assert world(same(4, *[100] * 4), known=100, claims=claims).run().most == 4


def test_what_other_runs_take_of_what_they_lent_leaves_the_reserve_whole(world):
    claims = FakeClaims(400)
    found = world(same(8, *[100] * 8), known=100, reserve=200, claims=claims)

    def others_grow():
        if found.backend.now >= 0.3:
            found.neighbour, claims.now = 400, others_of(1, 400, 0)

    assert found.run(on_tick=others_grow).most == 4
    assert "200 B reserve" in found.of("admit")[-1]["why"]


def test_reservations_are_made_and_grow_only_while_no_other_run_decides_and_are_told_within(world):
    claims, seen = FakeClaims(0), []
    say = lambda kind, **fields: seen.append((kind, claims.is_deciding))  # noqa: E731
    world(same(2, 50, 100, 200, 200, 200), 450, known=100, claims=claims, say=say).run()
    assert {("admit", True), ("grow", True)} <= set(seen)
    assert not {("admit", False), ("grow", False)} & set(seen)
    assert max(used for used, _ in claims.written) == 400


def test_the_wall_above_all_jobs_covers_what_was_lent_before_the_job_starts_beside_another_run(world):
    found = world(same(4, *[100] * 8), 420, known=100, claims=FakeClaims(0))
    caps, submit = [], found.backend.submit
    found.backend.cap = caps.append

    def note(batch):
        assert caps[-1] >= sum(entry.reserved[HOST] for entry in found.admission.running.values())
        submit(batch)

    found.backend.submit = note
    assert found.run().most == 4


def test_the_wall_above_all_jobs_stays_above_what_was_lent_when_other_runs_take_too_much(world):
    claims, caps = FakeClaims(0), []
    found = world(same(2, *[20] * 8), 500, known=100, claims=claims)
    found.backend.cap = caps.append

    def others_take_too_much():
        if found.starts == 2:
            found.neighbour, claims.now = 400, others_of(1, 400, 0)

    found.run(on_tick=others_take_too_much)
    assert min(caps[3:-1]) >= 200


def test_what_other_runs_may_have_taken_of_what_they_reserved_is_no_growth_of_outsiders(world):
    claims = FakeClaims(300)
    found = world({"a": FakeJob()}, claims=claims)
    budget = found.admission.budget
    budget.read()
    found.neighbour = 300  # the kernel says it before the other run does
    budget.read()
    assert budget.outsiders_bytes == 0
    found.neighbour, claims.now = 500, others_of(1, 300, 0)
    budget.read()
    assert budget.outsiders_bytes == 200


def test_what_other_runs_took_since_the_last_reading_is_not_free(world):
    admission = world({"a": FakeJob()}, claims=FakeClaims(300)).admission
    assert admission.budget.rooms()[HOST].bytes == 700
    admission.budget.others = others_of(1, 200, 100)  # as told at a decision, before the budget is read again
    assert admission.budget.rooms()[HOST].bytes == 700


@pytest.mark.parametrize(
    ("ends_at", "asides"), [(0.3, []), (9, ["another run of memfit holds 500 B, and it needs a part of that"])]
)
def test_a_job_waits_for_what_another_run_has(world, ends_at, asides):
    claims = FakeClaims(500)
    found = world({"a": FakeJob((100, 800, 800))}, claims=claims)

    def other_run_ends():
        if found.backend.now > ends_at:
            claims.now = Others()

    assert found.run(on_tick=other_run_ends).ends == "completed"
    assert (found.asides[:1], found.backend.now > ends_at) == (asides, True)


def test_an_outsider_that_comes_and_goes_ends_no_job_for_good_and_is_named(world):
    found = world({"a": FakeJob((100, 200, 300, *[400] * 9))}, reserve=100)

    def come_and_go():
        found.neighbour = 800 if 0.3 < found.backend.now < 12.0 else 0

    assert found.run(stop=Deadline(found, 60), on_tick=come_and_go).ends == "completed"
    assert found.starts == 2 and found.backend.now > 12.0
    others = "processes that are not memfit's hold 800 B"
    assert others in found.asides[0]
    assert [wait["reason"] for wait in found.of("wait") if wait["on"] == "others"] == [f"{others}, and it needs a part of that"]  # fmt: skip


@pytest.mark.slow
def test_what_others_hold_all_the_time_is_the_machines_and_is_waited_for_only_so_long(world):
    found = world({"a": FakeJob((100, 900))}, neighbour=300)
    assert found.run(stop=Deadline(found, 999)).ends == {"a": "out_of_memory"}
    assert found.backend.now > 300 and "whole budget of 700 B" in found.statuses["a"].cause


def test_a_job_that_asks_for_what_no_machine_has_waits_for_nobody(world):
    found = world({"a": FakeJob((100,), state="out_of_memory")}, 10_000, neighbour=3000, told={"exit_code": 1})
    assert found.run(stop=Deadline(found, 5)).ends == {"a": "out_of_memory"}
    assert (found.starts, found.reserved[-1], found.waits) == (3, 7000, set())


def test_a_restart_takes_what_is_there_though_similar_jobs_took_more(world):
    """One that needs less of its own than similar ones took does not wait for strangers while nothing else runs."""
    scripts = {"big": FakeJob((600,)), "small": FakeJob((100,) * 9, settles_at=99, ends=("out_of_memory",))}
    found = world(scripts, jobs={name: {"params": {"x": name}} for name in scripts}, max_parallel=1)

    def stranger():
        found.neighbour = 600 if "small" in found.order else 0

    assert found.run(stop=Deadline(found, 5), on_tick=stranger).ends == "completed"
    assert found.starts == 3


def test_what_memfits_own_processes_hold_is_nobody_elses(world):
    found = world({"a": FakeJob((100, 990))}, neighbour=300)
    watch, looks = found.admission.budget, []
    watch.read_own = lambda: looks.append(1) or 290
    assert found.run(stop=Deadline(found, 60)).ends == {"a": "out_of_memory"} and found.asides == []
    num, _ = len(looks), watch.most(0)
    assert len(looks) == num > 0  # it reads a file of each process: once for each reading of the budget


def test_a_job_set_aside_before_it_took_anything_is_of_unknown_size_still_and_no_limit_is_too_small_to_start(world):
    found = world(same(2, *[1] * 9), reserve=80)
    found.backend.traits = replace(found.backend.traits, least_bytes=50)
    found.admission.least_bytes = 50

    def take_all():
        found.neighbour = 1000 if found.backend.now < 3.0 and found.starts else 0

    assert found.run(stop=Deadline(found, 60), on_tick=take_all).ends == "completed"
    assert {fields["reservation_bytes"] for fields in found.of("retry")} == {None}
    assert min(found.backend.grants.values()) >= 50 and found.backend.total_bytes >= 50


def test_a_reserve_that_is_too_large_is_named_also_beside_another_run(world):
    found = world({"a": FakeJob()}, reserve=5000, claims=FakeClaims(500))
    with pytest.raises(DoesNotFitError) as caught:
        found.run(stop=Deadline(found, 60))
    assert "less the reserve of" in caught.value.rule and "lower the reserve" in caught.value.remedy


def test_a_reason_for_a_wait_is_said_again_when_its_kind_changes_and_not_a_name_or_size_in_it(world):
    found = world(same(4, *[100] * 9), known=100)
    reasons = ["j1 is being measured", "j2 is being measured", "it needs 3 GiB", "it needs 4.5 MiB", "j3 goes first"]
    said = iter(["", "", "", *reasons])  # three jobs start first

    def why():
        reason = next(said, "")
        on = "measuring" if "measured" in reason else "memory"
        return SimpleNamespace(on=on, reason=reason, detail="", lacks=0, available=0) if reason else None

    found.admission.why_none_starts = why
    found.run()
    assert next(said, None) is None
    assert [fields["reason"] for fields in found.of("wait")][:3] == [reasons[0], reasons[2], reasons[4]]


def test_a_job_waits_for_a_gpu_that_a_stranger_took_meanwhile(world):
    found = world(same(2, 1, 1, 1), known=1, gpus=[(80, 0)], each=on_gpus(1, 40), max_parallel=1)

    def come_and_go():
        found.gpus = [(80, 50 if 0.1 < found.backend.now < 10 else 0)]

    assert found.run(stop=Deadline(found, 60), on_tick=come_and_go).ends == "completed"
    assert found.backend.now > 10
    assert "not memfit's hold 50.00 GiB of GPU memory" in found.of("wait")[-1]["reason"]


def test_a_job_waits_for_a_gpu_that_another_run_holds(world):
    claims = FakeClaims(0)
    claims.now = Others(Counter({HOST: 1}), Counter(), Counter({"GPU-0": 50 * GIB}))
    found = world({"a": FakeJob()}, known=1, gpus=[(80, 0)], each=on_gpus(1, 40), claims=claims)

    def others_end():
        if found.backend.now > 10:
            claims.now = Others()

    assert found.run(on_tick=others_end).ends == "completed"
    assert "another run" in found.of("wait")[0]["reason"]
    assert claims.all_unused[0] == {} and max(unused["GPU-0"] for unused in claims.all_unused) == 40 * GIB


def test_without_walls_a_job_that_needs_what_another_run_holds_is_tried_again_with_more(world):
    claims = FakeClaims(800)
    found = world({"a": FakeJob((995,), ends=("out_of_memory",))}, 2000, reserve=200, claims=claims)

    def the_other_run_ends():
        if found.retries:
            claims.now = Others()

    assert found.run(on_tick=the_other_run_ends).ends == "completed" and found.starts == 2


# Sources


class Chain:
    """A source whose second stage follows from the first; it notes what it hears."""

    def __init__(self, *batches):
        self.batches, self.open, self.heard, self.asked = list(batches), set(), [], []

    def next(self, num_free):
        self.asked.append(num_free)
        if self.open or not self.batches:
            return []
        batch = self.batches.pop(0)
        self.open = {job.id for job in batch}
        return batch

    def ended(self, status):
        self.open.remove(status.job_id)
        self.heard.append((status.job_id, status.state, status.cause))

    @property
    def is_done(self):
        return not self.batches


def of_stage(stage, *names):
    return [Job(name, command=("true",), stage=stage, unit=number) for number, name in enumerate(names)]


def test_a_source_hands_over_jobs_when_those_that_they_need_have_ended(world):
    source = Chain(of_stage("fold", "fold_1", "fold_2"), of_stage("judge", "judge"))
    scripts = {"fold_1": FakeJob((5,) * 3), "fold_2": FakeJob((5,), ends=("node_fail",)), "judge": FakeJob((5,))}
    found = world(scripts, source=source, max_parallel=2).run()
    assert found.ends == "completed" and found.order.index("judge") == found.starts - 1
    assert sorted(source.heard) == [(name, "completed", "") for name in ("fold_1", "fold_2", "judge")]


@pytest.mark.parametrize(("most", "asked"), [(3, [3, 1, 1]), (2, [2, 0, 0]), (None, [1, 1, 1])])
def test_a_source_is_asked_for_what_could_start_beside_what_runs_and_waits(world, most, asked):
    source = Chain(of_stage("fold", "a", "b"), of_stage("judge", "judge"))
    scripts = {name: FakeJob((5,) * 5, settles_at=9) for name in ("a", "b", "judge")}
    world(scripts, source=source, max_parallel=most).run()
    assert source.asked[:3] == asked


def test_a_source_hears_of_every_job_that_is_given_up_when_the_run_stops(world):
    source, stop = Chain(of_stage("fold", "a", "b", "c"), of_stage("judge", "judge")), StopRequest()
    scripts = {name: FakeJob((5,) * 9) for name in ("a", "b", "c", "judge")}
    found = world(scripts, source=source, max_parallel=1).run(stop=stop, on_tick=stop.ask)
    asked = "the run was asked to stop"
    assert sorted(source.heard) == [("a", "preempted", "as asked"), ("b", "pending", asked), ("c", "pending", asked)]
    assert list(found.statuses) == ["a"] == found.order
