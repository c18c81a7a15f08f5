"""The job of which a run of `finetune` is planned: its folder, its settings, the sizes of its batches, its machine.

Never plans. The call: `FolderJob.of` for a run's settings and data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zero_offload.base.config import OffloadConfig
from zero_offload.finetune.choices import LiveChoice, Lora
from zero_offload.finetune.model.folder import ModelFolder
from zero_offload.finetune.settings import FinetuneConfig
from zero_offload.hardware.machines import ONE_RANK_ALONE, Cluster, Drives
from zero_offload.plan.step_time import StepBatch
from zero_offload.plan.wear import TBW_USUAL

if TYPE_CHECKING:
    from zero_offload.finetune.data.prepare import Prepared  # brings datasets and TRL


@dataclass(frozen=True)
class FolderJob:
    """A run of `finetune`, on this machine or on another."""

    folder: ModelFolder
    offload: OffloadConfig
    lora: Lora | None = None
    live: LiveChoice | None = None
    """Blocks that take turns, if some do."""
    optimizer: str = ""
    """As in `FinetuneConfig`."""
    lr: float = 0.0
    weight_decay: float = 0.0
    batch: int = 4
    """Samples (with packing: sequences; with DPO: pairs) per micro-batch and rank."""
    accumulate: int = 4
    seq: int = 1024
    steps: int = 0
    """Of the whole run; 0 where it is not known."""
    rows: int = 0
    """Samples, with packing sequences, of an epoch, likewise."""
    has_own_steps: bool = False
    """True if the steps do not follow from the data."""
    cluster: Cluster = ONE_RANK_ALONE
    method: str = "sft"
    packing: bool = True
    recompute: bool = True
    merge: bool = False
    evaluates: bool = False
    longest: int = 0
    """Tokens of the longest sample, where samples do not share sequences; 0 is `seq`."""
    mean_tokens: float = 0.0
    """Tokens of a sample on average, likewise."""
    words: tuple[str, ...] = ()
    """The arguments of the command behind `finetune`, where they are to be printed."""
    gpu: str | None = None
    """A GPU by name, for each rank, where it is another machine."""
    ram: str | None = None
    """Memory of each machine, likewise."""
    drives: Drives | None = None
    """Drives of each machine; None where they are directories here."""
    tbw: float = TBW_USUAL

    @classmethod
    def of(cls, config: FinetuneConfig, folder: ModelFolder, prepared: Prepared | None, ranks: int) -> FolderJob:
        """Without data the number of steps may not be known, and rows are taken to be full."""
        job = cls(
            folder,
            config.offload,
            config.adapters(),
            config.turns(),
            optimizer=config.optimizer,
            lr=config.lr,
            weight_decay=config.weight_decay,
            batch=config.batch,
            accumulate=config.accumulate,
            seq=config.seq,
            steps=config.steps,
            has_own_steps=config.steps > 0,
            cluster=Cluster(ranks),
            method="sft" if config.method == "auto" else config.method,
            packing=config.packing,
            recompute=config.recompute == "block",
            merge=config.merge,
            evaluates=bool(config.eval_data) or config.split > 0,
        )
        if prepared is None:
            return job
        counts, rows = prepared.counts, len(prepared.train)
        return replace(
            job,
            method=prepared.method,
            packing="seq_lengths" in prepared.train.column_names,
            steps=config.num_steps(rows, ranks),
            rows=rows,
            longest=counts.longest,
            mean_tokens=counts.tokens / counts.samples,
        )

    @property
    def ranks(self) -> int:
        return self.cluster.ranks

    @property
    def is_packed(self) -> bool:
        """True if rows are full: samples share them."""
        return self.method == "sft" and self.packing

    @property
    def samples(self) -> int:
        """Of a micro-batch: a pair is two."""
        return self.batch * (2 if self.method == "dpo" else 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of each, of the largest micro-batch."""
        return self.samples, self.seq if self.is_packed else min(self.longest or self.seq, self.seq)

    @property
    def mean_length(self) -> float:
        """Tokens of a sample on average."""
        return self.seq if self.is_packed else min(self.mean_tokens or self.shape[1], self.shape[1])

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on average."""
        return max(round(self.samples * self.mean_length), 1)

    def shorter(self, seq: int) -> FolderJob:
        """With sequences of so many tokens; of a packed epoch there are more then."""
        more = self.seq / seq if self.is_packed else 1.0
        steps = self.steps if self.has_own_steps else math.ceil(self.steps * more)
        return replace(self, seq=seq, steps=steps, rows=math.ceil(self.rows * more))

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.tokens * self.accumulate * self.ranks

    @property
    def is_elsewhere(self) -> bool:
        return self.gpu is not None or self.ram is not None or self.drives is not None

    def micro_batch(self) -> StepBatch:
        # Samples that share a row are told apart by a mask: attention computes all of it.
        sequence, has_reference = max(round(self.mean_length), 1), self.method == "dpo"
        return StepBatch(self.tokens, self.accumulate, sequence, self.recompute, has_reference=has_reference)
