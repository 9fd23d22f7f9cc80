"""What a user writes: a plain function, or a workload of stages that build on each other."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, create_model

from memfit.errors import UsageError
from memfit.jobs import load_target
from memfit.pipeline import _manifest
from memfit.rundir import record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from memfit.data import Panel

P = TypeVar("P", bound=BaseModel)
T = TypeVar("T")
_LOOK_SECONDS = 0.05


class Stop(Exception):
    """Raise this in a stage to end the run: memfit skips the stages that need it or come after it.

    Args:
        why: The reason, one sentence.
        exit_code: The exit code of the run; a gate takes 10 for yellow and 11 for red.
        result: The stage's result.

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
    """The result and the saved outputs of one unit of a stage, read when you ask for them.

    Attributes:
        manifest: The JSON file that describes it; its outputs lie in the folder of the same name.
    """

    manifest: Path

    @functools.cached_property
    def facts(self) -> Mapping[str, Any]:
        """The content of the manifest."""
        return _manifest.read_manifest(self.manifest)

    @property
    def unit(self) -> Any:
        """The unit, as in ``Context.unit``."""
        return self.facts["unit"]

    @property
    def result(self) -> Mapping[str, Any]:
        """The mapping that the stage returned."""
        found: Mapping[str, Any] = self.facts["result"]
        return found

    @property
    def dir(self) -> Path:
        """Its folder, with outputs and checkpoints."""
        return self.manifest.with_suffix("")

    def panel(self, name: str = "panel") -> Panel:
        """Return a saved panel, memory-mapped."""
        return self._load(name, "panel")  # type: ignore[no-any-return]

    def table(self, name: str) -> pa.Table:
        """Return a saved table, memory-mapped."""
        return self._load(name, "table")

    def arrays(self, name: str) -> Mapping[str, npt.NDArray[Any]]:
        """Return saved arrays by their names, memory-mapped."""
        return self._load(name, "arrays")  # type: ignore[no-any-return]

    def json(self, name: str) -> Any:
        """Return a saved mapping or list."""
        return self._load(name, "json")

    def path(self, name: str) -> Path:
        """Return the path of a saved output."""
        return self._load(name, "path")  # type: ignore[no-any-return]

    def _load(self, name: str, kind: str) -> Any:
        return _manifest.load_output(self.manifest, self.facts, name, kind)


@dataclass
class Context:
    """The first argument of a stage: what it works on, and where it saves.

    Attributes:
        unit: The unit of this job, one item of the list that ``Stage.each`` names: a number, a text or a mapping. None
            for a stage that runs once.
        own_seed: Makes the seed, which loads NumPy; None for a stage that does not read it.
        dir: Its folder, for outputs and checkpoints. It keeps what a killed attempt left. memfit empties it when the
            settings, the code or the data change.
        panels_dir: The cache of panels, shared by all runs.
        key: The digest of all that its result depends on.
        previous: The output of the unit before, with ``Stage.in_order``; None for the first.
        needs: The outputs of the stages that it needs, by stage.
        meets: The stages of ``needs`` with the same units.
        saved: The paths of its outputs so far, by name.
        rank: The rank of this process in its job's group; 0 in a job of one process. Rank 0 alone saves and reports.
    """

    unit: Any
    own_seed: Callable[[], int] | None
    dir: Path
    panels_dir: Path
    key: str = ""
    previous: Output | None = None
    needs: Mapping[str, Sequence[Output]] = field(default_factory=dict)
    meets: frozenset[str] = frozenset()
    saved: dict[str, Path] = field(default_factory=dict)
    rank: int = 0

    @property
    def seed(self) -> int:
        """The seed of this unit: it depends on the run's seed and the unit alone."""
        if self.own_seed is None:
            raise UsageError(
                "this stage reads the seed, and does not say so.",
                rule="a stage gets what it reads, so that it runs again when that changes.",
                remedy='add it: Stage(..., reads=(..., "@seed"))',
            )
        return self.own_seed()

    def __getitem__(self, stage: str) -> Output:
        """Return the output of a needed stage: for the same unit, or the only one."""
        found = self.units(stage)
        if stage in self.meets or len(found) == 1:
            return found[0]
        raise UsageError(
            f"stage {stage} has {len(found)} units, and this job is for none of them alone.",
            rule="context[...] gives the output for the same unit, or the only one.",
            remedy=f'read them all: context.units("{stage}")',
        )

    def units(self, stage: str) -> Sequence[Output]:
        """Return the outputs of all units of a needed stage, in their order."""
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
        """Save an output under a name, for the stages that need this one, and return its path.

        A table becomes a Feather file, arrays one ``.npy`` file each, a mapping or list JSON. A panel stays in
        ``panels_dir``. A file or folder of your own stays where it is in ``dir``, and is copied from elsewhere. On
        other ranks than 0 nothing is saved.
        """
        if self.rank:
            return _manifest.find_output(self.dir, name) or self.dir / name
        path = _manifest.save_output(self.dir, name, value)
        other = next((one for one, at in self.saved.items() if at == path and one != name), None)
        if other is not None and not (isinstance(value, Path) and value.resolve() == path.resolve()):
            raise UsageError(
                f"output {name} was written over output {other}: both are {path.name}.",
                rule="a file that is copied keeps its name, and each output has a file of its own.",
                remedy=f"rename the file, or save it from the stage's own folder: {path.with_name(name)}",
            )
        self.saved[name] = path
        return path

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return what an earlier attempt saved under this name; else save what ``make`` returns, and return that.

        Of several ranks, rank 0 alone makes it, and the others wait.
        """
        while (found := _manifest.find_output(self.dir, name)) is None and self.rank:
            time.sleep(_LOOK_SECONDS)
        self.saved[name] = found or self.save(name, make())
        return _manifest.load_path(self.saved[name])  # type: ignore[no-any-return]

    def report(self, name: str, value: float, step: int) -> None:
        """Write a number to the run's events while the stage works; ``memfit watch`` shows it."""
        if not self.rank:
            record("report", name=name, value=float(value), step=int(step))


@dataclass(frozen=True)
class Probe:
    """How ``estimate`` and ``run --plan`` look at a training stage without a run.

    Attributes:
        loader: Takes the context, the params and a number of workers; returns the training batches of a unit.
        step: Takes the context and the params; returns a function that takes one training step on a batch.
        model: Takes the params; returns the content of a model's config.json, the `memfit.estimation.Setup` that it is
            trained with, and its weights' folder. No data.
        settings: The setting that stands for an option of ``memfit estimate``, for those that the model has:
            ``{"--batch": "params.batch_size={}", "--lora 16": "params.adapters=true"}``. An estimate advises no others.
        memory: Takes the params; returns the bytes that one job of the stage takes at least, by arithmetic: on its GPU
            where it has one, else on the host. It needs no data. ``memfit tune`` refuses what is too large.
    """

    loader: Callable[[Context, Any, int], Iterable[Any]] | None = None
    step: Callable[[Context, Any], Callable[[Any], object]] | None = None
    model: Callable[[Any], tuple[Any, ...]] | None = None
    memory: Callable[[Any], int] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One step of a workload, for the whole run or for each of its units.

    Attributes:
        name: Letters, digits and ``_``.
        run: A function of a `Context` and the params that returns a mapping of plain JSON, on which later stages
            depend. Or a command: a tuple of words, or a line for the shell, with placeholders such as ``{unit}``,
            ``{dir}`` and ``{prepare}``; it depends on the settings and stages that they name.
        needs: The stages whose outputs it reads.
        after: Stages that it only waits for.
        each: The list whose items are its units: ``"fold in prepare.folds"`` in the result of stage prepare, or
            ``"size in params.sizes"`` in the settings; a whole number n means 1 to n. Two stages with the same
            ``each`` meet unit by unit.
        reads: The top-level settings that it reads, and ``"@seed"``; None for all. It cannot read others, and does
            not run again when they change.
        holds: The stage whose units wait for this one, except for the first.
        in_order: Whether each unit waits for the one before; or the dotted name of a setting that says so.
        phases: The memory phases that each unit passes (``load``, ``train``, ``checkpoint``, ``validate``): a unit
            counts as measured when it has passed each once. Without them, when it has stopped growing.
        probe: How to measure it without a run.
        check: Takes the params, and raises a ``ValueError`` or a `memfit.errors.UsageError` if this stage cannot run
            with them. Called before the first job of a run that includes the stage; the result depends on no check.
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
    check: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Workload(Generic[P]):
    """Stages that build on each other, named in a config by ``target: module:NAME``.

    Attributes:
        params: The model of the config's ``params``; an unknown key there is refused.
        stages: The stages, in any order that reads well.
        fingerprint: Takes the params and returns a digest of the raw data, or one for each stage by name; None if all
            data are in the params.
        choose: Takes the params and returns the names of the stages that a run with them has; None for all. A stage
            that needs one that is left out runs without it: ``context.needs`` does not have it.
        check: As `Stage.check`, for all runs. It is called first of all.

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
    choose: Callable[[P], Collection[str]] | None = None
    check: Callable[[P], None] | None = None

    def stage(self, name: str) -> Stage:
        """Return the stage of that name."""
        return next(stage for stage in self.stages if stage.name == name)

    @classmethod
    def of(cls, function: Callable[..., Mapping[str, Any] | None]) -> Workload[Any]:
        """Make a workload of one stage from a function of a context and of settings with defaults."""
        names = list(inspect.signature(function, eval_str=True).parameters.values())
        settings = names[1:]
        bad = [one for one in settings if one.kind not in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
        if bad or not names or names[0].kind not in (names[0].POSITIONAL_ONLY, names[0].POSITIONAL_OR_KEYWORD):
            raise UsageError(
                f"{function.__qualname__} takes {bad[0] if bad else 'no context'}.",
                rule="a function that is run takes a Context first; its other arguments are named settings.",
                remedy=f"write: def {function.__name__}(ctx, learning_rate: float = 1e-3)",
            )
        fields: dict[str, Any] = {}
        for one in settings:
            kind = Any if one.annotation is one.empty else one.annotation
            fields[one.name] = (kind, ... if one.default is one.empty else one.default)
        params: type[BaseModel] = create_model(
            f"{function.__name__}_params", __config__=ConfigDict(extra="forbid", frozen=True), **fields
        )
        return Workload(params, (Stage(function.__name__, functools.partial(call_with_settings, function)),))


def call_with_settings(
    function: Callable[..., Mapping[str, Any] | None], context: Context, params: BaseModel
) -> Mapping[str, Any] | None:
    """Call a plain function with its settings as keywords; the values of its unit override them."""
    values, own = dict(params), context.unit if isinstance(context.unit, Mapping) else {}
    if changed := {name: value for name, value in own.items() if name in values}:
        values = dict(type(params).model_validate(values | changed))
    return function(context, **values)


def load_workload(target: str) -> Workload[Any]:
    found = load_target(target)
    if isinstance(found, Workload):
        return found
    if inspect.isfunction(found):
        return Workload.of(found)
    raise UsageError(
        f"target '{target}' is a {type(found).__name__}.",
        rule="a run's target is a function, or a memfit.pipeline.Workload.",
        remedy="name the variable that holds it, for example memfit_workloads.ranker.stages:RANKER",
    )
