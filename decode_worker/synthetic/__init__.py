"""Models and stored packs with random content: what a demo and a benchmark measure without training or prefill."""
