"""The command, in a process that finds no TransformerEngine, whose versions keep norms in other places."""

import sys

sys.modules["transformer_engine"] = None  # type: ignore[assignment]

from megatron_mtp_patches.cli import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
