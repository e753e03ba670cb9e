"""A small GPT and its data: what the language-model example trains."""
