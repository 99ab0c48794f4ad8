"""MagicPIG (Chen et al. 2024) and other sparse attention."""
