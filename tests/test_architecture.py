"""ARCHITECTURE.md names every package of the library, and no file that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def test_every_package_of_the_library_has_a_line():
    table = "".join(line.rpartition(" | ")[0] for line in TEXT.splitlines() if line.startswith("| `src/"))
    packages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src/memfit").iterdir() if path.is_dir()]
    assert [name for name in sorted(packages) if "__" not in name and f"`{name}`" not in table] == []


def test_every_file_that_is_named_exists():
    named = set(re.findall(r"`((?:src|systems|tests|docs|benchmarks)/[\w/.-]+)`", TEXT))
    assert len(named) > 40
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


#: Where a test gives a private constant or function another value for its time, as no setting does. No other may.
PATCHED = {
    "tests/cli/test_plan.py": {"memfit.pipeline._watchers"},
    "tests/cli/test_stop.py": {"memfit.rundir._liveness"},
    "tests/data/test_build.py": {"memfit.data._build", "memfit.data._publish"},
    "tests/data/test_loader.py": {"memfit.data._position"},
    "tests/data/test_manifest.py": {"memfit.data._manifest"},
    "tests/data/test_pickles.py": {"memfit.data._pickles"},
    "tests/data/test_sequences.py": {"memfit.data._position"},
    "tests/data/test_source.py": {"memfit.data._source"},
    "systems/tests/finance/conftest.py": {"memfit_workloads.finance._verb"},
    "tests/integrations/test_notify.py": {"memfit.integrations._notify"},
    "tests/integrations/test_track.py": {"memfit.integrations._track"},
    "tests/jobs/test_local.py": {"memfit.jobs._local"},
    "tests/jobs/test_other_hosts.py": {"memfit.jobs._local", "memfit.memory._locks"},
    "tests/jobs/test_slurm.py": {"memfit.jobs._slurm"},
    "tests/jobs/test_warm.py": {"memfit.jobs._fork"},
    "tests/pipeline/test_canary.py": {"memfit.pipeline._watchers"},
    "tests/pipeline/test_estimate.py": {"memfit.pipeline._probe"},
    "tests/pipeline/test_loaders.py": {"memfit.pipeline._plan_run", "memfit.pipeline._probe"},
    "tests/training/stop_driver.py": {"memfit.training._journal"},
    "tests/training/test_flight.py": {"memfit.training._flight"},
    "tests/training/test_journal.py": {"memfit.training._journal"},
    "tests/planning/test_launch.py": {"memfit.pipeline._plan_run"},
    "tests/training/test_workers.py": {"memfit.training._workers"},
    "tests/tuning/test_study.py": {"memfit.tuning._sweep"},
    "tests/vm/guest/check_walls.py": {"memfit.memory._jobgroup"},
    "systems/tests/workloads/test_recipes.py": {"memfit.pipeline._plan_run"},
}


def test_tests_import_packages_and_name_a_private_module_only_to_patch_it():
    found = {}
    for path in sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "systems/tests").rglob("*.py")]):
        text = path.read_text()
        assert not re.search(r"from memfit(_workloads)?\b[\w.]*\._\w+ import", text), f"{path} imports private names"
        words = [f"{package}.{name}" for package, names in _IMPORTS.findall(text) for name in _PRIVATE.findall(names)]
        words += re.findall(r"\(\"(memfit[\w.]*?\._[a-z_]+)", text)
        if words:
            found[path.relative_to(ROOT).as_posix()] = set(words)
    assert found == PATCHED


_IMPORTS = re.compile(r"from (memfit[\w.]*) import ([^#\n]*)")
_PRIVATE = re.compile(r"(?<!\w)_[a-z][a-z_]*")
