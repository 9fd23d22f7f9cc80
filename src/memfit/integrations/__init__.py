"""Tell people outside of a run how it goes. Each integration is optional, and none can hold up or end a training."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.integrations._notify import Notifier as Notifier
    from memfit.integrations._notify import NotifySettings as NotifySettings
    from memfit.integrations._notify import notifier_of as notifier_of

__all__ = ["Notifier", "NotifySettings", "notifier_of"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from memfit.integrations import _notify

        return getattr(_notify, name)
    from memfit.successors import missing_name

    raise missing_name(__name__, name)
