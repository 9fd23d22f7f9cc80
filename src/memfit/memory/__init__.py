"""Budgets, footprints, and measuring: what may be used, what will be or was used. Loads no torch."""

from memfit.memory._admission import (
    DEFAULT_SLACK,
    DEVICE_RESERVE_BYTES,
    Lendable,
    bounds_of,
    count_fitting,
    keep_cache,
    reservation_bytes,
    rooms_of,
)
from memfit.memory._budget import Budget
from memfit.memory._cgroup import memory_group, oom_kills_above
from memfit.memory._devices import Device, DeviceProcess, device_reader
from memfit.memory._footprint import HOST, Footprint, PhasePeak, Sizes
from memfit.memory._heap import read_heap
from memfit.memory._host import Limit, SharedMemory, Swap, parse_cpu_list, parse_limits, parse_mountinfo
from memfit.memory._host_runs import Claims, Entry, Others, list_entries, live_jobs, sweep_entries
from memfit.memory._jobgroup import GroupState, JobGroup, sweep_groups
from memfit.memory._locks import is_locked, lock_file
from memfit.memory._meter import Meter, Sample, TreeMeter, measure
from memfit.memory._process import ProcReader
from memfit.memory._series import SeriesWriter, read_series
from memfit.memory._walls import Walls, systemd_scope_command, why_no_walls

__all__ = [
    "DEFAULT_SLACK",
    "DEVICE_RESERVE_BYTES",
    "HOST",
    "Budget",
    "Claims",
    "Device",
    "DeviceProcess",
    "Entry",
    "Footprint",
    "GroupState",
    "JobGroup",
    "Lendable",
    "Limit",
    "Meter",
    "Others",
    "PhasePeak",
    "ProcReader",
    "Sample",
    "SeriesWriter",
    "SharedMemory",
    "Sizes",
    "Swap",
    "TreeMeter",
    "Walls",
    "bounds_of",
    "count_fitting",
    "keep_cache",
    "device_reader",
    "is_locked",
    "list_entries",
    "live_jobs",
    "lock_file",
    "measure",
    "memory_group",
    "oom_kills_above",
    "parse_cpu_list",
    "parse_limits",
    "parse_mountinfo",
    "read_heap",
    "read_series",
    "reservation_bytes",
    "rooms_of",
    "sweep_entries",
    "sweep_groups",
    "systemd_scope_command",
    "why_no_walls",
]
