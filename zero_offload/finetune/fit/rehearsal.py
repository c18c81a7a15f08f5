"""A forward and backward of a folder's model on tensors without memory: how many bytes of activations a step needs.

Owns the parts of a rehearsed step. They are the model on meta as its config has it, torch's own operations, and TRL's
head that makes logits in parts. Operations have the shapes of a batch. Never reads weights or data. Each storage that
an operation makes is counted, from then until nothing refers to it. Memory that an operation takes and frees within
itself is not. The call: `rehearse`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_offload.base.config import OffloadConfig
from zero_offload.base.host import host_empty
from zero_offload.finetune.choices import CAUSAL, Lora
from zero_offload.finetune.fit.repeated import CountedBlocks, Like, NotAlike, left_out_of
from zero_offload.finetune.model.build import meta_model, recompute_blocks
from zero_offload.finetune.model.folder import ModelFolder
from zero_offload.model.first_forward import DtypeWatch, give_dtypes
from zero_offload.model.without_memory import without_memory
from zero_offload.plan.dtypes import resolve
from zero_offload.plan.model_spec import ModelSpec


@dataclass(frozen=True)
class Rehearsal:
    """Of one micro-batch of `rows` x `seq` tokens."""

    rows: int
    seq: int
    peak_bytes: int
    """The most at once of activations, logits and what operations make, with a parameter's gradient until it is
    complete; parameters are not counted."""
    saved_bytes: Mapping[str, int]
    """By unit, what its forward leaves for backward: with recompute, of blocks what they begin with. Under "" is the
    rest."""
    problem: str = ""
    """Why these are not a rehearsal's, but by arithmetic."""
    left_out: int = field(default=0, compare=False)
    """Blocks that did not run, since others are like them."""

    def of_rows(self, rows: int) -> Rehearsal:
        """Of a micro-batch of as many rows, at most: part of what one takes does not grow with them."""

        def grown(nbytes: int) -> int:
            return -(-nbytes * rows // self.rows)

        saved = {name: grown(nbytes) for name, nbytes in self.saved_bytes.items()}
        return replace(self, rows=rows, peak_bytes=grown(self.peak_bytes), saved_bytes=saved)


def rehearse(
    folder: ModelFolder,
    lora: Lora | None,
    config: OffloadConfig,
    rows: int,
    seq: int,
    *,
    recompute: bool,
    whole: bool = False,
) -> Rehearsal:
    """Run one micro-batch in the dtypes of `config`; some seconds for a model of 8B parameters, and no memory.

    Blocks that are like others are left out, unless the `whole` model is to run; both give the same bytes. Raises what
    the model raises for such a batch, such as more tokens than it has positions for. Raises ConfigError for an
    operation that would get floats of two dtypes.
    """
    step = _RehearsedStep(folder, lora, config, recompute=recompute)
    if left_out := {} if whole else left_out_of(step.model):
        try:
            return step.run(rows, seq, left_out)
        except Exception:  # of any model's code: some looks into blocks that were left out
            step = _RehearsedStep(folder, lora, config, recompute=recompute)
    return step.run(rows, seq, {})


class _RehearsedStep:
    """A model on meta, and one forward and backward of it."""

    def __init__(self, folder: ModelFolder, lora: Lora | None, config: OffloadConfig, *, recompute: bool) -> None:
        # Quantized weights are no other: what operations make of them is counted below.
        self.model: Any = meta_model(replace(folder, quantize=None, quantization=None), lora)
        self._folder = folder
        self._units = {unit.name for unit in ModelSpec.from_module(self.model).units}
        self._dtypes = resolve(self.model, config, strict=False)
        give_dtypes(self.model, self._dtypes)
        if recompute:
            recompute_blocks(self.model)
        self.model.train()
        _add_fused_lm_head()  # tables that packages make as they are imported need memory

    def run(self, rows: int, seq: int, left_out: Mapping[str, Like]) -> Rehearsal:
        """To be called once."""
        model, dtypes = self.model, self._dtypes
        largest = max(param.numel() for param in model.parameters())
        live, saved = _LiveBytes(), dict.fromkeys(("", *self._units), 0)
        blocks = CountedBlocks(model, left_out, live)
        with blocks.stand_ins(), without_memory(model):
            for param in model.parameters():
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(_drop)
            live.leave_out((*model.parameters(), *model.buffers()))
            watch = DtypeWatch(model, dtypes.compute)
            with live, watch, watch.names():
                with _saving(model, live, saved):
                    loss = _loss(model, self._folder, rows, seq)
                blocks.end_forward()
                loss.backward()
        made = largest * dtypes.compute.itemsize if self._folder.is_quantized else 0
        return Rehearsal(rows, seq, blocks.peak() + made, blocks.saved(saved), left_out=len(left_out))


def _add_fused_lm_head() -> Any:
    from trl.trainer.utils import add_fused_lm_head

    return add_fused_lm_head


def _drop(param: Tensor) -> None:
    param.grad = None


def _loss(model: Any, folder: ModelFolder, rows: int, seq: int) -> Tensor:
    ids = host_empty((rows, seq), torch.int64)
    # Samples that share a sequence, or are shorter than it, are told apart by a mask of this shape.
    mask = host_empty((rows, 1, seq, seq), torch.bool)
    if folder.task != CAUSAL:
        labels = ids if folder.task == "masked" else ids[:, 0]
        found: Tensor = model(input_ids=ids, labels=labels).loss
        return found
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    _add_fused_lm_head()(base, outputs=("log_probs", "entropy", "is_top1"))
    found = model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True).loss
    return found


class _LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are still referred to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self._peak = 0
        self._others = set[int]()
        self._sizes: dict[int, int] = {}
        self._block = ""
        self._makers: dict[int, str] = {}
        """By storage: the block that has made it and does not hand it on."""

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """These were there before."""
        self._others = {tensor.untyped_storage()._cdata for tensor in tensors}

    def size(self, tensor: Tensor) -> int:
        """Bytes of its storage; 0 if no operation has made it."""
        return self._sizes.get(tensor.untyped_storage()._cdata, 0)

    def take_peak(self) -> int:
        found, self._peak = self._peak, self.now
        return found

    def enter(self, block: str) -> None:
        self._block = block

    def hand_on(self, tensor: Tensor) -> None:
        self._makers.pop(tensor.untyped_storage()._cdata, None)

    def end_forward(self) -> None:
        """Backward uses all that blocks have saved."""
        self._makers.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._makers:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    maker = self._makers.get(tensor.untyped_storage()._cdata, self._block)
                    if maker != self._block:
                        raise NotAlike(f"{func} uses values of {maker} outside of it")
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._others or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        if self._block:
            self._makers[key] = self._block
        self.now += self._sizes[key]
        self._peak = max(self._peak, self.now)
        weakref.finalize(storage, self._end, key)

    def _end(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        self._makers.pop(key, None)


@contextmanager
def _saving(model: nn.Module, live: _LiveBytes, saved: dict[str, int]) -> Iterator[None]:
    """Add up what is saved for backward, each storage once, under the unit whose forward runs, or under ""."""
    units, known = [""], set[int]()

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in known:
            known.add(key)
            saved[units[-1]] += live.size(tensor)
        return tensor

    hooks = []
    for name, module in model.named_modules():
        if name in saved and name:
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: units.append(name)))
            hooks.append(module.register_forward_hook(lambda *_: [units.pop(), None][1]))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        for hook in hooks:
            hook.remove()
