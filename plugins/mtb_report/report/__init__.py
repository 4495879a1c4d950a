"""`mtb report` and `mtb explain`: results for people to read."""
