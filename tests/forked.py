"""Call a function in a forked child: it finds imported what the tests imported, and may limit or end its own process."""

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns in the child. An exception there is an AssertionError here, with its traceback."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send((function(*arguments), ""))
        except BaseException:
            sender.send((None, traceback.format_exc()))

    child = context.Process(target=run)
    child.start()
    sender.close()
    try:
        found, error = receiver.recv()
    finally:
        child.join()
    assert not error, error
    return found
