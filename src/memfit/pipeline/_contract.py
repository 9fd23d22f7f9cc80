"""What a user writes to have work run: a plain function, or a workload of stages that build on each other.

Nothing here loads NumPy, Arrow or torch: the process that admits jobs reads stages as plain data, and each stage works
in an interpreter of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, create_model

from memfit.errors import UsageError
from memfit.rundir import record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from memfit.data import Panel

P = TypeVar("P", bound=BaseModel)
T = TypeVar("T")


class Stop(Exception):
    """Raised by a stage to end the run here: what builds on it, or comes after it, is skipped and has not failed.

    Args:
        why: The reason, one sentence.
        exit_code: What the run then exits with; 10 and 11 are those of a gate, yellow and red.
        result: The stage's result all the same.

    Example:
        >>> try:
        ...     raise Stop("the first fold loses money", exit_code=11)
        ... except Stop as stop:
        ...     print(stop, stop.exit_code)
        the first fold loses money 11
    """

    def __init__(self, why: str, *, exit_code: int = 10, result: Mapping[str, Any] | None = None) -> None:
        super().__init__(why)
        self.exit_code = exit_code
        self.result = dict(result or {})


@dataclass(frozen=True)
class Output:
    """What one unit of a stage left. Nothing is read before it is asked for.

    Attributes:
        manifest: The file that says what it is; its files lie in the folder of the same name.
    """

    manifest: Path

    @functools.cached_property
    def facts(self) -> Mapping[str, Any]:
        """The manifest."""
        from memfit.pipeline._manifest import read_manifest

        return read_manifest(self.manifest)

    @property
    def unit(self) -> Any:
        """The unit, as in ``Context.unit``."""
        return self.facts["unit"]

    @property
    def result(self) -> Mapping[str, Any]:
        """What the stage returned."""
        found: Mapping[str, Any] = self.facts["result"]
        return found

    @property
    def dir(self) -> Path:
        """Its folder, with checkpoints and all that was saved."""
        return self.manifest.with_suffix("")

    def panel(self, name: str = "panel") -> Panel:
        """A saved panel, mapped read-only."""
        return self._load(name, "panel")  # type: ignore[no-any-return]

    def table(self, name: str) -> pa.Table:
        """A saved table, mapped."""
        return self._load(name, "table")

    def arrays(self, name: str) -> Mapping[str, npt.NDArray[Any]]:
        """Saved arrays by their names, mapped read-only."""
        return self._load(name, "arrays")  # type: ignore[no-any-return]

    def json(self, name: str) -> Any:
        """A saved mapping or list."""
        return self._load(name, "json")

    def path(self, name: str) -> Path:
        """A saved file or folder."""
        return self._load(name, "path")  # type: ignore[no-any-return]

    def _load(self, name: str, kind: str) -> Any:
        from memfit.pipeline import _artefacts

        return _artefacts.load_output(self.manifest, self.facts, name, kind)


@dataclass
class Context:
    """What a stage works with: one unit of it, in a process of its own.

    Attributes:
        unit: What this job is for: a number, a text or a mapping, one of the list that ``Stage.each`` names; None for
            a stage that runs once.
        own_seed: The seed; None for a stage that does not read it.
        dir: Its folder, for outputs and checkpoints. What a killed attempt left is still there; it is emptied when the
            settings, the code or the data have changed.
        panels_dir: The cache of panels, shared by all runs.
        key: What its result depends on, as a digest.
        previous: What the unit before left, in a stage whose units go in order; None for the first.
    """

    unit: Any
    own_seed: int | None
    dir: Path
    panels_dir: Path
    key: str = ""
    previous: Output | None = None
    needs: Mapping[str, Sequence[Output]] = field(default_factory=dict)
    meets: frozenset[str] = frozenset()
    saved: dict[str, Path] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """A seed of its own, from the run's seed and the unit alone."""
        if self.own_seed is None:
            raise UsageError(
                "this stage reads the seed, and does not say so.",
                rule="a stage gets what it reads, so that it runs again when that changes.",
                remedy='add it: Stage(..., reads=(..., "@seed"))',
            )
        return self.own_seed

    def __getitem__(self, stage: str) -> Output:
        """What a needed stage left: for the same unit, or the only one."""
        found = self.units(stage)
        if stage in self.meets or len(found) == 1:
            return found[0]
        raise UsageError(
            f"stage {stage} has {len(found)} units, and this job is for none of them alone.",
            rule="context[...] gives the output for the same unit, or the only one.",
            remedy=f'read them all: context.units("{stage}")',
        )

    def units(self, stage: str) -> Sequence[Output]:
        """What all units of a needed stage left, in their order."""
        if stage not in self.needs:
            raise UsageError(
                f"this stage reads stage {stage}, and does not say so.",
                rule="a stage gets what it needs, so that it runs again when that changes.",
                remedy=f"add it: Stage(..., needs=({', '.join(map(repr, [*self.needs, stage]))},))",
            )
        return self.needs[stage]

    def save(
        self, name: str, value: Panel | pa.Table | Mapping[str, Any] | Sequence[Any] | npt.NDArray[np.generic] | Path
    ) -> Path:
        """Save an output under a name, for the stages that need this one.

        A table becomes a Feather file, arrays one ``.npy`` file each, a mapping or list JSON. A panel stays in
        ``panels_dir``. A path names a file or folder of your own: one outside of ``dir`` is copied.

        Returns:
            Where it lies.
        """
        from memfit.pipeline import _artefacts

        path = self.saved[name] = _artefacts.save_output(self.dir, name, value)
        return path

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What an earlier attempt saved under this name, or what ``make`` gives now, saved."""
        from memfit.pipeline import _artefacts

        found = _artefacts.find_output(self.dir, name)
        self.saved[name] = found or self.save(name, make())
        return _artefacts.load_path(self.saved[name])  # type: ignore[no-any-return]

    def folder(self, name: str) -> Path:
        """A folder to fill; it is an output when the stage ends."""
        path = self.saved[name] = self.dir / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def report(self, name: str, value: float, step: int) -> None:
        """Say how a number stands while the stage still works: shown by ``memfit watch``, kept in the events."""
        record("report", name=name, value=float(value), step=int(step))


@dataclass(frozen=True)
class Probe:
    """How a training stage is measured without a run, by ``memfit bench loader`` and ``memfit estimate``.

    Attributes:
        loader: A unit's training batches, made by so many worker processes.
        step: A function that takes one training step of a unit's model on a batch.
    """

    loader: Callable[[Context, Any, int], Iterable[Any]] | None = None
    step: Callable[[Context, Any], Callable[[Any], object]] | None = None


@dataclass(frozen=True)
class Stage:
    """One step of a workload, for the whole run or for each of its units.

    Attributes:
        name: Letters, digits and ``_``.
        run: A function of a `Context` and the params, which returns numbers and other plain JSON that later stages
            depend on. Or a command: a tuple of words, or a line for the shell, with placeholders such as ``{unit}``,
            ``{dir}`` and ``{prepare}``; it depends on the settings and stages that they name.
        needs: The stages whose outputs it reads.
        after: Stages that it only waits for.
        each: The list whose items are its units: ``"fold in prepare.folds"`` for one in the result of stage prepare,
            ``"size in params.sizes"`` for one in the settings; a whole number n stands for 1 to n. Two stages with
            the same ``each`` meet unit by unit.
        reads: The top-level settings that it reads, and ``"@seed"``; None for all. Others are not there for it, and
            it does not run again when they change.
        holds: The stage of which all units but the first wait until this one has passed.
        in_order: Whether each unit waits for the one before; or the dotted name of a setting that says so.
        phases: The memory phases that each unit passes (``load``, ``train``, ``checkpoint``, ``validate``): a unit
            counts as measured when it has passed each once. Without them, when it has stopped growing.
        probe: How it is measured without a run.
    """

    name: str
    run: Callable[[Context, Any], Mapping[str, Any] | None] | tuple[str, ...] | str
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    each: str | None = None
    reads: tuple[str, ...] | None = None
    holds: str | None = None
    in_order: bool | str = False
    phases: tuple[str, ...] = ()
    probe: Probe | None = None


@dataclass(frozen=True)
class Workload(Generic[P]):
    """Stages that build on each other, named in a config by ``target: module:NAME``.

    Attributes:
        params: The model of the config's ``params``; an unknown key there is refused.
        stages: The stages, in any order that reads well.
        fingerprint: A digest of the raw data that the params name, for all stages or by the name of the stage that
            reads it; None where everything is in the params.

    Example:
        >>> class Params(BaseModel):
        ...     sizes: list[int] = [1, 2]
        >>> def square(context: Context, params: Params) -> dict[str, float]:
        ...     return {"area": context.unit**2}
        >>> Workload(Params, (Stage("square", square, each="size in params.sizes"),)).stage("square").each
        'size in params.sizes'
    """

    params: type[P]
    stages: tuple[Stage, ...]
    fingerprint: Callable[[P], str | Mapping[str, str]] | None = None

    def stage(self, name: str) -> Stage:
        """The stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    @classmethod
    def of(cls, function: Callable[..., Mapping[str, Any] | None]) -> Workload[Any]:
        """A workload of one stage, from a function of a context and of its settings as keywords with defaults."""
        names = list(inspect.signature(function, eval_str=True).parameters.values())
        if not names or names[0].kind not in (names[0].POSITIONAL_ONLY, names[0].POSITIONAL_OR_KEYWORD):
            raise UsageError(
                f"{function.__qualname__} takes no context.",
                rule="a function that is run gets a Context first; its other arguments are the settings.",
                remedy=f"write: def {function.__name__}(ctx, ...)",
            )
        fields: dict[str, Any] = {}
        for one in names[1:]:
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
                raise UsageError(
                    f"{function.__qualname__} takes {one}.",
                    rule="each setting of a function that is run has a name of its own.",
                    remedy=f"write: def {function.__name__}(ctx, learning_rate: float = 1e-3)",
                )
            kind = Any if one.annotation is one.empty else one.annotation
            fields[one.name] = (kind, ... if one.default is one.empty else one.default)
        params: type[BaseModel] = create_model(
            f"{function.__name__}_params", __config__=ConfigDict(extra="forbid", frozen=True), **fields
        )
        return Workload(params, (Stage(function.__name__, functools.partial(call_with_settings, function)),))


def call_with_settings(
    function: Callable[..., Mapping[str, Any] | None], context: Context, params: BaseModel
) -> Mapping[str, Any] | None:
    """Call a plain function with its settings as keywords; those that its unit names have the unit's values."""
    values = {name: getattr(params, name) for name in type(params).model_fields}
    own = context.unit if isinstance(context.unit, Mapping) else {}
    changed = {name: value for name, value in own.items() if name in values}
    if changed:
        params = type(params).model_validate(values | changed)
        values = {name: getattr(params, name) for name in values}
    return function(context, **values)
