"""`mtb sweep`: a matrix of trainings, each in a process of its own, with every outcome recorded."""
