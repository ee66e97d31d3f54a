"""The sides of benchmarks/train_step.py, one file each: the same weights, packs, anchors and optimizer for everyone."""
