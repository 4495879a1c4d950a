"""`mtb evidence`: what a folder of results holds, by digest, and whether it tells too much."""
