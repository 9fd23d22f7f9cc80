"""Budgets, footprints, and measuring: what may be used, what will be or was used. Loads no torch."""

from memfit.memory._admission import DEFAULT_SLACK, Claim, Lendable, reservation_bytes
from memfit.memory._budget import Budget
from memfit.memory._devices import Device, DeviceProcess
from memfit.memory._footprint import Footprint, PhasePeak
from memfit.memory._host import SharedMemory, Swap
from memfit.memory._limit import Limit
from memfit.memory._meter import Meter, Sample, TreeMeter, measure
from memfit.memory._oom import count_oom_kills
from memfit.memory._process import nvml_reader
from memfit.memory._series import SeriesWriter, read_series

__all__ = [
    "DEFAULT_SLACK",
    "Budget",
    "Claim",
    "Device",
    "DeviceProcess",
    "Footprint",
    "Lendable",
    "Limit",
    "Meter",
    "PhasePeak",
    "Sample",
    "SeriesWriter",
    "SharedMemory",
    "Swap",
    "TreeMeter",
    "count_oom_kills",
    "measure",
    "nvml_reader",
    "read_series",
    "reservation_bytes",
]
