"""Tools on top of generation: comparing policies, advice, pictures. Start at measurement.py."""
