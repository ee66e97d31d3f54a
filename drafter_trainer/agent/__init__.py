"""The trainer agent, `drafter-trainer worker`: keeps one training process at work for a control API. Torch-free."""
