"""A study over the small workload, in a folder of its own."""

import pytest

from tuning.studies import config_of, lay_out

#: A module of the runs that tests start, imported from folders of their own.
collect_ignore = ["study_workload.py"]


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Writes a config, from ``config_of``'s arguments, and makes its folder the current one."""
    monkeypatch.chdir(tmp_path)
    return lambda params=None, tune=None, **top: lay_out(tmp_path, config_of(params, tune, **top))
