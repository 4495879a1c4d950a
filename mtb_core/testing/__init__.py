"""For tests of strategies: run them for real and compare what they did."""
