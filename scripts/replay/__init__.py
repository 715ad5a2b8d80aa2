"""The parts of scripts/replay_upstream.py."""
