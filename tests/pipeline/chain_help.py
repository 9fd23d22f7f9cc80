"""What the stages of ``chain`` use, in a file of its own."""

from pathlib import Path


def squared(value: int) -> int:
    """The square."""
    return value**2


def data(params: object) -> dict[str, str]:
    path = Path("data.txt")
    return {"summed": path.read_text() if path.exists() else ""}
