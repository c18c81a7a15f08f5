"""`LiveBlocks`: a few blocks of a model are trained at a time; the others rest, without optimizer states.

Owns which parameters require a gradient in a step, and which states are deleted for that. `plan/turns.py` has the
order; the room of states is `thaw.py`'s and the runtime's. The calls: freeze the blocks, `zo.offload`, an optimizer
over all parameters; then `begin_step` before the forward of each step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zero_offload.base.errors import ConfigError
from zero_offload.plan.turns import BlockTurns
from zero_offload.standins.owners import owner_of
from zero_offload.standins.sources import Owner


class LiveBlocks:
    """`num_live` of `blocks` are trained at a time, and the others have no optimizer states.

    `order`: "random" draws them anew for each turn, as LISA does (arXiv 2403.17919). "ascending" and "descending" take
    neighbours, one group after the other from the input or the output on, as BAdam does (arXiv 2404.02827). A turn has
    `every` steps; 0 is 20 for "random" and 50 else, the defaults of LMFlow and of BAdam. The blocks of a step follow
    from `seed` and its number, so a resumed run goes on with the same ones.

    `master`: with "keep" a block that rests has its fp32 masters, so that small updates of its turns add up. With
    "drop" they are rounded to the 16-bit values when its turn ends, as in BAdam's program. Blocks that rest are then as
    large as frozen ones.

    Parameters outside of `blocks` stay as they are: LISA trains them always, BAdam never. Plain models and optimizers
    may be given too; there masters are an optimizer's states, and go with them. Raises ConfigError, with all problems,
    for numbers and orders that cannot be.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        num_live: int,
        *,
        order: str = "random",
        every: int = 0,
        seed: int = 0,
        master: str = "keep",
    ) -> None:
        self.blocks = tuple(blocks)
        for block in self.blocks:
            if not isinstance(block, nn.Module):
                raise ConfigError(f"LiveBlocks takes modules, and {type(block).__name__} is none of torch's")
        self.turns = BlockTurns(len(self.blocks), num_live, order, every, seed, master)
        self._live: tuple[int, ...] | None = None

    def names_in(self, model: nn.Module) -> list[set[str]]:
        """Names in `model` of the parameters of each block, which are frozen.

        Raises ConfigError where some are not, or are no parameters of `model`.
        """
        names = {id(param): name for name, param in model.named_parameters()}
        for number, block in enumerate(self.blocks):
            for name, param in block.named_parameters():
                if id(param) not in names or param.requires_grad:
                    what = "is trained" if id(param) in names else "is no parameter of the model"
                    raise ConfigError(
                        f"blocks that take turns are frozen before zo.offload and zo.plan, and {name} of block "
                        f"{number} {what}: call block.requires_grad_(False) on each block"
                    )
        return [{names[id(param)] for param in block.parameters()} for block in self.blocks]

    def at(self, step: int) -> tuple[int, ...]:
        """Indices of the blocks that live in `step`, counted from 0."""
        return self.turns.at(step)

    def begin_step(self, step: int, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
        """Train the blocks of `step`, counted from 0, and let the others rest; returns the former's indices.

        To be called between steps. States of blocks that rest are deleted, as are their gradients. Raises CapacityError
        where an offloaded model has no room for the states of a turn.
        """
        live = self.at(step)
        if live == self._live:
            return live
        self._live = None  # until it is done
        trained = {id(param) for index in live for param in self.blocks[index].parameters()}
        resting = [param for block in self.blocks for param in block.parameters() if id(param) not in trained]
        for param in resting:  # they give up their room first
            param.requires_grad_(False)
            param.grad = None
            optimizer.state.pop(param, None)
        if self.turns.master == "drop":
            _drop_masters(resting)
        for index in live:
            self.blocks[index].requires_grad_(True)
        self._live = live
        return live


def _drop_masters(params: Iterable[nn.Parameter]) -> None:
    found: dict[int, tuple[Owner, dict[int, nn.Parameter]]] = {}
    for param in params:
        if (owner := owner_of(param)) is not None:
            found.setdefault(id(owner), (owner, {}))[1][id(param)] = param
    for owner, owned in found.values():
        owner.drop_masters(owned.values())
