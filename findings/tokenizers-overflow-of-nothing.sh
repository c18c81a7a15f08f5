#!/bin/sh
# tokenizers 0.23.3 (transformers 5.23.0), truncation to the number of special tokens: the overflowing row is longer
# than `max_length`.
#
# `Encoding::truncate` (tokenizers/src/tokenizer/encoding.rs) has a branch for a length of 0, which is `max_length` less
# the special tokens: the whole encoding becomes one overflowing part, uncut, and the post-processor then adds the
# special tokens to it. With `max_length` one higher each part is cut. transformers makes each part a row of
# `input_ids`, so a computed `max_length` that reaches 2 for a tokenizer with [CLS] and [SEP] gives rows of any length.
# One would expect no row above `max_length`: "Truncate to a maximum length specified with the argument `max_length`".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    tokenizers==0.23.3 transformers==5.23.0 numpy==2.4.6
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import sys, importlib.metadata, tokenizers, transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

print("tokenizers", tokenizers.__version__, "transformers", transformers.__version__)
words = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "b": 4, "c": 5}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.post_processor = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
found = {}
for length in (2, 3):
    rows = tokenizer(["a b c a b c"], truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
    words.enable_truncation(length)
    parts = words.encode("a b c a b c").overflowing
    found[length] = max(len(row) for row in rows), max(len(part.ids) for part in parts)
    print(f"max_length={length}: rows {rows}; longest part by tokenizers alone: {found[length][1]}")
holds = found == {2: (8, 8), 3: (3, 3)}
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
