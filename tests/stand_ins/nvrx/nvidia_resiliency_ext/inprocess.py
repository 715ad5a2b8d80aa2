"""In-process restart, which is off unless a configuration asks for it."""


class CallWrapper:
    """What a restarted training function would be handed."""
