"""`pytest -p megatron_mtp_patches.rehearsal.pytest_plugin`: Megatron's own unit tests on a CPU.

It installs the rehearsal when pytest loads it, before any conftest imports torch. Megatron's flag defaults do not
change: its tests set what they need.
"""

from megatron_mtp_patches import rehearsal

rehearsal.install(megatron_flags=False)
