"""Hash-table prefix caching (Lin 2024)."""
