"""The new behaviour, as a tree that mirrors Megatron's: the override of megatron/core/x.py is core/x.py here."""
