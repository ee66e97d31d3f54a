"""An exponential moving average of the weights, float32, beside the weights that train."""

from torch import Tensor


class WeightAverage:
    """average ← d·average + (1 - d)·master after every applied step, d = min(decay, (1 + n) / (10 + n)) at the n-th.

    The rising d (as in TensorFlow's ExponentialMovingAverage) lets a short run forget its first weights.
    """

    def __init__(self, master: Tensor, decay: float) -> None:
        """`master`: float32, flat; the average begins as its copy."""
        self._master = master
        self._decay = decay
        self.average = master.clone()

    def update(self, applied_steps: Tensor, finite: Tensor) -> None:
        """Take in the masters; both float32 [], on the device. Where `finite` is 0, nothing changes."""
        decay = ((1.0 + applied_steps) / (10.0 + applied_steps)).clamp(max=self._decay)
        self.average.lerp_(self._master, (1.0 - decay) * finite)

    def reset(self) -> None:
        """Begin anew at the masters, in place."""
        self.average.copy_(self._master)
