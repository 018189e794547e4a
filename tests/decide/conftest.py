"""A busy machine may take its time over an example: how long it takes decides nothing."""

from hypothesis import settings

settings.register_profile("calm", deadline=None)
settings.load_profile("calm")
