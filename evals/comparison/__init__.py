"""All policies on one text at an equal KV budget."""
