"""The hand-off in your own program: load two models and their mapper, translate a cache, generate, hold a conversation.

The names of this package are also those of `kvferry` itself, which imports them when they are first used. It builds on
`prepare` (models), `kv` (caches, mapper) and the clock of `evaluate`; no stage of a run uses it.
"""

from kvferry.api.ferry import Ferry, load_mapper
from kvferry.api.handoff import Handed, Handoff
from kvferry.api.models import load_model
from kvferry.api.reader import Generation
from kvferry.api.session import Session, Switch

__all__ = ["Ferry", "Generation", "Handed", "Handoff", "Session", "Switch", "load_mapper", "load_model"]
