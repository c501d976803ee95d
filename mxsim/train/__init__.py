"""Training: a byte-level corpus, a small mixture-of-experts language model and the loop that gives the loss curves."""
