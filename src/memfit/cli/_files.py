"""The model's file that a word of the command line names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memfit.errors import ConfigError


def read_model_config(path: Path) -> dict[str, Any]:
    """Return the content of a model's config.json, given the file or its folder."""
    file = path / "config.json" if path.is_dir() else path
    rule, found = "--hf-config takes a model's config.json, or the folder that holds it.", None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    except ValueError as error:
        what = f"is no JSON: {error}" if file.stat().st_size else "is empty"
    else:
        what = f"holds a {type(found).__name__}"
    if isinstance(found, dict):
        return found
    remedy = "download all of it from the model's page, or save it: model.config.save_pretrained(folder)"
    raise ConfigError(f"{file} {what}.", rule=rule, remedy=remedy)
