"""From a fresh clone to two plots, as scripts/demo.sh does it."""
