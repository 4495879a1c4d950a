"""`mtb moe`: mixture-of-experts routing over all-to-all, measured phase by phase."""
