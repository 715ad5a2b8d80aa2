"""From a fresh clone to two plots, as scripts/demo.sh does it; the experiments also make what docs/ shows."""
