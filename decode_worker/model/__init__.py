"""The model that a decode worker runs: checkpoint, RoPE, layers, tokenizer and sampling."""
