"""Pretraining and continued training, from text to an exported model. Start at pretrain.py."""
