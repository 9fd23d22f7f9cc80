"""Real containers for the tests of budgets."""

import pytest

from memory.containers import NoContainersError
from memory.containers import podman as run_podman


@pytest.fixture(scope="session")
def podman(tmp_path_factory):
    """Runs a command in a container by podman, as ``podman(*options, command=[...])``; gives its standard output."""
    try:
        with run_podman(tmp_path_factory.mktemp("podman")) as run:
            yield run
    except NoContainersError as reason:
        pytest.skip(str(reason))
