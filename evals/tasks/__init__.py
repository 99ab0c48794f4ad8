"""Long-context tasks after RULER, scored only where full attention solves them."""
