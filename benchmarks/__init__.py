"""What measures speed, memory and the promises of the README. `python -m benchmarks.NAME [--check] [--json FILE]`."""
