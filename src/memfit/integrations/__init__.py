"""Show people outside of a run how it goes. Each integration is optional, and none can hold up or end a training."""

from typing import TYPE_CHECKING

from memfit._lazy import load_lazily

if TYPE_CHECKING:
    from memfit.integrations._notify import NotifySettings as NotifySettings
    from memfit.integrations._notify import notifier_of as notifier_of
    from memfit.integrations._track import TrackSettings as TrackSettings
    from memfit.integrations._track import start_trackers as start_trackers

__all__ = []

__getattr__, __dir__ = load_lazily(__name__)
