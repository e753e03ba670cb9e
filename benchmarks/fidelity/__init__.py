"""Single-process simulations behind `benchmarks/bench_fidelity.py`."""
