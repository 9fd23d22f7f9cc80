"""Budgets, footprints, and measuring: what may be used, what will be or was used. Loads no torch."""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.memory._admission import DEFAULT_SLACK as DEFAULT_SLACK
    from memfit.memory._admission import DEVICE_RESERVE_BYTES as DEVICE_RESERVE_BYTES
    from memfit.memory._admission import Lendable as Lendable
    from memfit.memory._admission import bounds_of as bounds_of
    from memfit.memory._admission import count_fitting as count_fitting
    from memfit.memory._admission import keep_cache as keep_cache
    from memfit.memory._admission import reservation_bytes as reservation_bytes
    from memfit.memory._admission import rooms_of as rooms_of
    from memfit.memory._admission import why_tight as why_tight
    from memfit.memory._budget import Budget as Budget
    from memfit.memory._budget import default_reserve_of as default_reserve_of
    from memfit.memory._cgroup import locate as locate
    from memfit.memory._cgroup import memory_group as memory_group
    from memfit.memory._cgroup import oom_kills_above as oom_kills_above
    from memfit.memory._devices import Device as Device
    from memfit.memory._devices import DeviceProcess as DeviceProcess
    from memfit.memory._devices import device_reader as device_reader
    from memfit.memory._devices import read_devices as read_devices
    from memfit.memory._devices import select_visible as select_visible
    from memfit.memory._devices import visible_uuids as visible_uuids
    from memfit.memory._footprint import HOST as HOST
    from memfit.memory._footprint import Footprint as Footprint
    from memfit.memory._footprint import PhasePeak as PhasePeak
    from memfit.memory._footprint import Sizes as Sizes
    from memfit.memory._growth import Course as Course
    from memfit.memory._growth import Growth as Growth
    from memfit.memory._growth import Level as Level
    from memfit.memory._growth import Levels as Levels
    from memfit.memory._growth import explain_death as explain_death
    from memfit.memory._growth import find_growth as find_growth
    from memfit.memory._heap import read_heap as read_heap
    from memfit.memory._host import Limit as Limit
    from memfit.memory._host import SharedMemory as SharedMemory
    from memfit.memory._host import parse_limits as parse_limits
    from memfit.memory._host import parse_mountinfo as parse_mountinfo
    from memfit.memory._host_runs import Claims as Claims
    from memfit.memory._host_runs import Entry as Entry
    from memfit.memory._host_runs import Others as Others
    from memfit.memory._host_runs import claim_counts as claim_counts
    from memfit.memory._host_runs import list_entries as list_entries
    from memfit.memory._host_runs import live_jobs as live_jobs
    from memfit.memory._host_runs import place_here as place_here
    from memfit.memory._host_runs import sweep_entries as sweep_entries
    from memfit.memory._jobgroup import NO_WALL_BYTES as NO_WALL_BYTES
    from memfit.memory._jobgroup import GroupState as GroupState
    from memfit.memory._jobgroup import JobGroup as JobGroup
    from memfit.memory._jobgroup import sweep_groups as sweep_groups
    from memfit.memory._locks import is_locked as is_locked
    from memfit.memory._locks import is_lost as is_lost
    from memfit.memory._locks import lock_file as lock_file
    from memfit.memory._meter import Meter as Meter
    from memfit.memory._meter import Sample as Sample
    from memfit.memory._meter import TreeMeter as TreeMeter
    from memfit.memory._meter import measure as measure
    from memfit.memory._process import ProcReader as ProcReader
    from memfit.memory._process import Rollup as Rollup
    from memfit.memory._process import Sharing as Sharing
    from memfit.memory._process import Stat as Stat
    from memfit.memory._process import Status as Status
    from memfit.memory._process import Tree as Tree
    from memfit.memory._process import held_bytes as held_bytes
    from memfit.memory._process import parse_counters as parse_counters
    from memfit.memory._process import parse_rollup as parse_rollup
    from memfit.memory._process import parse_stat as parse_stat
    from memfit.memory._series import SeriesWriter as SeriesWriter
    from memfit.memory._series import read_series as read_series
    from memfit.memory._walls import Base as Base
    from memfit.memory._walls import Walls as Walls
    from memfit.memory._walls import find_base as find_base
    from memfit.memory._walls import systemd_scope_command as systemd_scope_command
    from memfit.memory._walls import why_no_walls as why_no_walls

__all__ = ["Budget", "Footprint", "measure", "read_series"]

__getattr__, __dir__ = load_lazily(__name__)
