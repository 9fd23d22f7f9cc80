"""Fine-tune a T5 on pairs of texts: generated recipes, or a JSON Lines file of one's own; see README.md."""
