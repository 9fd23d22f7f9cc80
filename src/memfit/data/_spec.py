"""What a panel is to hold: columns by role, types, order; and the dates and assets that a source has."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from memfit.data._arrow import text_of
from memfit.data._dtypes import dtype_name, storage, target_dtype
from memfit.data._source import Source, decode_assets, decode_dates
from memfit.errors import DataError

#: What a panel takes beside its arrays: headers, labels and the manifest.
_SLACK_BYTES = 1 << 20


def index_columns(index: Any) -> tuple[str, str]:
    """The columns of dates and of assets that an index names.

    >>> index_columns(("date", "code"))
    ('date', 'code')
    """
    names = () if isinstance(index, str) else tuple(index)
    if len(names) != 2 or names[0] == names[1] or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"index is {index!r}.",
            rule="it names two different columns: that of dates and that of asset codes.",
            remedy='pass index=("date", "code")',
        )
    return names[0], names[1]


@dataclass(frozen=True)
class PanelSpec:
    """What to build from a source: columns by role, type and order of the values, and the caller's own parameters."""

    date: str
    asset: str
    features: tuple[str, ...]
    targets: tuple[str, ...]
    dtype: str
    parameters: Mapping[str, Any]
    order: str = "date"

    @property
    def numbers(self) -> tuple[str, ...]:
        return self.features + self.targets

    def check(self) -> PanelSpec:
        """This spec, its parameters as JSON gives them back; a DataError if it cannot be built."""
        for role, names in (("features", self.features), ("targets", self.targets)):
            if len(set(names)) != len(names) or (role == "features" and not names):
                raise DataError(
                    f"{role} is {list(names)}.",
                    rule="a panel has at least one feature; features are named once each, and so are targets.",
                    remedy=f"pass {role}=[...] with different column names",
                )
        if self.order not in ("date", "asset"):
            raise DataError(
                f"order is {self.order}.",
                rule="a panel lies by date (all assets of one date together) or by asset (all dates of one asset).",
                remedy='pass order="date" or order="asset"',
            )
        try:
            parameters = json.loads(json.dumps(dict(self.parameters), sort_keys=True, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the panel's parameters cannot be written as JSON: {error}",
                rule="parameters are part of the panel's fingerprint, so they are plain values.",
                remedy="pass numbers, text, lists and mappings of them",
            ) from error
        return PanelSpec(**{**self.__dict__, "parameters": parameters, "dtype": dtype_name(self.dtype)})

    def layout(self, num_dates: int, num_assets: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each array as it lies in its file."""
        cells = (num_dates, num_assets) if self.order == "date" else (num_assets, num_dates)
        return {
            "values": (storage(self.dtype).str, (*cells, len(self.features))),
            "targets": (storage(target_dtype(self.dtype)).str, (*cells, len(self.targets))),
            "present": ("|b1", (num_dates, num_assets)),
            "history": ("<i4", (num_dates, num_assets)),
        }


@dataclass(frozen=True)
class Axes:
    """The dates and assets of a source, sorted, and the number of its rows."""

    dates: npt.NDArray[np.datetime64]
    assets: pa.Array
    num_rows: int

    @classmethod
    def of(cls, source: Source, spec: PanelSpec) -> Axes:
        """The first pass over a source."""
        dates = np.empty(0, "datetime64[D]")
        assets: set[str] = set()
        num_rows = 0
        for batch in source.batches([spec.date, spec.asset]):
            dates = np.union1d(dates, decode_dates(batch.column(spec.date), spec.date))
            assets.update(pc.unique(decode_assets(batch.column(spec.asset), spec.asset)).to_pylist())
            num_rows += batch.num_rows
        if not num_rows:
            raise DataError("the source has no rows.", rule="a panel has at least one.", remedy="name another source")
        return cls(dates, text_of(sorted(assets)), num_rows)

    def layout(self, spec: PanelSpec) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each array that a source of these axes fills."""
        return spec.layout(len(self.dates), len(self.assets))

    def num_bytes(self, spec: PanelSpec) -> int:
        """What the panel takes on disk, headers and labels included."""
        return _SLACK_BYTES + sum(np.dtype(dtype).itemsize * math.prod(s) for dtype, s in self.layout(spec).values())
