"""`mtb compare`: which of two is faster, how sure that is, and what makes them unlike."""
