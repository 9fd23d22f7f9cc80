"""Find what makes a command hang or end by a kill, before it runs: ``memfit doctor``."""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.doctor._case import Interpreter as Interpreter
    from memfit.doctor._case import Setup as Setup
    from memfit.doctor._command import parse_command as parse_command
    from memfit.doctor._doctor import ask_interpreter as ask_interpreter
    from memfit.doctor._doctor import examine as examine
    from memfit.doctor._frameworks import explain_cores as explain_cores
    from memfit.doctor._frameworks import explain_stop as explain_stop

__all__ = []

__getattr__, __dir__ = load_lazily(__name__)
