"""Show the warnings of the patches where mcore-bridge hides those of the root logger."""

from __future__ import annotations

import logging
import sys

_LOGGERS = ("megatron_mtp_patches", "megatron_overrides")


def show_warnings() -> None:
    """Give the loggers of the patches a handler, if mcore-bridge has raised those of the root logger to ERROR.

    ms-swift and mcore-bridge do so when they are imported, if a library has added one (emerging_optimizers does). They
    show their own messages by handlers of their own.
    """
    levels = [handler.level for handler in logging.getLogger().handlers]
    if "mcore_bridge" not in sys.modules or not levels or min(levels) < logging.ERROR:
        return
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.addFilter(lambda record: record.levelno < logging.ERROR)  # the root logger shows the others
            logger.addHandler(handler)
