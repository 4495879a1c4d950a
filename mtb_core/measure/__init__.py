"""What is measured, and how: times, memory, collectives, environment, and the result made of them."""
