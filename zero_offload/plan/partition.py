"""The parts of a model's state that each ZeRO stage divides over the ranks: the only place that knows the stages apart.

    stage   optimizer   gradients   parameters   elements sent and received by a rank per parameter and step
      0     whole       whole       whole        2 n    all-reduce of the gradients of each of n backwards
      1     divided     whole       whole        2      one reduce-scatter of gradients, one all-gather of parameters
      2     divided     divided     whole        n + 1  the gradients of each backward
      3     divided     divided     divided      3 n    and parameters gathered for each forward and each backward

After Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020), sections 5
and 7. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_offload.base.config import OffloadConfig
from zero_offload.base.types import Branches


@dataclass(frozen=True)
class Partition:
    """How many ranks share each kind of state."""

    stage: int
    world_size: int
    num_replicas: int = 1
    """Groups of ranks that each divide the states among themselves (hybrid sharding) and hold the same."""
    any_branches: bool = False
    """True if each rank may use other units: which gradients there are is known to all only after backward."""
    num_here: int = 1
    """Ranks of one machine, of the largest where these differ; no count of bytes at rest asks for it."""

    @classmethod
    def of(cls, config: OffloadConfig, world_size: int, num_replicas: int = 1, num_here: int = 1) -> Partition:
        return cls(config.stage, world_size, num_replicas, config.branches == Branches.ANY, num_here)

    @property
    def optimizer_shards(self) -> int:
        """Shards of a section: the optimizer's states cut it, and with them everything that is cut at all."""
        return self.world_size // self.num_replicas if self.stage >= 1 else 1

    @property
    def grad_shards(self) -> int:
        """How many ranks hold a step's gradients, once backward is over, between them."""
        return self.optimizer_shards if self.stage >= 2 and not self.any_branches else 1

    @property
    def divides_params(self) -> bool:
        return self.stage == 3

    @property
    def param_shards(self) -> int:
        return self.optimizer_shards if self.divides_params else 1

    @property
    def replicates_params(self) -> bool:
        """True if every rank keeps whole parameters, of which it updates a shard: stages 1 and 2 on several ranks."""
        return self.param_shards < self.optimizer_shards

    @property
    def defers_reduction(self) -> bool:
        """True if gradients of several backwards are added up on each rank and reduced once, before the step."""
        return self.grad_shards < self.optimizer_shards or (self.any_branches and self.world_size > 1)


ONE_RANK = Partition(0, 1)
"""Nothing to divide: every stage is the same."""
