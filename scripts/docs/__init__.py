"""The generated parts of README.md and docs/ (`python -m scripts.docs`), and samples of the tables that they quote."""
