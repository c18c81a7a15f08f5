"""Faults that training code is likely to have, each with the test that catches it.

A fault is named by what would be wrong for a user, and is a change of a line or two. When a text is not in the source
any more, point it at the line that does the same thing now; the behaviour and its test stay.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`edits`: (file of the package, its text, the wrong one). `test`: what must fail then, arguments of pytest."""

    behaviour: str
    edits: tuple[tuple[str, str, str], ...]
    test: str


def fault(behaviour: str, file: str, text: str, wrong: str, test: str) -> Fault:
    return Fault(behaviour, ((file, text, wrong),), test)


PLACEMENTS = "tests/parity/test_placements.py::test_every_pair_of_settings_trains_to_the_bits_of_plain_tensors"
RANKS = "tests/parity/test_ranks.py::test_two_ranks_follow_one_with_the_whole_batch"
STAGES = "tests/parity/test_stages.py::"
EXPERTS = "tests/parity/test_experts.py::"
QUANTIZED = "tests/models/test_quantized.py::"
QUANTIZED_VIEWS = "tests/models/test_quantized_views.py::"
LOADED_QUANTIZED = "tests/integrations/test_quantize_while_loading.py::"
BASE_FILES = "tests/unit/storage/files/test_base_files.py::"
SCALING = "tests/models/test_loss_scaling.py::"
TIES = "tests/models/test_ties_frozen_buffers.py"
EXPERT_GRADS = "tests/fake_gpu/test_expert_grads.py::"
EXPERT_GRADS_OF_RANKS = "tests/fake_gpu/test_expert_grads_ranks.py::"
KEPT = "tests/formats/test_kept_files.py::"
DCP = "tests/integrations/test_dcp.py::"
DATA = "tests/integrations/test_finetune_data.py::"
FINETUNE = "tests/integrations/test_finetune.py::"
CRASHES = "tests/crash/test_crashfs.py::test_a_crash_leaves_one_committed_step"

FAULTS = [
    # Parameters
    fault(
        "a forward uses a unit without waiting for its update",
        "runtime/prefetcher.py",
        "        unit.wait_for_update()\n        if unit.state is UnitState.AWAY:\n",
        "        if unit.state is UnitState.AWAY:\n",
        "tests/models/test_interleavings.py::test_a_forward_waits_for_the_update_of_each_unit",
    ),
    fault(
        "a unit that stays keeps its weights from before the update",
        "runtime/prefetcher.py",
        "tuple(s for s in unit.sections if s.layout.trainable or s in absent)",
        "tuple(s for s in unit.sections if s in absent)",
        RANKS,
    ),
    fault(
        "a unit in use is evicted",
        "runtime/prefetcher.py",
        "            and not (u.forward_uses or u.backward_uses or u.gathered_uses)\n",
        "",
        PLACEMENTS,
    ),
    fault(
        "adapters leave the device with the frozen weights of their block",
        "plan/placement.py",
        "            self._place_parts()\n",
        "            pass\n",
        "tests/unit/plan/test_search.py::"
        "test_trained_parts_and_their_states_rest_on_the_device_and_drives_have_frozen_weights_alone",
    ),
    fault(
        "a group of experts that was read before an update is used after it",
        "runtime/prefetcher.py",
        "        self._groups.outdate(stale)\n",
        "",
        "tests/parity/test_experts.py::test_experts_in_groups_train_to_the_bits_of_plain_tensors",
    ),
    fault(
        "prefetch takes memory of others for units that come late",
        "runtime/prefetcher.py",
        "                    if ahead >= frames_ahead:\n                        return\n",
        "",
        "tests/models/test_inference.py::test_what_fits_stays_between_forwards",
    ),
    fault(
        "a forward does not wait for the read of a unit",
        "runtime/units/param_loader.py",
        "        for transfer in self._transfers.get(unit.index, ()):\n            transfer.wait()\n",
        "",
        "tests/crash/test_damage.py::test_one_flipped_bit_anywhere_is_noticed",
    ),
    fault(
        "a backward runs through weights that were updated since its forward",
        "model/updates.py",
        "        torch.autograd.graph.increment_version(",
        "        list(",
        "tests/models/test_oddities.py::test_a_backward_through_weights_that_a_step_has_changed_raises",
    ),
    fault(
        "a rank reads its parameters to the place of another's",
        "runtime/units/param_loader.py",
        "section.flat.data_ptr() + self._shard_index * section.layout.shard_nbytes",
        "section.flat.data_ptr() + (1 - self._shard_index) * section.layout.shard_nbytes",
        RANKS,
    ),
    fault(
        "a replica of parameters is not gathered anew after an update",
        "runtime/prefetcher.py",
        "            section.shard.replica.outdate()",
        "            pass",
        STAGES + "test_replicas_serve_eval_and_later_forwards",
    ),
    # Experts in groups
    fault(
        "the last expert of a group is left out",
        "runtime/experts.py",
        "            yield range(used[0], used[-1] + 1)\n",
        "            yield range(used[0], max(used[-1], used[0] + 1))\n",
        EXPERTS + "test_experts_in_groups_train_to_the_bits_of_plain_tensors",
    ),
    fault(
        "a rank skips groups that none of its own tokens chooses",
        "runtime/experts.py",
        "every=self._reader.gathers)",
        "every=False)",
        EXPERTS + "test_ranks_gather_groups_though_their_tokens_choose_other_experts",
    ),
    fault(
        "a part of a group that another rank holds is not gathered",
        "runtime/units/groups.py",
        "self._gather(memory, name, memory.layout.parts)",
        "self._gather(memory, name, memory.layout.parts[:-1])",
        EXPERTS + "test_ranks_gather_groups_though_their_tokens_choose_other_experts",
    ),
    fault(
        "a group that begins inside of a block is taken from the begin of the block",
        "plan/groups.py",
        "return self.offset + (self.begin - self.first) * itemsize",
        "return self.offset",
        EXPERTS + "test_groups_that_begin_inside_of_a_block_of_the_drive",
    ),
    fault(
        "a backward computes experts without the autocast of their forward",
        "runtime/experts.py",
        "            for autocast in call.autocasts:\n",
        "            for autocast in ():\n",
        EXPERTS + "test_autocast",
    ),
    fault(
        "a block that runs again reads its experts a third time",
        "runtime/experts.py",
        "output, call.spans = kept.detach(), []",
        "output = torch.zeros_like(hidden)",
        "tests/integrations/test_experts.py::test_a_checkpointed_block_reads_its_experts_no_third_time",
    ),
    fault(
        "a stream uses a group that another stream has waited for",
        "runtime/units/groups.py",
        "            memory.arrival.wait()\n",
        "",
        "tests/fake_gpu/test_experts.py::test_streams_take_turns_at_the_memory_of_groups",
    ),
    fault(
        "a group is written over while a stream computes with it",
        "runtime/units/groups.py",
        "            self._device.join(memory.users)\n",
        "",
        "tests/fake_gpu/test_experts.py::test_streams_take_turns_at_the_memory_of_groups",
    ),
    # A base that is read where it lies
    fault(
        "bytes of a base that change after their first read are trained on",
        "storage/files/base_files.py",
        "op = IoOp.READ if group.is_verified else IoOp.READ_UNVERIFIED",
        "op = IoOp.READ_UNVERIFIED",
        "tests/models/test_base.py::test_a_block_that_changes_while_a_model_trains",
    ),
    fault(
        "a resumed run does not know what it has read of the base before",
        "storage/files/base_file.py",
        "        self.known |= known\n",
        "        pass\n",
        "tests/crash/test_base.py::test_what_a_committed_step_has_read_is_verified_after_a_kill",
    ),
    fault(
        "another base in the place of the first one is taken for it",
        "storage/files/base_file.py",
        "            if self.known[block] and self.crcs[block] != other.crcs[block]:",
        "            if False:",
        "tests/unit/storage/files/test_base_files.py::test_a_copy_elsewhere",
    ),
    fault(
        "a generation still names the base for a section that was written since",
        "storage/shards/store.py",
        "        self.finish_update(shard)\n        self._leave_base(shard)\n",
        "        self.finish_update(shard)\n",
        "tests/models/test_base.py::test_a_write_makes_a_copy_of_our_own",
    ),
    fault(
        "padding between what is read of a base keeps the bytes of another unit",
        "storage/files/base_files.py",
        "        ctypes.memset(address + at - begin, 0, low - at)\n",
        "",
        "tests/unit/storage/files/test_base_files.py::test_what_comes_is_what_files_have_and_zeros_between",
    ),
    fault(
        "a block of a base is not compared with what another first read of it has brought",
        "storage/files/base_files.py",
        "            if file.known[block] and found != int(file.crcs[block]):\n                raise",
        "            if False:\n                raise",
        BASE_FILES + "test_two_first_reads_of_a_block_at_once",
    ),
    fault(
        "blocks of a base that are read for the first time share the checksums of known ones",
        "storage/files/base_files.py",
        "self.nbytes % SECTOR != 0 or is_known != self.is_verified:",
        "self.nbytes % SECTOR != 0:",
        BASE_FILES + "test_known_and_new_blocks_in_one_read",
    ),
    fault(
        "what a generation has read of a base does not count where the file is open already",
        "storage/files/base_files.py",
        "                known.learn(file.hashes)\n",
        "                pass\n",
        BASE_FILES + "test_what_a_generation_has_read_is_known_of_a_file_that_is_open_too",
    ),
    fault(
        "a generation names a base of which another file has taken the place",
        "storage/files/base_file.py",
        '        if (info.st_dev, info.st_ino) != self._identity:\n            return "was replaced',
        '        if False:\n            return "was replaced',
        BASE_FILES + "test_a_name_that_leads_elsewhere",
    ),
    fault(
        "a rank reads another rank's part of the base",
        "storage/shards/shard.py",
        "first, itemsize = self.shard_index * self.layout.shard_nbytes, self.layout.dtype.itemsize",
        "first, itemsize = 0, self.layout.dtype.itemsize",
        "tests/parity/test_base_ranks.py::test_losses_are_those_of_one_rank",
    ),
    # Gradients
    fault(
        "a second micro-batch replaces the gradient of the first",
        "runtime/grads/gradients.py",
        "section.entry.add(index, grad, adds=index in section.holding)",
        "section.entry.add(index, grad, adds=False)",
        PLACEMENTS,
    ),
    fault(
        "gradients of several backwards are added in 16 bits",
        "runtime/grads/section.py",
        "wide = self.widen() if again or grad.dtype != partial.dtype else partial",
        "wide = partial",
        "tests/parity/test_accumulate.py::test_ranks_train_as_in_the_loop_that_reduces_once",
    ),
    fault(
        "the first gradients are lost where a section is widened to fp32",
        "storage/shards/grad_store.py",
        "            self.open().copy_(narrow)",
        "            self.open().zero_()",
        PLACEMENTS,
    ),
    fault(
        "a reduction's results go to other sections of its bucket",
        "runtime/grads/reductions.py",
        "zip(sections, shards, strict=True)",
        "zip(sections, reversed(shards), strict=True)",
        RANKS,
    ),
    fault(
        "gradients of ranks are added up, where their mean is asked for",
        "runtime/ranks/collectives.py",
        "shard.float().div_(self._divisor)",
        "shard.float()",
        RANKS,
    ),
    fault(
        "what no parameter has a gradient of is sent uncleared to other ranks",
        "runtime/grads/section.py",
        "            partial[begin:end].zero_()",
        "            pass",
        "tests/parity/test_wide_sections.py",
    ),
    fault(
        "the norm leaves out gradients that no backward has reduced",
        "runtime/grads/gradients.py",
        "        self.reduce_waiting()\n        return self._squares(params)[0]",
        "        return self._squares(params)[0]",
        STAGES + "test_what_no_backward_reduced_the_norm_does",
    ),
    fault(
        "the norm leaves out a section that is complete late",
        "runtime/grads/gradients.py",
        "            total += squares / section.layout.num_copies",
        "            total += squares / section.layout.num_copies if len(indices) == len(section.params) else 0.0",
        TIES + "::test_the_norm_counts_sections_of_which_a_part_is_unused",
    ),
    fault(
        "gradients are not clipped",
        "model/updates.py",
        "factors.get(index, 1.0) / self._grads.loss_scale",
        "1.0 / self._grads.loss_scale",
        PLACEMENTS,
    ),
    fault(
        "the loss scale is not divided out",
        "model/updates.py",
        "factors.get(index, 1.0) / self._grads.loss_scale",
        "factors.get(index, 1.0)",
        SCALING + "test_a_power_of_two_changes_no_bit",
    ),
    fault(
        "a gradient that is not finite is not seen",
        "runtime/grads/gradients.py",
        "                not (each.finite and math.isfinite(factors.get(index, 1.0)))\n",
        "                not math.isfinite(factors.get(index, 1.0))\n",
        "tests/models/test_exceptions.py::test_a_gradient_that_is_not_finite_skips_the_step",
    ),
    fault(
        "an expert without tokens has a gradient of an earlier layer",
        "storage/shards/grad_downloads.py",
        "        grad.values[index].zero_()\n",
        "        pass\n",
        EXPERT_GRADS + "test_experts_without_tokens_have_zeros",
    ),
    fault(
        "of two micro-batches' gradients of experts the first is lost",
        "runtime/grads/section.py",
        "        if index in self._sliced:\n",
        "        if False:\n",
        EXPERT_GRADS + "test_whatever_looks_at_gradients[zo.accumulate-cpu-fp32]",
    ),
    fault(
        "gradients of experts pile up on the GPU while they leave",
        "storage/shards/grad_downloads.py",
        "        self.make_room(flat.nbytes)\n        grad.last",
        "        grad.last",
        EXPERT_GRADS + "test_backward_takes_a_few_experts_of_the_device_and_no_layer",
    ),
    fault(
        "gradients of a backward that broke off keep their staging",
        "storage/shards/grad_downloads.py",
        "        while self._open:\n            self._close(self._open[-1])\n",
        "",
        EXPERT_GRADS + "test_gradients_of_a_backward_that_breaks_off_are_dropped_and_their_staging_is_free",
    ),
    fault(
        "over ranks, of two micro-batches' gradients of experts the last is lost",
        "runtime/grads/section.py",
        "        self._widened(index).add_(self._on_host(staged))\n",
        "        self._widened(index)\n",
        EXPERT_GRADS_OF_RANKS + "test_slices_train_to_the_bits_of_whole_gradients",
    ),
    fault(
        "gradients of experts come back to a GPU before they have left it",
        "storage/shards/grad_downloads.py",
        "            grad.last.take()\n        return grad.flat",
        "            pass\n        return grad.flat",
        EXPERT_GRADS_OF_RANKS + "test_slices_train_to_the_bits_of_whole_gradients",
    ),
    fault(
        "gradients of experts come back from staging that a later layer fills",
        "runtime/grads/section.py",
        "                self._sums[index].last = handoff\n",
        "",
        EXPERT_GRADS_OF_RANKS + "test_slices_train_to_the_bits_of_whole_gradients",
    ),
    fault(
        "a rank that meets no expert of a layer leaves its reduction out",
        "runtime/grads/gradients.py",
        "        if not self.reduces or self.coming:\n            return False\n",
        "        if True:\n            return False\n",
        EXPERTS + "test_a_rank_that_meets_no_expert_adds_zeros",
    ),
    fault(
        "a hook of the program finds a gradient without memory",
        "runtime/grads/gradients.py",
        "        if section.fresh is None or downloads is None or has_hooks(param):\n",
        "        if section.fresh is None or downloads is None:\n",
        EXPERT_GRADS + "test_whatever_looks_at_gradients",
    ),
    fault(
        "a factor that is a tensor on a GPU is not read by the step",
        "runtime/grads/gradients.py",
        "torch.stack([*factors.values()]).tolist()",
        "[1.0] * len(factors)",
        "tests/fake_gpu/test_grad_handle.py::test_torchs_scaler_and_clip_on_every_tier",
    ),
    fault(
        "a factor of one stream is read by another before it is made",
        "runtime/grads/gradients.py",
        "            self._device.join([stream])\n",
        "",
        "tests/fake_gpu/test_grad_handle.py::test_clipping_on_one_stream_is_seen_on_another",
    ),
    fault(
        "the norm of .grad is that before it was scaled",
        "runtime/grads/gradients.py",
        "        norm = found.rows[found.at[id(param)]] * factor\n",
        "        norm = found.rows[found.at[id(param)]] * 1.0\n",
        "tests/unit/runtime/grads/test_handle.py::test_changes_are_those_of_the_gradient",
    ),
    fault(
        "the norm of .grad is of this rank's part alone",
        "runtime/grads/gradients.py",
        "            sums = self._collectives.sum_over_shards(found)\n",
        "            sums = found\n",
        "tests/parity/test_grad_handle.py::test_ranks_clip_alike",
    ),
    fault(
        "a gradient that one rank alone has changed is taken",
        "model/runtime.py",
        "together(call + self.grads.changes(), notice)",
        "together(call, notice)",
        "tests/parity/test_grad_handle.py::test_what_one_rank_does_alone_is_an_error_of_all",
    ),
    fault(
        "the handle of a gradient that is over answers for the next one",
        "runtime/grads/gradients.py",
        "            section.lives.pop(index, None)\n",
        "            pass\n",
        "tests/unit/runtime/grads/test_handle.py::test_a_handle_ends_with_its_gradient",
    ),
    fault(
        "a gradient that one rank alone has dropped is missing there",
        "runtime/grads/gradients.py",
        '                self._note_change("dropped", section, indices)\n',
        "                pass\n",
        "tests/parity/test_grad_handle.py::test_what_one_rank_does_alone_is_an_error_of_all",
    ),
    fault(
        "a gradient that is over is put back, and nothing is said",
        "model/params.py",
        "            self._grads.check_held(param, grad.life)\n            return\n",
        "            return\n",
        "tests/unit/runtime/grads/test_handle.py::test_a_gradient_that_is_over_is_not_put_back",
    ),
    fault(
        "zeros hide the gradient that another rank adds",
        "runtime/grads/gradients.py",
        "        self.zeroed.difference_update(section.params[index] for index in indices)\n",
        "",
        "tests/parity/test_grad_handle.py::test_gradients_that_one_rank_alone_adds",
    ),
    fault(
        "a hook changes what one micro-batch adds, in place of the sum",
        "runtime/units/guard.py",
        "            if not (is_first or is_same):\n",
        "            if False:\n",
        "tests/unit/runtime/grads/test_handle.py::test_a_hook_that_changes_what_is_added_to_earlier_gradients_raises",
    ),
    fault(
        "a hook on a gradient that is registered after zo.offload finds it gone",
        "runtime/units/guard.py",
        "        hooks[number] = hooks.pop(number)",
        "        hooks.move_to_end(number)",
        "tests/unit/runtime/grads/test_handle.py::test_hooks_see_the_gradient_whenever_they_are_registered",
    ),
    fault(
        "tables that layers share are the tensor of one layer alone",
        "plan/quantized.py",
        'return (id(self.tensor), "") if isinstance(owner, dict) else (id(owner), key)',
        'return (id(self.tensor), "")',
        QUANTIZED + "test_tables_that_layers_share_are_one_in_each",
    ),
    fault(
        "scales of quantized weights are rounded to the compute dtype",
        "plan/quantized.py",
        "kind is not None or name in companions or",
        "kind is not None or",
        QUANTIZED + "test_what_moves_keeps_its_dtype_and_its_strides",
    ),
    fault(
        "a state dict has a wrong offset of scales that are quantized too",
        "plan/quantized.py",
        "            words[_OFFSET] = number\n",
        "            words[_OFFSET] = 0.0\n",
        "tests/integrations/test_quantized_files.py::test_state_dicts_and_folders",
    ),
    fault(
        "a weight is quantized from the dtype of its file",
        "integrations/quantize.py",
        ".view(weight.original.shape).to(weight.original.dtype)",
        ".view(weight.original.shape)",
        LOADED_QUANTIZED + "test_a_weight_is_quantized_from_the_models_dtype",
    ),
    fault(
        "scales that wait for their section are those of another weight",
        "integrations/quantize.py",
        "        return self._parts.pop((id(weight), name), None)\n",
        "        return self._parts.pop(next((key for key in self._parts if key[1] == name), (0, name)), None)\n",
        LOADED_QUANTIZED + "test_tensors_are_those_of_the_library",
    ),
    fault(
        "a view of a view of a quantized weight begins at another element",
        "runtime/units/guard.py",
        "        begin = of_dtype.storage_offset() + view.storage_offset()\n",
        "        begin = of_dtype.storage_offset()\n",
        QUANTIZED_VIEWS + "test_a_view_of_a_view_is_the_right_part",
    ),
    fault(
        "values that a layer makes of its quantized weight stay until backward",
        "runtime/units/derived.py",
        "            return Derived.made(result, step, version)\n",
        "            return result\n",
        QUANTIZED_VIEWS + "test_values_that_a_layer_makes_are_not_saved",
    ),
    fault(
        "values of quantized weights that were changed in place are made again as they were",
        "runtime/units/derived.py",
        "        return self._version == self.version\n",
        "        return True\n",
        QUANTIZED_VIEWS + "test_what_draws_random_numbers_or_is_changed_is_saved_itself",
    ),
    fault(
        "backward draws the random numbers of quantized weights again",
        "runtime/units/derived.py",
        "traits.draws or not torch.is_grad_enabled()",
        "not torch.is_grad_enabled()",
        QUANTIZED_VIEWS + "test_what_draws_random_numbers_or_is_changed_is_saved_itself",
    ),
    fault(
        "views of quantized weights hold their units from forward to backward",
        "runtime/units/guard.py",
        "        return wrap_views(result, shown, _away_at)\n",
        "        return result\n",
        "tests/models/test_quantized_views.py::test_views_in_forward_have_no_memory",
    ),
    fault(
        "what backward makes of quantized weights again, it makes of tables as they are by then",
        "runtime/units/derived.py",
        "return each.clone() if takes_part else each  # it may be changed",
        "return each",
        QUANTIZED_VIEWS + "test_a_table_that_is_changed_later_counts_as_it_was",
    ),
    fault(
        "what backward makes of quantized weights again, it makes of parameters as they are by then",
        "runtime/units/derived.py",
        "        return all(param._version == version for param, version in self.versions.values())\n",
        "        return True\n",
        QUANTIZED_VIEWS + "test_a_parameter_that_is_changed_later_counts_as_it_was",
    ),
    fault(
        "values of quantized weights that were changed past torch's count are made again as they were",
        "runtime/saved/tensors.py",
        "            self._writes_derived = True  #",
        "            pass  #",
        "tests/models/test_quantized_use.py::test_changes_that_torch_does_not_count",
    ),
    fault(
        "a block that runs again keeps its unit when an operation has used it before",
        "runtime/pass_tracker.py",
        "        if unit.backward_uses > 0 and not unit.used_by_operations:\n",
        "        if unit.backward_uses > 0:\n",
        "tests/models/test_quantized_views.py::test_a_backward_holds_one_block",
    ),
    fault(
        "zero_grad leaves the gradients for the next step",
        "model/params.py",
        "        self._grads.clear(params, by_program=True)",
        "        pass",
        "tests/parity/test_reference.py::test_dropped_steps_leave_no_trace",
    ),
    fault(
        "a backward that broke off leaves its gradients for the next step",
        "runtime/grads/gradients.py",
        "            found = found or bool(indices)\n            self._clear(section, indices)\n",
        "            found = found or bool(indices)\n",
        "tests/models/test_exceptions.py::test_without_zero_grad_the_broken_gradients_are_dropped",
    ),
    # Updates
    fault(
        "an update does not wait for the states that it reads",
        "optim/pipeline.py",
        "        chunks.wait()\n",
        "",
        PLACEMENTS,
    ),
    fault(
        "an update takes the gradients of another chunk",
        "optim/pipeline.py",
        "grad=grad + ahead * section.grads.dtype.itemsize",
        "grad=grad",
        "tests/unit/optim/test_pipeline.py::test_all_chunks_at_once_are_the_same_update",
    ),
    fault(
        "the last, shorter chunk of a shard is left out",
        "optim/pipeline.py",
        "            count = len(section.shard.layout.chunks())\n",
        "            count = max(1, section.shard.layout.shard_numel >> 20)\n",
        "tests/parity/test_reference.py::test_attention_blocks_of_several_frames",
    ),
    fault(
        "the moments' bias is corrected for a step too many",
        "model/updates.py",
        "hyper.segment(part.start, part.stop, factor, param_steps[name])",
        "hyper.segment(part.start, part.stop, factor, param_steps[name] + 1)",
        PLACEMENTS,
    ),
    fault(
        "all param groups decay by the weight decay of the first",
        "optim/optimizers.py",
        'numbers(group, "lr", "eps", "weight_decay")',
        '[*numbers(group, "lr", "eps"), number(self.param_groups[0], "weight_decay")]',
        PLACEMENTS,
    ),
    fault(
        "a rank updates by the gradients' place in the first shard",
        "model/updates.py",
        "parts, factors, states = section.store.parts,",
        "parts, factors, states = [slice(*section.layout.in_shard(piece, 0)) for piece in section.layout.params],",
        RANKS,
    ),
    fault(
        "a parameter without a gradient is updated",
        "model/updates.py",
        "        for index in sorted(section.holding):",
        "        for index in range(len(section.params)):",
        TIES + "::test_unused_parameters_are_left_alone",
    ),
    fault(
        "a parameter that a step leaves alone is not delivered with its unit",
        "optim/pipeline.py",
        "        if delivery is not None and not section.complete:",
        "        if False:",
        TIES + "::test_what_forward_reads_and_no_step_changes_keeps_its_value",
    ),
    fault(
        "frozen parameters are trained",
        "plan/model_spec.py",
        "trainable=tensor.requires_grad,",
        "trainable=True,",
        TIES,
    ),
    fault(
        "a tied parameter is two",
        "plan/model_spec.py",
        "found.setdefault(slot.identity, []).append(slot)",
        "found.setdefault((len(found), slot.name), []).append(slot)",
        TIES + "::test_a_tied_head",
    ),
    fault(
        "what is rounded at random depends on the rank",
        "model/updates.py",
        "origin=self._shard_index * section.layout.shard_numel",
        "origin=0",
        "tests/parity/test_state_formats.py::test_stages_and_cuts_change_no_bit",
    ),
    # Files
    fault(
        "a block with a wrong checksum is trained on",
        "storage/files/native_engine.py",
        "        if result.status != IoStatus.DONE:",
        "        if result.status not in (IoStatus.DONE, IoStatus.CHECKSUM):",
        "tests/crash/test_damage.py::test_one_flipped_bit_anywhere_is_noticed",
    ),
    fault(
        "two runs use one directory",
        "storage/files/system.py",
        "        fcntl.flock(fd, operation)",
        "        fcntl.flock(fd, fcntl.LOCK_SH)",
        "tests/crash/test_damage.py::test_a_directory_in_use_names_who_uses_it",
    ),
    fault(
        "an update writes over the slots of the last commit",
        "storage/shards/shard.py",
        "        return (self.current + 1) % len(self.slots) if busy else self.current",
        "        return self.current",
        CRASHES,
    ),
    fault(
        "an update is read from the slots of the step before",
        "storage/shards/store.py",
        "            shard.current = shard.writable_slot()\n        shard.dirty = True",
        "            pass\n        shard.dirty = True",
        PLACEMENTS,
    ),
    Fault(
        "a manifest is written before the data is flushed",
        (
            (
                "checkpoint/generation.py",
                "            if self._durability is Durability.COMMIT:\n                self._swap.sync()\n"
                "            name = rank_manifest_name(self._ranks.rank, number)\n",
                "            name = rank_manifest_name(self._ranks.rank, number)\n",
            ),
            (
                "checkpoint/generation.py",
                "        self._number = number\n        self._store.mark_committed",
                "        self._swap.sync()\n        self._number = number\n        self._store.mark_committed",
            ),
        ),
        CRASHES,
    ),
    fault(
        "slots of a commit are free before it is complete",
        "storage/shards/snapshot.py",
        "        self._wait_until(lambda: not self._active)\n\n    def _launch",
        "        pass\n\n    def _launch",
        "tests/unit/storage/shards/test_snapshot.py",
    ),
    fault(
        "an update changes memory that a commit has still to write",
        "storage/shards/store.py",
        "        for copied in self.copied:\n            copied()\n",
        "",
        "tests/unit/storage/shards/test_snapshot.py tests/parity/test_commits.py",
    ),
    fault(
        "random number generators are not restored",
        "model/saving.py",
        "        if rng is not None:",
        "        if False:",
        KEPT + "test_one_rank_goes_on_with_the_same_bits",
    ),
    fault(
        "buffers are not restored",
        "model/saving.py",
        "        restore_buffers(model, _buffers(found), where)",
        "        pass",
        KEPT + "test_one_rank_goes_on_with_the_same_bits",
    ),
    fault(
        "the loss scale is not restored",
        "model/saving.py",
        "            scaler.load_state_dict(loss_scale)",
        "            pass",
        KEPT + "test_one_rank_goes_on_with_the_same_bits",
    ),
    fault(
        "hyperparameters are not restored",
        "model/saving.py",
        "        restore_groups(optimizer, _groups(found), where)",
        "        check_groups(optimizer, _groups(found), where)",
        KEPT + "test_one_rank_goes_on_with_the_same_bits",
    ),
    # Tools of others
    fault(
        "accelerate's mixed precision and compilation are ignored",
        "model/prepared.py",
        'self._prepare(caller.f_locals["self"], caller.f_locals["model"])',
        "pass",
        "tests/fake_gpu/test_tools.py",
    ),
    fault(
        "each rank trains on the same data under an accelerator that knows of one process",
        "model/prepared.py",
        "        if accelerator.num_processes != num_ranks:\n",
        "        if False:\n",
        "tests/integrations/test_accelerate.py::test_an_accelerator_that_knows_of_no_other_ranks_is_refused",
    ),
    # torch.distributed.checkpoint
    fault(
        "a value that is loaded alone keeps the residual of another",
        "model/parts.py",
        "                if (place.name, Component.RESIDUAL) in planned and Component.RESIDUAL in beside:",
        "                if Component.RESIDUAL in beside:",
        DCP + "test_a_value_alone_is_the_master",
    ),
    fault(
        "a load that ends too early is not noticed",
        "model/parts.py",
        "            self._life.half_loaded = _HALF\n",
        "",
        DCP + "test_a_load_that_ends_too_early_leaves_nothing_to_use",
    ),
    fault(
        "threads of a writer read into the same memory, and values are torn",
        "model/parts.py",
        "        with self._reading:\n",
        "        if True:\n",
        DCP + "test_several_threads_may_write",
    ),
    fault(
        "a load that broke off leaves numbers of steps without their moments",
        "model/parts.py",
        "        self._begin_writing()\n        self._states.edit(",
        "        self._states.edit(",
        DCP + "test_a_load_that_ends_after_a_number_of_steps_leaves_nothing_to_use",
    ),
    fault(
        "values that come after their masters round them, and nothing is said",
        "model/parts.py",
        "            self._states.values_replaced(load.values_alone)\n",
        "",
        DCP + "test_values_that_replace_completed_masters_are_told",
    ),
    fault(
        "a rank takes the first elements of a whole tensor for its own",
        "model/params.py",
        "[begin + offset : end + offset]",
        "[: end - begin]",
        DCP + "test_options_of_state_dicts",
    ),
    # Data of finetune
    fault(
        "words of the prompt are trained",
        "cli/finetune/turns.py",
        "        return _Turn(text, len(prompt), len(text) - len(self._only_behind_last))\n",
        "        return _Turn(text, len(prompt) - 1, len(text) - len(self._only_behind_last))\n",
        DATA + "test_what_the_model_generates_is_trained",
    ),
    fault(
        "the end of an earlier turn is not trained",
        "cli/finetune/turns.py",
        "            spans = [(turn.begin, turn.end) for turn in kept]",
        "            spans = [(turn.begin, turn.end - 1) for turn in kept]",
        DATA + "test_what_the_model_generates_is_trained",
    ),
    fault(
        "a turn is trained without the thought that it was generated with",
        "cli/finetune/turns.py",
        "if last.text.startswith(turn.text[: turn.end])]",
        "]",
        DATA + "test_turns_that_lose_their_thoughts_are_samples_of_their_own",
    ),
    fault(
        "samples in one sequence see each other",
        "cli/finetune/packing.py",
        'for samples in row.get("seq_lengths") or [length - num_more] for at in range(samples)]',
        "for at in range(length - num_more)]",
        DATA + "test_attention_stays_within_a_sample[llama]",
    ),
    fault(
        "a sample predicts the begin of the next in its sequence",
        "cli/finetune/packing.py",
        "labels = [label if at else -100 for",
        "labels = [label for",
        DATA + "test_a_batch_of_packed_rows",
    ),
    fault(
        "tokens of other data are used again",
        "cli/finetune/token_files.py",
        "data.append([each.form.kind, each.form.columns, self._digests[each.source]])",
        "data.append([each.form.kind, each.form.columns])",
        DATA + "test_tokens_are_made_once_and_anew_where_something_changes",
    ),
    fault(
        "a row is both trained and evaluated",
        "cli/finetune/token_files.py",
        "yield (number == kept) == self.is_kept",
        "yield (number == kept) or not self.is_kept",
        DATA + "test_a_split",
    ),
    # Runs of finetune
    fault(
        "the weights of another evaluation than the best are kept",
        "cli/finetune/trainers.py",
        "    return min(evaluations, key=",
        "    return max(evaluations, key=",
        FINETUNE + "test_the_best_weights_are_what_out_has[lora]",
    ),
    fault(
        "a run whose patience has ended trains on at its next start",
        "cli/finetune/trainers.py",
        "        if self.has_no_patience:  # a generation",
        "        if False:  # a generation",
        FINETUNE + "test_an_end_that_failed_is_completed",
    ),
    fault(
        "micro-batches of encoders add up",
        "cli/finetune/trainers.py",
        ', "compute_loss_func": loss_of_labels}',
        "}",
        "tests/integrations/test_finetune_losses.py::test_micro_batches_of_encoders_do_not_add_up[classify]",
    ),
    fault(
        "a loss that is not finite stays in those of later steps",
        "cli/finetune/trainers.py",
        "            self._tr_loss.zero_()  # Trainer",
        "            # Trainer",
        FINETUNE + "test_a_loss_that_is_not_finite_is_that_of_its_step_alone",
    ),
    fault(
        "a folder loads while its weights are another model's",
        "cli/finetune/outputs.py",
        "            if all((place / name).exists() for name in names):  # nothing in OUT is of these weights yet\n"
        "                self.withdraw()\n",
        "",
        FINETUNE + "test_each_moment_of_the_end_leaves_a_whole_model_or_none",
    ),
    fault(
        "the reference of preferences is the base of an adapter",
        "cli/finetune/run.py",
        'has_reference = config.method == "dpo" and not config.lora\n',
        'has_reference = config.method == "dpo" and not config.lora and job.folder.adapter is None\n',
        FINETUNE + "test_preferences_go_on_from_an_adapter_that_is_their_reference",
    ),
]
