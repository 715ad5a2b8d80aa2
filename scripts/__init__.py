"""What a person runs from the repository's root: `python -m scripts.NAME --help`, scripts/demo.sh, scripts/test.sh."""
