#!/bin/sh
# transformers 5.23.0, Trainer(include_num_input_tokens_seen="non_padding"): batches without an attention mask lose real
# tokens from the count.
#
# `Trainer._track_num_input_tokens` (transformers/trainer.py) takes the sum of "attention_mask" if the batch has one,
# and otherwise counts the ids that are not `pad_token_id`. With a pad token that is the end-of-text token, as is usual
# for decoders, every end of a document is then left out, though rows of packed documents have no padding at all. One
# would expect all tokens of a batch without a mask: the model reads it so. The documentation names the value
# "non_padding" and no rule. `num_input_tokens_seen` is in the logs and in trainer_state.json.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 safetensors==0.8.0 tokenizers==0.23.3
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import sys, torch, transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
print("torch", torch.__version__, "transformers", transformers.__version__)
words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>", pad_token="</s>")
packed = torch.tensor([2, 3, 1, 4, 1, 2, 3, 1])  # three documents, each with its end
config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
found = {}
for mask in (False, True):
    rows = [{"input_ids": packed, "labels": packed} for _ in range(4)]
    if mask:
        rows = [{**row, "attention_mask": torch.ones_like(packed)} for row in rows]
    arguments = TrainingArguments(
        "out", max_steps=1, per_device_train_batch_size=4, include_num_input_tokens_seen="non_padding", report_to=[],
        use_cpu=True, save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )
    trainer = Trainer(
        LlamaForCausalLM(config), arguments, train_dataset=rows, processing_class=tokenizer,
        data_collator=transformers.default_data_collator,
    )
    trainer.train()
    found[mask] = trainer.state.num_input_tokens_seen
    print(f"4 rows of 8 tokens without padding, attention_mask: {mask}: {found[mask]} tokens seen")
holds = found == {False: 20, True: 32}
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
