"""What the benchmarks share: contenders, the gate that lets one of them run at a time, and the tables."""
