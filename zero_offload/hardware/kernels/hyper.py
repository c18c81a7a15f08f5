"""Hyperparameters of one parameter for one step, captured by value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.words import STATES, Segment


@dataclass(frozen=True)
class Hyper:
    """What `beta1` and `beta2` are to a rule that has no betas, `Segment` says."""

    rule: Rule
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool

    @property
    def states(self) -> tuple[str, ...]:
        """What the rule keeps, by torch's names."""
        return STATES[self.rule]

    def first(self) -> Hyper:
        """The same where the states are new, whatever the step: SGD's momentum begins without dampening."""
        return replace(self, beta2=0.0) if self.rule in (Rule.SGD_MOMENTUM, Rule.SGD_NESTEROV) else self

    def going_on(self) -> Hyper:
        """The same where there are states already, whatever the step: Adagrad's sum has its initial value."""
        return replace(self, beta2=0.0) if self.rule is Rule.ADAGRAD else self

    def segment(self, begin: int, end: int, grad_scale: float, step: int) -> Segment:
        """Elements [begin, end), whose gradient is multiplied by `grad_scale` first, in their step number `step`."""
        scale = -grad_scale if self.maximize else grad_scale
        return Segment(begin, end, self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, scale, step)
