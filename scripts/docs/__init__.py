"""The generated parts of README.md and docs/ (`python -m scripts.docs`)."""
